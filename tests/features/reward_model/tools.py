"""Trainers whose reward is a `RewardAdapter`, and a rule that labels their answers."""

import functools
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.tools import resumable, tiny, wide
from trl_steady import RewardAdapter, RewardModelRefreshCallback
from trl_steady.rewards import by_regex

OPTIONS: dict[str, Any] = {
    **{"beta": 0.04, "sync_ref_model": True, "ref_model_sync_steps": 4, "ref_model_mixup_alpha": 1.0},
    **{"max_steps": 9, "max_completion_length": 8},
}
KINDS: dict[str, dict[str, Any]] = {"lora": {"lora": True}, "nf4": {"lora": True}, "full": {}}
STEPS = by_regex("[A-Za-z]")


def is_right(prompts: list[str], completions: list[str], **_: Any) -> list[bool]:
    """About half of the answers, by their text."""
    return [sum(map(ord, completion)) % 2 == 0 for completion in completions]


def build(kind: str, folder: Path, output: Path, *, adapter: Any = None, **options: Any) -> Any:
    """A trainer with one reward, a `RewardAdapter`. `folder` holds the model."""
    model = wide.load(folder, "nf4") if kind == "nf4" else folder
    built = {"reward_funcs": adapter or RewardAdapter(), **options.pop("build", {})}
    return tiny.trainer(model, output, build=built, **{**KINDS[kind], **OPTIONS, **options})


def refreshed(kind: str, folder: Path, output: Path, *, objective: str = "pointwise", **options: Any) -> Any:
    """The same with the callback that retrains it. `options["refresh"]` are the callback's."""
    how = {"label_fn": is_right, "learning_rate": 1e-2, "epochs": 2, **options.pop("refresh", {})}
    steps = {"head": "steps", "splitter": STEPS} if objective == "steps" else {}
    options.setdefault("adapter", RewardAdapter(**steps))
    trainer = build(kind, folder, output, **options)
    trainer.add_callback(RewardModelRefreshCallback(trainer, objective=objective, **how))
    return trainer


def refresher(trainer: Any) -> RewardModelRefreshCallback:
    return next(own for own in trainer.callback_handler.callbacks if isinstance(own, RewardModelRefreshCallback))


@torch.no_grad()
def stir(trainer: Any, seed: int = 0, by: float = 0.2) -> None:
    """Move the reward model, so that its scores differ."""
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in trainer.reward_model.named_parameters():
        parameter.add_(by * torch.randn(parameter.shape, generator=generator).to(parameter))


# texts, each scored at several ends
PROMPTS = [[10, 11, 12], [10], [13, 14, 15, 16, 17], [18, 19]]
ANSWERS = [[60, 61, 62, 63], [64], [65, 66], [67, 68, 69, 70, 71]]
ENDS = [[1, 4], [1], [2], [2, 3, 5]]


def scores_of(model: Any) -> Tensor:
    """(4, 3) logits of each text cut at each end, one text at a time: the last token is the one that is scored."""
    found = torch.zeros(4, 3, dtype=next(model.parameters()).dtype)
    for row, (prompt, answer, ends) in enumerate(zip(PROMPTS, ANSWERS, ENDS, strict=True)):
        for column, end in enumerate(ends):
            found[row, column] = model(input_ids=torch.tensor([prompt + answer[:end]])).logits[0, 0]
    return found


# runs in processes that may be killed

OBJECTIVES = {"full": "pairs", "lora": "pointwise", "nf4": "steps"}
"""The objective of each kind of run. The labels of steps draw random numbers for continuations."""


class Handed(RewardAdapter):
    """A reward model that one process can hand to another."""

    def __init__(self, objective: str, **options: Any) -> None:
        self.arguments = objective, options
        steps = {"head": "steps", "splitter": STEPS} if objective == "steps" else {}
        super().__init__(**steps, **options)

    def __reduce__(self) -> Any:
        objective, options = self.arguments
        return functools.partial(Handed, objective, **options), ()


def retrain(trainer: Any, objective: str, **changes: Any) -> None:
    """Retrain the reward model, which begins with scores that differ. Auditors hear of updates."""
    stir(trainer)
    options: dict[str, Any] = {
        "learning_rate": 1e-2,
        "epochs": 2,
        "replay_fraction": 0.3,
        "continuations": 2,
        "history": 8,
    }
    options |= {"label_fn": is_right, "objective": objective, **changes}
    callback = RewardModelRefreshCallback(trainer, **options)
    trainer.add_callback(callback)
    tell = lambda *_: sys.audit("tests.update", f"of retraining {len(callback.refreshes) + 1}.")
    callback.optimizer.adamw.register_step_post_hook(tell)


def resumable_options(kind: str, *, changes: Any = None, retrained: bool = True, **options: Any) -> dict[str, Any]:
    """Options of a run as in tests/tools/resumable.py, with another reward. `changes` are those of the callback.

    A window is 4 steps. The reward model is retrained after steps 8 and 16, before the reference is refreshed.
    """
    of_callback = {"objective": OBJECTIVES[kind], **(changes or {})}
    data = {"train_dataset": tiny.dataset(6), "reward_funcs": Handed(of_callback["objective"])}
    then = functools.partial(retrain, **of_callback) if retrained else stir
    return {"then": then, **options, "build": {**data, **options.get("build", {})}}


def build_resumable(kind: str, model: Path, output: Path, **options: Any) -> Any:
    return resumable.build(kind, model, output, **resumable_options(kind, **options))
