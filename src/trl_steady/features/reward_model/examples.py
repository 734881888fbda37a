"""Labelled completions, the examples that a reward model learns from, and the history that is replayed."""

# pyright: reportIncompatibleMethodOverride=false
# a named tuple's `index` is a field

from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")


class LabelledCompletion(NamedTuple):
    """A labelled completion of a rollout."""

    rollout: int
    """Number of the rollout."""
    index: int
    """Index in the rollout, over all processes."""
    group: int
    """Number of the prompt in the rollout. Completions of one prompt have the same."""
    prompt: Tensor
    """(P,) int32 token ids."""
    completion: Tensor
    """(T,) int32 token ids."""
    ends: list[int]
    """(S,) number of tokens before the end of each step; the length, if the completion has one score."""
    labels: list[float]
    """(S,) 1 = good, 0 = not."""


class Example(NamedTuple):
    """One example of the reward model's training: a completion, or a right and a wrong one."""

    prompt: Tensor
    """(P,) int32 token ids."""
    completions: list[Tensor]
    """One completion; with pairs the right one, then the wrong one."""
    ends: list[list[int]]
    """For each completion (S,) number of tokens before each score."""
    labels: list[float]
    """(S,) labels of the scores of the one completion; with pairs [1.0]."""


def make_examples(
    completions: Sequence[LabelledCompletion], objective: str, generator: torch.Generator
) -> list[Example]:
    """Return the examples that completions give, which are in the order of rollouts and groups.

    `"pairs"` pairs right and wrong completions of a group at random, each at most once. The other objectives give one
    example for a completion.
    """
    examples: list[Example] = []
    if objective != "pairs":
        for item in completions:
            if item.labels:
                examples.append(Example(item.prompt, [item.completion], [item.ends], item.labels))
        return examples
    groups: dict[tuple[int, int], list[LabelledCompletion]] = {}
    for item in completions:
        groups.setdefault((item.rollout, item.group), []).append(item)
    for group in groups.values():
        right = _shuffle(_labelled(group, 1.0), generator)
        wrong = _shuffle(_labelled(group, 0.0), generator)
        for good, bad in zip(right, wrong, strict=False):
            examples.append(Example(good.prompt, [good.completion, bad.completion], [good.ends, bad.ends], [1.0]))
    return examples


def _labelled(completions: Sequence[LabelledCompletion], label: float) -> list[LabelledCompletion]:
    return [item for item in completions if item.labels == [label]]


def hold_out(
    completions: Sequence[LabelledCompletion], share: float, generator: torch.Generator
) -> tuple[list[LabelledCompletion], list[LabelledCompletion]]:
    """Return the completions to train on, and those to measure with.

    The second are all completions of a share of the prompts, at least of one. With fewer than two prompts, none is
    held out.
    """
    prompts = list(dict.fromkeys(map(prompt_key, completions)))
    count = 0
    if len(prompts) > 1:
        count = max(1, round(share * len(prompts)))
    chosen = set(_shuffle(prompts, generator)[:count])
    rest: list[LabelledCompletion] = []
    held_out: list[LabelledCompletion] = []
    for item in completions:
        if prompt_key(item) in chosen:
            held_out.append(item)
        else:
            rest.append(item)
    return rest, held_out


def prompt_key(item: LabelledCompletion | Example) -> tuple[int, ...]:
    """Return the token ids of the prompt, which identify it."""
    return tuple(item.prompt.tolist())


def _shuffle(items: Sequence[_T], generator: torch.Generator) -> list[_T]:
    return [items[i] for i in torch.randperm(len(items), generator=generator).tolist()]


class History:
    """A uniform sample of all examples so far, of bounded size (reservoir sampling, Vitter's Algorithm R).

    All processes offer the same examples with the same generator, so that all have the same history.
    """

    def __init__(self, size: int) -> None:
        self.size, self.seen = size, 0
        """The most examples that are kept, and the number of those that were offered."""
        self._examples: list[Example] = []

    def draw(
        self, count: int, generator: torch.Generator, *, without: Collection[tuple[int, ...]] = ()
    ) -> list[Example]:
        """Return `count` different examples, or all if there are fewer, not of the prompts `without`."""
        if not self._examples or not count:
            return []
        allowed = [example for example in self._examples if prompt_key(example) not in without]
        return _shuffle(allowed, generator)[:count]

    def add(self, examples: Sequence[Example], generator: torch.Generator) -> None:
        """Offer examples. Each of all so far is kept with the same probability."""
        for example in examples:
            self.seen += 1
            if len(self._examples) < self.size:
                self._examples.append(example)
                continue
            index = int(torch.randint(self.seen, (), generator=generator))
            if index < self.size:
                self._examples[index] = example

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds. All tokens are one tensor, because files of many tensors are slow."""
        pieces: list[Tensor] = []
        ends: list[list[list[int]]] = []
        labels: list[list[float]] = []
        for example in self._examples:
            pieces.append(example.prompt)
            pieces.extend(example.completions)
            ends.append(example.ends)
            labels.append(example.labels)
        tokens = torch.zeros(0, dtype=torch.int32)
        if pieces:
            tokens = torch.cat(pieces)
        return {
            "size": self.size,
            "seen": self.seen,
            "tokens": tokens,
            "lengths": list(map(len, pieces)),
            "ends": ends,
            "labels": labels,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        pieces = iter(state["tokens"].split(state["lengths"]))
        self.seen = state["seen"]
        self._examples = []
        for ends, labels in zip(state["ends"], state["labels"], strict=True):
            prompt = next(pieces)
            completions = list(islice(pieces, len(ends)))
            self._examples.append(Example(prompt, completions, ends, labels))
