"""Functions that judge groups, and trainers that keep what became of each rollout."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from datasets import Dataset

import trl_steady
from tests.features.dynamic_sampling.tools import sequences
from tests.tools import tiny

ALIKE = Dataset.from_dict({"prompt": ["1+1="] * 16, "number": [*range(16)]})
"""Rows that differ in a column only, so that no prompt tells groups apart."""
Ids = tuple[int, ...]


def ranks(completion_ids: Sequence[Sequence[int]]) -> list[float]:
    """The share of the others that each completion beats: what no function of one completion can know."""
    sums = [sum(ids) + len(ids) for ids in completion_ids]
    return [sum(other < own for other in sums) / len(sums) for own in sums]


def by_rank(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A function for `GroupReward`."""
    return ranks(completion_ids)


class Judge:
    """Ranks a group, and keeps the row and the tokens of each call."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], list[Ids]]] = []

    def __call__(self, completion_ids: list[list[int]], number: list[int], **_: Any) -> list[float]:
        self.calls.append((number, [*map(tuple, completion_ids)]))
        return ranks(completion_ids)


class Kept(NamedTuple):
    """A rollout of this process."""

    ids: list[Ids]
    rewards: list[list[float]]
    """(n, K)"""


def build(model: Path, folder: Path, functions: Any, method: str = "GRPO", **options: Any) -> Any:
    """A trainer that keeps its rollouts, also those of evaluations."""

    class Keeping(getattr(trl_steady, f"{method}Trainer")):
        def advantages(self, rollout: Any) -> Any:
            ids = [completion for _, completion in sequences(rollout.samples)]
            self.kept.append(Kept(ids, rollout.rewards_by_function.tolist()))
            return rollout.advantages

    build = options.pop("build", {})
    args = tiny.arguments(getattr(trl_steady, f"{method}Config"), folder, **{"max_steps": 2, **options})
    given = {"train_dataset": ALIKE, "processing_class": tiny.tokenizer(), **build}
    trainer: Any = Keeping(str(model), functions, args, **given)
    trainer.kept = []
    return trainer


def in_chunks(function: Callable[..., list[Any]], size: int) -> Callable[..., list[Any]]:
    """The same rewards by a plain function, which works if all groups are whole on this process."""

    def chunked(completion_ids: list[list[int]], number: list[int], **_: Any) -> list[Any]:
        rewards: list[Any] = []
        for start in range(0, len(number), size):
            part = slice(start, start + size)
            rewards += function(completion_ids=completion_ids[part], number=number[part])
        return rewards

    return chunked
