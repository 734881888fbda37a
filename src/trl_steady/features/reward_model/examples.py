"""Labelled answers, the examples that a reward model learns from, and the history that is replayed."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")


class Answer(NamedTuple):
    """A labelled answer of a rollout."""

    rollout: int
    """Number of the rollout."""
    index: int
    """Index in the rollout, over all processes."""
    group: int
    """Number of the prompt in the rollout. Answers to one prompt have the same."""
    prompt: Tensor
    """(P,) int32 token ids."""
    completion: Tensor
    """(T,) int32 token ids."""
    ends: list[int]
    """(S,) number of tokens before the end of each step; the length, if the answer has one score."""
    labels: list[float]
    """(S,) 1 = good, 0 = not."""


class Example(NamedTuple):
    """One example of the reward model's training: an answer, or a right and a wrong one."""

    prompt: Tensor
    completions: list[Tensor]
    """One answer; with pairs the right one, then the wrong one."""
    ends: list[list[int]]
    """For each answer (S,) number of tokens before each score."""
    labels: list[float]
    """(S,) labels of the scores of the one answer; with pairs [1.0]."""


def examples_of(answers: Sequence[Answer], objective: str, generator: torch.Generator) -> list[Example]:
    """Return the examples that answers give, which are in the order of rollouts and groups.

    `"pairs"` pairs right and wrong answers of a group at random, each at most once. The other objectives give one
    example for an answer.
    """
    if objective != "pairs":
        return [Example(a.prompt, [a.completion], [a.ends], a.labels) for a in answers if a.labels]
    examples = []
    for _, group in groupby(answers, key=lambda answer: (answer.rollout, answer.group)):
        known = list(group)
        right, wrong = (_shuffled([a for a in known if a.labels == [label]], generator) for label in (1.0, 0.0))
        for good, bad in zip(right, wrong, strict=False):
            examples.append(Example(good.prompt, [good.completion, bad.completion], [good.ends, bad.ends], [1.0]))
    return examples


def held_out(answers: Sequence[Answer], share: float, generator: torch.Generator) -> tuple[list[Answer], list[Answer]]:
    """Return the answers to train on, and those to measure with: all answers to a share of the prompts, at least one.

    With fewer than two prompts, none is held out.
    """
    prompts = list(dict.fromkeys(map(tokens_of, answers)))
    count = max(1, round(share * len(prompts))) if len(prompts) > 1 else 0
    chosen = set(_shuffled(prompts, generator)[:count])
    rest, out = ([a for a in answers if (tokens_of(a) in chosen) == is_out] for is_out in (False, True))
    return rest, out


def prompts_of(rows: Iterable[Answer | Example]) -> set[tuple[int, ...]]:
    """Return the token ids of the prompts."""
    return {tokens_of(row) for row in rows}


def tokens_of(row: Answer | Example) -> tuple[int, ...]:
    """Return the token ids of the prompt."""
    return tuple(row.prompt.tolist())


def _shuffled(rows: Sequence[_T], generator: torch.Generator) -> list[_T]:
    return [rows[i] for i in torch.randperm(len(rows), generator=generator).tolist()]


class History:
    """A uniform sample of all examples so far, of bounded size (reservoir sampling, Vitter's Algorithm R).

    All processes offer the same examples with the same generator, so that all have the same history.
    """

    def __init__(self, size: int) -> None:
        self.size, self.seen = size, 0
        """The most examples that are kept, and the number of those that were offered."""
        self._kept: list[Example] = []

    def draw(
        self, count: int, generator: torch.Generator, *, without: Collection[tuple[int, ...]] = ()
    ) -> list[Example]:
        """Return `count` different examples, or all if there are fewer, not of the prompts `without`."""
        if not self._kept or not count:
            return []
        kept = [example for example in self._kept if tokens_of(example) not in without]
        return _shuffled(kept, generator)[:count]

    def add(self, examples: Sequence[Example], generator: torch.Generator) -> None:
        """Offer examples. Each of all so far is kept with the same probability."""
        for example in examples:
            self.seen += 1
            if len(self._kept) < self.size:
                self._kept.append(example)
                continue
            index = int(torch.randint(self.seen, (), generator=generator))
            if index < self.size:
                self._kept[index] = example

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds. All tokens are one tensor, because files of many tensors are slow."""
        pieces = [piece for example in self._kept for piece in (example.prompt, *example.completions)]
        return {
            "size": self.size,
            "seen": self.seen,
            "tokens": torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.int32),
            "lengths": [len(piece) for piece in pieces],
            "ends": [example.ends for example in self._kept],
            "labels": [example.labels for example in self._kept],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        pieces = iter(state["tokens"].split(state["lengths"]))
        self.seen = state["seen"]
        self._kept = [
            Example(next(pieces), [next(pieces) for _ in ends], ends, labels)
            for ends, labels in zip(state["ends"], state["labels"], strict=True)
        ]
