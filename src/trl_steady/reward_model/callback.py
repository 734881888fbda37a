"""Retrain the reward model before each move of the reference: the outer loop of DeepSeekMath's Algorithm 1."""

import copy
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor
from transformers import TrainerCallback

from trl_steady.critic.part import CriticPart
from trl_steady.host.names import log_last
from trl_steady.host.rollouts import forget_logs
from trl_steady.reference.part import ReferencePart
from trl_steady.reward_model.examples import Answer, Example, History, examples_of, held_out, prompts_of
from trl_steady.reward_model.labelling import label_steps, verdicts
from trl_steady.reward_model.part import STATE_FILE, RewardModelPart
from trl_steady.reward_model.training import Measure, fit, measure

__all__ = ["HISTORY_FILE", "RewardModelRefreshCallback", "RewardRefresh"]

HISTORY_FILE = "reward_history.pt"
"""File in `output_dir`, and in a checkpoint, with the examples that may be replayed."""
_HELD_OUT = 0.1  # share of an iteration's prompts that measure the reward model and never train it
_OBJECTIVES = {"pairs": "outcome", "pointwise": "outcome", "steps": "steps"}
_ACCEPT = ("always", "held_out_not_worse")


class RewardRefresh(NamedTuple):
    """One retraining of the reward model."""

    step: int
    """Optimizer steps taken before it."""
    samples: int
    """Examples of this iteration that it was trained on."""
    replayed: int
    """Examples of earlier iterations that it was trained on."""
    accepted: bool
    """False if the old weights were kept, with `accept="held_out_not_worse"`."""
    old: float | None
    """Accuracy of the old reward model on held-out examples of this iteration; None without any, or if it was new."""
    new: float | None
    """Accuracy of the new one on the same, also if it was refused."""


