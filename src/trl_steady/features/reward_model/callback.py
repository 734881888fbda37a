"""Retrain the reward model before each move of the reference: the outer loop of DeepSeekMath's Algorithm 1."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback

from trl_steady.core.feature import Trainer, warn_user
from trl_steady.features.critic.optimizer import ScalarHeadOptimizer
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
from trl_steady.features.reward_model.labelling import RolloutCompletions, get_verdicts, label_steps
from trl_steady.features.reward_model.training import fit, measure
from trl_steady.trl_bridge import refuse_unsupported
from trl_steady.trl_bridge.rollout import forget_logs, generate_outside_training
from trl_steady.trl_bridge.trl_state import set_metric

_HELD_OUT = 0.1  # share of an iteration's prompts that measure the reward model and never train it
_OBJECTIVES = {"pairs": "outcome", "pointwise": "outcome", "steps": "steps"}


class RewardModelRefreshCallback(TrainerCallback):
    """Retrain a `RewardAdapter` on the policy's own completions, each time before the reference moves.

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
        feature, moving = trainer.feature(RewardModel), trainer.feature(Reference).callback
        if feature.model is None or feature.refresher or moving is None:
            raise ValueError(
                f"{type(self).__name__} retrains a RewardAdapter before each move of the reference. Make one for a "
                "trainer of trl-steady that has a RewardAdapter in reward_funcs, sync_ref_model=True, "
                "ref_model_sync_steps, and beta (or PPO's kl_coef) above 0."
            )
        for is_right, option, value, expected in (
            (
                feature.adapter.head == _OBJECTIVES.get(objective),
                "objective",
                objective,
                "'pairs' or 'pointwise', or, with RewardAdapter(head='steps'), 'steps'",
            ),
            (accept in ("always", "held_out_not_worse"), "accept", accept, "'always' or 'held_out_not_worse'"),
            (0 <= replay_fraction < 1, "replay_fraction", replay_fraction, "a value at least 0 and below 1"),
            (learning_rate > 0, "learning_rate", learning_rate, "a value above 0"),
            (epochs >= 1, "epochs", epochs, "1 or more"),
            (continuations >= 1, "continuations", continuations, "1 or more"),
            (history >= 1, "history", history, "1 or more"),
            (not trainer.args.fp16, "fp16", True, "False: the reward model trains without a loss scale. Use bf16"),
        ):
            if not is_right:
                raise ValueError(f"{option}={value!r} does not work here. Set it to {expected}.")
        self.trainer: Trainer = trainer
        self.label_fn, self.objective = label_fn, objective
        self.replay_fraction, self.learning_rate, self.epochs = replay_fraction, learning_rate, epochs
        self.continuations, self.accept = continuations, accept
        self.refreshes: list[RewardRefresh] = []
        self.history = History(history)
        self.optimizer = ScalarHeadOptimizer(feature.model, trainer)
        self._completions: list[LabelledCompletion] = []
        self._rollouts = 0
        self._model, self._scorer = feature.model, feature.scorer
        feature.refresher = self
        moving.before_move.append(self.refresh)

    # a rollout

    def collect(self, completions: RolloutCompletions) -> None:
        """Label this process's completions of a rollout. Keep them until the refresh if the policy trains on them."""
        trainer = self.trainer
        verdicts = get_verdicts(self.label_fn, completions.prompts, completions.completions, completions.columns)
        right = torch.tensor([float(verdict is True) for verdict in verdicts])
        is_known = torch.tensor([verdict is not None for verdict in verdicts])
        trainer.metrics.pooled(means={"reward_model/true": (right, is_known)})
        if not trainer.model.training:
            return
        labels = right.unsqueeze(1).tolist()
        if self.objective == "steps":
            labels = label_steps(trainer, self.label_fn, completions, verdicts, self.continuations)
        first = trainer.accelerator.process_index * len(verdicts)
        for i, verdict in enumerate(verdicts):
            if verdict is None:
                continue
            # NaN: no verdict on a step
            pairs = zip(completions.ends[i], labels[i], strict=True)
            steps = [(end, label) for end, label in pairs if label == label]
            self._completions.append(
                LabelledCompletion(
                    rollout=self._rollouts,
                    index=first + i,
                    group=(first + i) // trainer.num_generations,
                    prompt=torch.tensor(completions.prompt_ids[i], dtype=torch.int32),
                    completion=torch.tensor(completions.completion_ids[i], dtype=torch.int32),
                    ends=[end for end, _ in steps],
                    labels=[label for _, label in steps],
                )
            )
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
        inputs = [dict(row) for row in rows for _ in range(trainer.num_generations)]
        total, count = args.generation_batch_size, args.generation_batch_size // trainer.accelerator.num_processes
        for start in range(0, len(inputs) - total + 1, total):
            first = start + trainer.accelerator.process_index * count
            generate_outside_training(trainer, inputs[first : first + count])
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
        train, out = hold_out(completions, _HELD_OUT, generator)
        fresh, out = (make_examples(each, self.objective, generator) for each in (train, out))
        count = round(self.replay_fraction / (1 - self.replay_fraction) * len(fresh))
        replayed = self.history.draw(count, generator, without=set(map(prompt_key, out)))
        sets = {"fresh": fresh, "replayed": replayed, "held_out": out}
        if not fresh:
            warn_user(
                f"the reward model was not retrained before step {step + 1}: the {len(completions)} completions of "
                f"this iteration give no example with objective={self.objective!r}. Pairs need a right and a wrong "
                "completion of one prompt."
            )
        if self.accept != "always" and not out:
            warn_user(
                f"accept={self.accept!r} has nothing to compare: this iteration has no held-out example, and the new "
                "reward model is kept. Use rollouts with more prompts between refreshes."
            )
        # a new one scores all completions with 0, and knows nothing
        old = None if self._model.is_fresh else self._log_accuracy("old", sets)
        weights, optimizer = {}, {}
        if self.accept != "always":  # copies: on the CPU, `state` returns the parameters themselves
            weights = {name: tensor.clone() for name, tensor in self._model.state().items()}
            optimizer = self.optimizer.state_dict()
        if fresh:
            fit(
                self._scorer,
                self.optimizer,
                [*fresh, *replayed],
                epochs=self.epochs,
                learning_rate=self.learning_rate,
                generator=generator,
            )
        new = self._log_accuracy("new", sets)
        is_refused = self.accept != "always" and old is not None and new is not None and new < old
        if is_refused:
            self._model.load(weights, "the reward model")
            self.optimizer.load_state_dict(optimizer)
        self.history.add(fresh, generator)
        self.refreshes.append(RewardRefresh(step, len(fresh), len(replayed), not is_refused, old, new))
        counts = {"samples": len(fresh), "replayed": len(replayed), "refreshes": len(self.refreshes)}
        for name, value in {**counts, "accepted": not is_refused}.items():
            set_metric(self.trainer, f"reward_model/{name}", float(value))

    def _gather_completions(self) -> list[LabelledCompletion]:
        """Return the completions of all processes, in the order of one process."""
        return sorted(gather_object(self._completions), key=lambda each: (each.rollout, each.index))

    def _log_accuracy(self, which: str, sets: Mapping[str, Sequence[Example]]) -> float | None:
        """Measure the reward model on each set for the log, and return the accuracy on held-out examples."""
        figures = {name: measure(self._scorer, examples) for name, examples in sets.items()}
        for name, measured in figures.items():
            for figure, value in measured.items():
                set_metric(self.trainer, f"reward_model/{which}/{name}/{figure}", value)
        return figures["held_out"].get("accuracy")

    # checkpoints

    def save(self, folder: Path) -> None:
        """Add the completions since the last refresh, the optimizer and the history to a checkpoint."""
        completions = self._gather_completions()
        if self.trainer.args.should_save:
            state = {
                "answers": [tuple(each) for each in completions],  # the name in files
                "rollouts": self._rollouts,
                "refreshes": [tuple(refresh) for refresh in self.refreshes],
                "objective": self.objective,
                "history": self.history.state(),
                "optimizer": self.optimizer.state_dict(),
            }
            torch.save(state, folder / STATE_FILE)

    def load(self, folder: Path) -> None:
        """Restore what `save` has added, or raise a ValueError if its history is of another objective or size."""
        accelerator = self.trainer.accelerator
        state: dict[str, Any] = torch.load(folder / STATE_FILE, map_location="cpu", weights_only=True)
        found, expected = (state["objective"], state["history"]["size"]), (self.objective, self.history.size)
        if found != expected:
            raise ValueError(
                f"{folder} has (objective, history)={found!r}, and this run has {expected!r}. Set the options of "
                f"{type(self).__name__} to the same values, or begin a new run from its model."
            )
        completions = [LabelledCompletion(*each) for each in state["answers"]]
        self._completions = completions[accelerator.process_index :: accelerator.num_processes]
        self._rollouts = state["rollouts"]
        self.refreshes = [RewardRefresh(*refresh) for refresh in state["refreshes"]]
        self.optimizer.load_state_dict(state["optimizer"])
        self.history.load(state["history"])
