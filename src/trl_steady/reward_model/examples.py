"""Labelled answers, the examples that a reward model learns from, and the history that is replayed."""

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Answer", "Example", "History", "examples_of", "held_out", "prompts_of"]


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
    """Return the examples that answers give.

    `"pairs"` pairs right and wrong answers of a group at random, each at most once. The others give one for an answer.

    Args:
        answers: In the order of rollouts and groups.
        objective: `"pairs"`, `"pointwise"` or `"steps"`.
        generator: Draws the pairs.
    """
    if objective != "pairs":
        return [Example(own.prompt, [own.completion], [own.ends], own.labels) for own in answers if own.labels]
    examples = []
    for group in _groups(answers):
        right, wrong = (_shuffled([own for own in group if own.labels == [label]], generator) for label in (1.0, 0.0))
        for good, bad in zip(right, wrong, strict=False):
            pair = [good, bad]
            examples.append(Example(good.prompt, [o.completion for o in pair], [o.ends for o in pair], [1.0]))
    return examples


def held_out(answers: Sequence[Answer], share: float, generator: torch.Generator) -> tuple[list[Answer], list[Answer]]:
    """Return the answers to train on, and those to measure with: all answers to a share of the prompts, at least one.

    With fewer than two prompts, none is held out.
    """
    of_prompts: dict[tuple[int, ...], list[Answer]] = {}
    for own in answers:
        of_prompts.setdefault(tuple(own.prompt.tolist()), []).append(own)
    groups = list(of_prompts.values())
    count = max(1, round(share * len(groups))) if len(groups) > 1 else 0
    chosen = set(torch.randperm(len(groups), generator=generator)[:count].tolist())
    rest, out = ([g for n, g in enumerate(groups) if (n in chosen) == is_out] for is_out in (False, True))
    return [own for group in rest for own in group], [own for group in out for own in group]


def prompts_of(rows: Iterable[Answer | Example]) -> set[tuple[int, ...]]:
    """Return the token ids of the prompts."""
    return {tuple(own.prompt.tolist()) for own in rows}


def _groups(answers: Sequence[Answer]) -> Iterator[list[Answer]]:
    for _, group in groupby(answers, key=lambda own: (own.rollout, own.group)):
        yield list(group)


def _shuffled(rows: list[Any], generator: torch.Generator) -> list[Any]:
    return [rows[i] for i in torch.randperm(len(rows), generator=generator).tolist()]


class History:
    """A uniform sample of all examples so far, of bounded size, on disk (reservoir sampling, Vitter's Algorithm R).

    Args:
        file: The file, which `add` replaces.
        size: The most examples that are kept.
    """

    def __init__(self, file: Path, size: int) -> None:
        self.file, self.size = file, size
        self.seen = 0
        """Number of examples that were offered."""

    def __len__(self) -> int:
        return min(self.seen, self.size)

    def draw(
        self, count: int, generator: torch.Generator, *, without: Collection[tuple[int, ...]] = ()
    ) -> list[Example]:
        """Return `count` different examples, or all if there are fewer, not of the prompts `without`."""
        if not len(self) or not count:
            return []
        kept = [own for own in self._read() if not without or tuple(own.prompt.tolist()) not in without]
        return [kept[i] for i in torch.randperm(len(kept), generator=generator)[:count].tolist()]

    def add(self, examples: Sequence[Example], generator: torch.Generator) -> None:
        """Offer examples. Each of all so far is kept with the same probability."""
        kept = self._read() if len(self) else []
        for own in examples:
            self.seen += 1
            if len(kept) < self.size:
                kept.append(own)
                continue
            place = int(torch.randint(self.seen, (), generator=generator))
            if place < self.size:
                kept[place] = own
        self._write(kept)

    def _read(self) -> list[Example]:
        stored = torch.load(self.file, weights_only=True)
        pieces = iter(stored["tokens"].split(stored["sizes"]))
        return [
            Example(next(pieces), [next(pieces) for _ in ends], ends, labels)
            for ends, labels in zip(stored["ends"], stored["labels"], strict=True)
        ]

    def _write(self, kept: Sequence[Example]) -> None:
        pieces = [piece for own in kept for piece in (own.prompt, *own.completions)]
        stored = {
            "tokens": torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.int32),
            "sizes": [len(piece) for piece in pieces],
            "ends": [own.ends for own in kept],
            "labels": [own.labels for own in kept],
        }
        self.file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.file.with_suffix(".unfinished")
        torch.save(stored, unfinished)
        os.replace(unfinished, self.file)