class RewardModelRefreshCallback(TrainerCallback):
    """Retrain a `RewardAdapter` on the policy's own answers, each time before the reference moves.

    This is the other half of Algorithm 1 of DeepSeekMath (arXiv 2402.03300, section 4.1.4). At the end of an outer
    iteration the policy's answers become a training set, with 10 % of historical data. The reward model is trained
    further on it. Then the reference becomes the policy. The paper does not state the learning rate, the epochs and
    the loss of the retraining, or what the 10 % are taken from.

        trainer = GRPOTrainer(..., reward_funcs=RewardAdapter(source), args=GRPOConfig(sync_ref_model=True, ...))
        trainer.add_callback(RewardModelRefreshCallback(trainer, label_fn=is_right))

    Ten per cent of an iteration's prompts are held out: their answers measure the old and the new reward model, and
    are never trained on. All figures are logged as `reward_model/...` at the refresh, and kept in
    `trainer.reward_refreshes`. Every rollout logs `reward_model/true`, the share of right answers by `label_fn`. A
    rise of the reward without a rise of this share is reward hacking.

    Args:
        trainer: A trainer of trl-steady with a `RewardAdapter` and `sync_ref_model=True`.
        label_fn: `label_fn(prompts, completions, **columns)`, called as a reward function. Returns True, False or
            None (no verdict) for each completion.
        objective: `"pointwise"`: cross-entropy of right and wrong answers. `"pairs"`: Bradley-Terry loss of a right
            and a wrong answer to one prompt. `"steps"`: cross-entropy of steps, where a step is good if any of
            `continuations` from its end is right (Math-Shepherd, arXiv 2312.08935).
        replay_fraction: Share of historical examples in each training set, at least 0 and below 1.
        learning_rate: Learning rate of AdamW for the reward model, without weight decay. The optimizer's state is kept
            between refreshes.
        epochs: Passes over each training set. A batch has as many examples as an optimizer step has answers.
        continuations: Number of continuations of each step, with `objective="steps"`.
        history: The most examples that are kept for replay, a uniform sample of all that were trained on.
        accept: `"always"` as in the paper. `"held_out_not_worse"`: keep the old weights if the new ones know fewer
            held-out examples. The second is ours.

    Raises:
        ValueError: An argument is out of range, or does not fit the trainer. The message says what to do.
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
        self.trainer, self.label_fn, self.objective = trainer, label_fn, objective
        self.replay_fraction, self.learning_rate, self.epochs = replay_fraction, learning_rate, epochs
        self.continuations, self.accept = continuations, accept
        self.refreshes: list[RewardRefresh] = []
        self._answers: list[Answer] = []
        self._rollouts = 0
        self._logged: dict[str, float] = {}
        _refuse(self, history)
        self.history = History(Path(trainer.args.output_dir) / HISTORY_FILE, history)
        self._part = trainer.part(RewardModelPart)
        self._part.refresher = self
        parameters = [parameter for _, parameter in self._part.model.named_parameters()]
        self.optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.0)
        trainer.part(ReferencePart).callback.before_move.append(self.refresh)

    # a rollout

    def collect(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        prompt_ids: Sequence[list[int]],
        completion_ids: Sequence[list[int]],
        ends: Sequence[list[int]],
        columns: Mapping[str, Any],
    ) -> None:
        """Label this process's answers of a rollout, and keep them until the refresh if the policy trains on them."""
        known = verdicts(self.label_fn, prompts, completions, columns)
        right = torch.tensor([float(verdict is True) for verdict in known])
        self.trainer.metrics.pooled(
            means={"reward_model/true": (right, torch.tensor([verdict is not None for verdict in known]))}
        )
        if not self.trainer.model.training:
            return
        if self.objective == "steps":
            ids = {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "ends": ends}
            how = {"known": known, "continuations": self.continuations}
            labels = label_steps(self.trainer, self.label_fn, prompts, completions, columns, **ids, **how)
        else:
            labels = [[float(verdict is True)] for verdict in known]
        first = self.trainer.accelerator.process_index * len(known)
        for i, verdict in enumerate(known):
            if verdict is not None:
                prompt, completion = (
                    torch.tensor(own, dtype=torch.int32) for own in (prompt_ids[i], completion_ids[i])
                )
                group = (first + i) // self.trainer.num_generations
                # NaN: no verdict on a step
                steps = [(end, label) for end, label in zip(ends[i], labels[i], strict=True) if label == label]
                own = [end for end, _ in steps], [label for _, label in steps]
                self._answers.append(Answer(self._rollouts, first + i, group, prompt, completion, *own))
        self._rollouts += 1

    # an outer iteration

    def fit(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Train a new reward model on the policy's answers to some prompts, before training.

        The trainer generates `num_generations` answers to each prompt, as in its rollouts. All processes must call
        this method with the same rows. A run that resumes restores the reward model, and need not call it.

        Args:
            rows: Rows of a dataset like the trainer's. Those that do not fill a rollout are left out.

        Raises:
            ValueError: The rows do not fill one rollout.
        """
        trainer, args = self.trainer, self.trainer.args
        each = args.generation_batch_size // trainer.num_generations
        if len(rows) < each:
            raise ValueError(f"fit got {len(rows)} rows, and a rollout has {each} prompts. Give at least {each}.")
        trainer.model.train()
        share = args.generation_batch_size // trainer.accelerator.num_processes
        first = trainer.accelerator.process_index * share
        adapting = [(part, part.kl_coef) for part in trainer.parts if isinstance(part, CriticPart)]
        for start in range(0, len(rows) - each + 1, each):
            batch = [dict(row) for row in list(rows)[start : start + each] for _ in range(trainer.num_generations)]
            trainer.rollout(batch[first : first + share])
        forget_logs(trainer)  # these rollouts are not of training
        for critic, kl_coef in adapting:
            critic.kl_coef = kl_coef
        self.refresh(0)

    def refresh(self, step: int) -> None:
        """Train the reward model further on the answers since the last refresh. Every process must call this method.

        Args:
            step: Optimizer steps taken so far.
        """
        generator = torch.Generator().manual_seed(self.trainer.args.seed * 1_000_003 + len(self.refreshes))
        answers = self._all_answers()
        self._answers = []
        train, out = held_out(answers, _HELD_OUT, generator)
        fresh, out = (examples_of(own, self.objective, generator) for own in (train, out))
        share = self.replay_fraction / (1 - self.replay_fraction)
        replayed = self._replayed(round(share * len(fresh)), prompts_of(out), generator)
        sets = {"fresh": fresh, "replayed": replayed, "held_out": out}
        is_new = self._part.is_fresh  # it scores all answers with 0, and knows nothing
        before = {} if is_new else self._measured("old", sets)
        if not fresh and self.trainer.accelerator.is_main_process:
            warnings.warn(
                f"the reward model was not retrained before step {step + 1}: the {len(answers)} answers of this "
                f"iteration give no example with objective={self.objective!r}. Pairs need a right and a wrong answer "
                "to one prompt.",
                UserWarning,
                stacklevel=2,
            )
        kept = None if is_new else self._kept()
        if fresh:
            fit(self._part, self.optimizer, [*fresh, *replayed], epochs=self.epochs, generator=generator)
        after = self._measured("new", sets)
        of_held_out = (own.get("held_out") for own in (before, after))
        old, new = (None if own is None else own.accuracy for own in of_held_out)
        is_accepted = kept is None or self._is_not_worse(old, new)
        if kept is not None and not is_accepted:
            self._part.model.load(kept[0], "the reward model")  # pyright: ignore[reportOptionalMemberAccess]
            self.optimizer.load_state_dict(kept[1])
        if self.trainer.accelerator.is_main_process:
            self.history.add(fresh, generator)
        self.history.seen = broadcast_object_list([self.history.seen])[0]
        self.refreshes.append(RewardRefresh(step, len(fresh), len(replayed), is_accepted, old, new))
        self._log()

    def _all_answers(self) -> list[Answer]:
        """Return the answers of all processes, in the order of one process."""
        return sorted(gather_object(self._answers), key=lambda own: own[:2])

    def _replayed(self, count: int, held: set[tuple[int, ...]], generator: torch.Generator) -> list[Example]:
        """Return examples of the history, not of held-out prompts. The main process reads them for all."""
        is_main = self.trainer.accelerator.is_main_process
        drawn = [self.history.draw(count, generator, without=held) if is_main else None]
        state = [generator.get_state()]
        both: list[Any] = broadcast_object_list([*drawn, *state])
        generator.set_state(both[1])
        return both[0]

    def _kept(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Return copies of the reward model and its optimizer's state, if the new one may be refused."""
        if self.accept == "always":
            return None
        model = self._part.model
        assert model is not None
        state = {name: tensor.clone() for name, tensor in model.state().items()}  # on the CPU it is not a copy
        return state, copy.deepcopy(self.optimizer.state_dict())

    def _is_not_worse(self, old: float | None, new: float | None) -> bool:
        if old is None or new is None:
            warnings.warn(
                "accept='held_out_not_worse' has nothing to compare: this iteration has no held-out example. The new "
                "reward model is kept. Use rollouts with more prompts between refreshes.",
                UserWarning,
                stacklevel=2,
            )
            return True
        return new >= old

    def _measured(self, which: str, sets: Mapping[str, Sequence[Example]]) -> dict[str, Measure | None]:
        """Measure the reward model on each set, and note the figures for the log."""
        found = {name: measure(self._part, examples) for name, examples in sets.items()}
        for name, own in found.items():
            for figure, value in ({} if own is None else own._asdict()).items():
                self._logged[f"reward_model/{which}/{name}/{figure}"] = value
        return found

    def _log(self) -> None:
        last = self.refreshes[-1]
        self._logged |= {"reward_model/samples": last.samples, "reward_model/replayed": last.replayed}
        self._logged |= {"reward_model/refreshes": len(self.refreshes), "reward_model/accepted": float(last.accepted)}
        for name, value in self._logged.items():
            log_last(self.trainer, name, float(value))
        self._logged = {}

    # checkpoints

    def save(self, folder: Path) -> None:
        """Add the answers since the last refresh, the optimizer and the history to a checkpoint."""
        answers = self._all_answers()
        if not self.trainer.args.should_save:
            return
        state = {
            "answers": [tuple(own) for own in answers],
            "rollouts": self._rollouts,
            "refreshes": [tuple(own) for own in self.refreshes],
            "objective": self.objective,
            "history": self.history.size,
            "seen": self.history.seen,
            "optimizer": self.optimizer.state_dict(),
        }
        torch.save(state, folder / STATE_FILE)
        if self.history.seen and self.trainer.accelerator.is_main_process:  # other machines may save, and have none
            shutil.copyfile(self.history.file, folder / HISTORY_FILE)

    def check(self, folder: Path) -> dict[str, Any]:
        """Return what a checkpoint holds, before anything is loaded from it.

        Raises:
            ValueError: The checkpoint is of a run without this callback, or its history is of another objective or
                size.
        """
        if not (folder / STATE_FILE).is_file():
            raise ValueError(
                f"{folder} holds no {STATE_FILE}: the run that wrote it did not retrain its reward model. Resume "
                "without RewardModelRefreshCallback, or begin a new run from its model."
            )
        state: dict[str, Any] = torch.load(folder / STATE_FILE, map_location="cpu", weights_only=True)
        for option, value in (("objective", self.objective), ("history", self.history.size)):
            if state[option] != value and (option == "objective" or state["seen"]):  # an empty history fits all
                raise ValueError(
                    f"{folder} holds examples of {option}={state[option]!r}, and this run has {option}={value!r}. Set "
                    "it to the same value, or begin a new run from its model."
                )
        return state

    def load(self, folder: Path) -> None:
        """Restore what `save` has added.

        Raises:
            ValueError: As `check`.
        """
        state, accelerator = self.check(folder), self.trainer.accelerator
        answers = [Answer(*own) for own in state["answers"]]
        self._answers = answers[accelerator.process_index :: accelerator.num_processes]
        self._rollouts, self.refreshes = state["rollouts"], [RewardRefresh(*own) for own in state["refreshes"]]
        self.optimizer.load_state_dict(state["optimizer"])
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate  # which may have been changed
        self.history.seen = state["seen"]
        if self.history.seen and accelerator.is_main_process:
            self.history.file.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / HISTORY_FILE, self.history.file)


