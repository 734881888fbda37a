"""Retrain the reward model before each refresh of the reference: the outer loop of DeepSeekMath's Algorithm 1."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import TrainerCallback

from trl_steady.core.feature import Trainer
from trl_steady.core.processes import own_rows
from trl_steady.core.user_warning import warn_user
from trl_steady.features.reference.feature import Reference
from trl_steady.features.reward_model.examples import (
    Example,
    History,
    LabelledCompletion,
    hold_out,
    make_examples,
    prompt_key,
)
from trl_steady.features.reward_model.feature import STATE_FILE, RewardModel, RewardRefresh
from trl_steady.features.reward_model.labelling import RolloutCompletions, get_verdicts, label_steps, verdict_masks
from trl_steady.features.reward_model.training import fit, measure
from trl_steady.features.scalar_head.optimizer import ScalarHeadOptimizer
from trl_steady.trl_bridge import refuse_unsupported
from trl_steady.trl_bridge.rewards import group_size
from trl_steady.trl_bridge.rollout import forget_logs, generate_outside_training
from trl_steady.trl_bridge.trl_state import set_metric

_HELD_OUT = 0.1  # share of an iteration's prompts that measure the reward model and never train it
_OBJECTIVES = {"pairs": "outcome", "pointwise": "outcome", "steps": "steps"}


class RewardModelRefreshCallback(TrainerCallback):
    """Retrain a `RewardAdapter` on the policy's own completions, before each refresh of the reference.

    This is the other half of Algorithm 1 of DeepSeekMath (arXiv 2402.03300, section 4.1.4). At the end of an outer
    iteration the policy's completions become a training set, with 10 % of historical data. The reward model is trained
    further on it. Then the reference becomes the policy. The paper does not state the learning rate, the epochs and
    the loss of the retraining, or what the 10 % are taken from.

        trainer = GRPOTrainer(..., reward_funcs=RewardAdapter(source), args=GRPOConfig(sync_ref_model=True, ...))
        trainer.add_callback(RewardModelRefreshCallback(trainer, label_fn=is_right))

    Ten per cent of an iteration's prompts are held out: their completions measure the old and the new reward model,
    and are never trained on. All figures are logged as `reward_model/...` at the refresh, and kept in
    `trainer.reward_refreshes`. Every rollout logs `reward_model/true`, the share of right completions by `label_fn`. A
    rise of the reward without a rise of this share is reward hacking.

    Args:
        trainer: A trainer of trl-steady with a `RewardAdapter` and `sync_ref_model=True`.
        label_fn: `label_fn(prompts, completions, **columns)`, called as a reward function. Returns True, False or
            None (no verdict) for each completion.
        objective: `"pointwise"`: cross-entropy of right and wrong completions. `"pairs"`: Bradley-Terry loss of a
            right and a wrong completion of one prompt. `"steps"`: cross-entropy of steps, where a step is good if any
            of `continuations` from its end is right (Math-Shepherd, arXiv 2312.08935).
        replay_fraction: Share of historical examples in each training set, at least 0 and below 1.
        learning_rate: Learning rate of AdamW for the reward model, without weight decay. The optimizer's state is kept
            between refreshes.
        epochs: Passes over each training set. A batch has as many examples as an optimizer step has completions.
        continuations: Number of continuations of each step, with `objective="steps"`.
        history: The most examples that are kept for replay, a uniform sample of all that were trained on.
        accept: `"always"` as in the paper. `"held_out_not_worse"`: keep the old weights if the new ones know fewer
            held-out examples. The second is ours.

    Raises:
        ValueError: An argument is out of range, or does not fit the trainer.
    """

    def __init__(
        self,
        trainer: Any,
        *,
        label_fn: Callable[..., Any],
        objective: Literal["pairs", "pointwise", "steps"] = "pointwise",
        replay_fraction: float = 0.1,
        learning_rate: float = 2e-5,
        epochs: int = 1,
        continuations: int = 8,
        history: int = 10_000,
        accept: Literal["always", "held_out_not_worse"] = "always",
    ) -> None:
        refuse_unsupported((*type(trainer).__mro__, type(self)))
        feature = trainer.feature(RewardModel)
        reference = trainer.feature(Reference).callback
        if feature.model is None or feature.refresher or reference is None:
            raise ValueError(
                f"{type(self).__name__} retrains a RewardAdapter before each refresh of the reference. Make one for a "
                "trainer of trl-steady that has a RewardAdapter in reward_funcs, sync_ref_model=True, "
                "ref_model_sync_steps, and beta (or PPO's kl_coef) above 0."
            )
        if feature.adapter.head != _OBJECTIVES.get(objective):
            expected = "'pairs' or 'pointwise', or, with RewardAdapter(head='steps'), 'steps'"
            raise _unsuitable("objective", objective, expected)
        if accept not in ("always", "held_out_not_worse"):
            raise _unsuitable("accept", accept, "'always' or 'held_out_not_worse'")
        if not 0 <= replay_fraction < 1:
            raise _unsuitable("replay_fraction", replay_fraction, "a value at least 0 and below 1")
        if not learning_rate > 0:
            raise _unsuitable("learning_rate", learning_rate, "a value above 0")
        for option, value in (("epochs", epochs), ("continuations", continuations), ("history", history)):
            if value < 1:
                raise _unsuitable(option, value, "1 or more")
        self.trainer: Trainer = trainer
        self.label_fn = label_fn
        self.objective = objective
        self.replay_fraction = replay_fraction
        self.learning_rate = learning_rate
        self.epochs = epochs
        self.continuations = continuations
        self.accept = accept
        self.refreshes: list[RewardRefresh] = []
        self.history = History(history)
        self.optimizer = ScalarHeadOptimizer(feature.model, trainer)
        self._completions: list[LabelledCompletion] = []
        self._rollouts = 0
        self._model, self._scorer = feature.model, feature.scorer
        feature.refresher = self
        reference.before_refresh.append(self.refresh)

    # a rollout

    def collect(self, completions: RolloutCompletions) -> None:
        """Label this process's completions of a rollout. Keep them until the refresh if the policy trains on them."""
        trainer = self.trainer
        verdicts = get_verdicts(self.label_fn, completions.prompts, completions.completions, completions.columns)
        is_right, is_known = verdict_masks(verdicts)
        right = is_right.float()
        trainer.metrics.pooled(means={"reward_model/true": (right, is_known)})
        if not trainer.model.training:
            return
        labels = right.unsqueeze(1).tolist()
        if self.objective == "steps":
            labels = label_steps(trainer, self.label_fn, completions, verdicts, self.continuations)
        first = own_rows(trainer.accelerator, len(verdicts)).start
        for i, verdict in enumerate(verdicts):
            if verdict is None:
                continue
            item = LabelledCompletion(
                rollout=self._rollouts,
                index=first + i,
                group=(first + i) // group_size(trainer),
                prompt=torch.tensor(completions.prompt_ids[i], dtype=torch.int32),
                completion=torch.tensor(completions.completion_ids[i], dtype=torch.int32),
                ends=[],
                labels=[],
            )
            for end, label in zip(completions.ends[i], labels[i], strict=True):
                if not math.isnan(label):  # NaN: no verdict on a step
                    item.ends.append(end)
                    item.labels.append(label)
            self._completions.append(item)
        self._rollouts += 1

    # an outer iteration

    def fit(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Train a new reward model on the policy's completions of some prompts, before training.

        The trainer generates `num_generations` completions of each prompt, as in its rollouts. All processes must call
        this method with the same rows. A run that resumes restores the reward model, and need not call it.

        `rows` are like those of the trainer's dataset. Those that do not fill a rollout are left out.
        """
        trainer, args = self.trainer, self.trainer.args
        trainer.model.train()
        inputs: list[dict[str, Any]] = []
        for row in rows:
            for _ in range(trainer.num_generations):
                inputs.append(dict(row))
        size = args.generation_batch_size
        own = own_rows(trainer.accelerator, size // trainer.accelerator.num_processes)
        for start in range(0, len(inputs) - size + 1, size):
            rollout_inputs = inputs[start : start + size]
            generate_outside_training(trainer, rollout_inputs[own])
        forget_logs(trainer)  # these rollouts are not of training
        self.refresh(0)

    def refresh(self, step: int) -> None:
        """Train the reward model further on the completions since the last refresh. Every process must call this.

        `step` is the number of optimizer steps taken so far.
        """
        # all processes have the same completions, history and generator, and so the same examples
        generator = torch.Generator().manual_seed(self.trainer.args.seed * 1_000_003 + len(self.refreshes))
        completions = self._gather_completions()
        self._completions = []
        trained_on, measured_on = hold_out(completions, _HELD_OUT, generator)
        fresh = make_examples(trained_on, self.objective, generator)
        held_out = make_examples(measured_on, self.objective, generator)
        count = round(self.replay_fraction / (1 - self.replay_fraction) * len(fresh))
        replayed = self.history.draw(count, generator, without=set(map(prompt_key, held_out)))
        sets = {"fresh": fresh, "replayed": replayed, "held_out": held_out}
        if not fresh:
            warn_user(
                f"the reward model was not retrained before step {step + 1}: the {len(completions)} completions of "
                f"this iteration give no example with objective={self.objective!r}. Pairs need a right and a wrong "
                "completion of one prompt."
            )
        if self.accept != "always" and not held_out:
            warn_user(
                f"accept={self.accept!r} has nothing to compare: this iteration has no held-out example, and the new "
                "reward model is kept. Use rollouts with more prompts between refreshes."
            )
        old = None
        if not self._model.is_fresh:  # a new one scores all completions with 0, and knows nothing
            old = self._log_accuracy("old", sets)
        old_weights: dict[str, Tensor] = {}
        old_optimizer: dict[str, Tensor] = {}
        if self.accept != "always":
            for name, tensor in self._model.state().items():
                old_weights[name] = tensor.clone()  # on the CPU, `state` returns the parameters themselves
            old_optimizer = self.optimizer.state_dict()
        if fresh:
            fit(
                self._scorer,
                self.optimizer,
                fresh + replayed,
                epochs=self.epochs,
                learning_rate=self.learning_rate,
                generator=generator,
            )
        new = self._log_accuracy("new", sets)
        is_refused = self.accept != "always" and old is not None and new is not None and new < old
        if is_refused:
            self._model.load(old_weights, "the reward model")
            self.optimizer.load_state_dict(old_optimizer)
        self.history.add(fresh, generator)
        self.refreshes.append(RewardRefresh(step, len(fresh), len(replayed), not is_refused, old, new))
        set_metric(self.trainer, "reward_model/samples", float(len(fresh)))
        set_metric(self.trainer, "reward_model/replayed", float(len(replayed)))
        set_metric(self.trainer, "reward_model/refreshes", float(len(self.refreshes)))
        set_metric(self.trainer, "reward_model/accepted", float(not is_refused))

    def _gather_completions(self) -> list[LabelledCompletion]:
        """Return the completions of all processes, in the order of one process."""
        return sorted(gather_object(self._completions), key=lambda item: (item.rollout, item.index))

    def _log_accuracy(self, which: str, sets: Mapping[str, Sequence[Example]]) -> float | None:
        """Measure the reward model on each set for the log, and return the accuracy on held-out examples."""
        accuracies: dict[str, float | None] = {}
        for name, examples in sets.items():
            figures = measure(self._scorer, examples)
            for figure, value in figures.items():
                set_metric(self.trainer, f"reward_model/{which}/{name}/{figure}", value)
            accuracies[name] = figures.get("accuracy")
        return accuracies["held_out"]

    # checkpoints

    def save(self, folder: Path) -> None:
        """Add the completions since the last refresh, the optimizer and the history to a checkpoint."""
        completions = self._gather_completions()
        if self.trainer.args.should_save:
            state = {
                "answers": list(map(tuple, completions)),  # the name in files
                "rollouts": self._rollouts,
                "refreshes": list(map(tuple, self.refreshes)),
                "objective": self.objective,
                "history": self.history.state(),
                "optimizer": self.optimizer.state_dict(),
            }
            torch.save(state, folder / STATE_FILE)

    def load(self, folder: Path) -> None:
        """Restore what `save` has added, or raise a ValueError if its history is of another objective or size."""
        accelerator = self.trainer.accelerator
        state: dict[str, Any] = torch.load(folder / STATE_FILE, map_location="cpu", weights_only=True)
        saved = (state["objective"], state["history"]["size"])
        expected = (self.objective, self.history.size)
        if saved != expected:
            raise ValueError(
                f"{folder} has (objective, history)={saved!r}, and this run has {expected!r}. Set the options of "
                f"{type(self).__name__} to the same values, or begin a new run from its model."
            )
        completions = list(map(LabelledCompletion._make, state["answers"]))
        self._completions = completions[accelerator.process_index :: accelerator.num_processes]
        self._rollouts = state["rollouts"]
        self.refreshes = list(map(RewardRefresh._make, state["refreshes"]))
        self.optimizer.load_state_dict(state["optimizer"])
        self.history.load(state["history"])


def _unsuitable(option: str, value: object, expected: str) -> ValueError:
    return ValueError(f"{option}={value!r} does not work here. Set it to {expected}.")