def _refuse(callback: RewardModelRefreshCallback, history: int) -> None:
    trainer, name = callback.trainer, type(callback).__name__
    part = next((own for own in getattr(trainer, "parts", ()) if isinstance(own, RewardModelPart)), None)
    if part is None or part.model is None:
        raise ValueError(
            f"{name} retrains the RewardAdapter of a trainer of trl-steady, and this {type(trainer).__name__} has "
            "none. Put a RewardAdapter into its reward_funcs."
        )
    if part.refresher is not None:
        raise ValueError(f"the trainer has a {name} already. Make only one.")
    if trainer.part(ReferencePart).callback is None:
        raise ValueError(
            f"{name} acts before each move of the reference, and sync_ref_model={trainer.args.sync_ref_model!r} keeps "
            "it where it is. Set sync_ref_model=True, ref_model_sync_steps, and beta (or PPO's kl_coef) above 0."
        )
    if callback.objective not in _OBJECTIVES:
        raise ValueError(f"objective={callback.objective!r} is unknown. Set it to one of {', '.join(_OBJECTIVES)}.")
    head = _OBJECTIVES[callback.objective]
    if part.adapter.head != head:
        raise ValueError(
            f"objective={callback.objective!r} trains a reward model with head={head!r}, and this one has "
            f"head={part.adapter.head!r}. Set one to fit the other."
        )
    args: Any = trainer.args
    if args.fp16:
        raise ValueError(
            f"fp16=True does not work with {name}, which trains without a loss scale. Set bf16=True, or neither."
        )
    is_reentrant = (args.gradient_checkpointing_kwargs or {}).get("use_reentrant")
    if args.gradient_checkpointing and is_reentrant and part.model.adapter is not None:
        raise ValueError(
            "use_reentrant=True in gradient_checkpointing_kwargs does not work with a reward model on the policy's "
            "base, whose layers must be recomputed with its own adapter. Set use_reentrant=False."
        )
    if callback.objective == "pairs" and trainer.num_generations < 2:
        raise ValueError(
            f"objective='pairs' needs two answers to a prompt, and num_generations={trainer.num_generations}. Set "
            "objective='pointwise', or num_generations to 2 or more."
        )
    if callback.accept not in _ACCEPT:
        raise ValueError(f"accept={callback.accept!r} is unknown. Set it to one of {', '.join(_ACCEPT)}.")
    for option, value, works, expected in (
        ("replay_fraction", callback.replay_fraction, 0 <= callback.replay_fraction < 1, "at least 0 and below 1"),
        ("learning_rate", callback.learning_rate, callback.learning_rate > 0, "above 0"),
        ("epochs", callback.epochs, callback.epochs >= 1, "1 or more"),
        ("continuations", callback.continuations, callback.continuations >= 1, "1 or more"),
        ("history", history, history >= 1, "1 or more"),
    ):
        if not works:
            raise ValueError(f"{option}={value!r} cannot work. Set {option} to a value {expected}.")
