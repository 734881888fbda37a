"""Decide by their tokens which sequences go through a model together."""

from collections.abc import Sequence
from typing import NamedTuple


class Length(NamedTuple):
    """Numbers of tokens in a sequence."""

    prompt: int
    completion: int
    group: int = -1
    """Number of the group of sequences that share one copy of their prompt; -1 for no group."""


def group_numbers(lengths: Sequence[Length]) -> list[int]:
    """Return a number for each sequence, the same for all of a group and for no other."""
    return [length.group if length.group >= 0 else -1 - row for row, length in enumerate(lengths)]


def partition(lengths: Sequence[Sequence[Length]], budget: int, *, padded: bool) -> list[int]:
    """Return the sizes of batches, in order, with which no process exceeds a budget of tokens.

    `lengths` are the sequences of each process, as many on each, and the sizes are the same for all. A sequence above
    the budget is a batch of its own. `padded` is True if the sequences of a batch are padded to the longest.
    """
    counts: list[int] = []
    start, total = 0, len(lengths[0])
    for end in range(1, total + 1):
        if end - start > 1 and any(_tokens(process[start:end], padded=padded) > budget for process in lengths):
            counts.append(end - 1 - start)
            start = end - 1
    return [*counts, total - start]


def _tokens(lengths: Sequence[Length], *, padded: bool) -> int:
    if padded:
        return len(lengths) * (max(length.prompt for length in lengths) + max(length.completion for length in lengths))
    # a prompt's last token predicts the first of a completion, so that each completion has one of its own
    apart = sum(length.completion + (length.prompt if length.group < 0 else 1) for length in lengths)
    shared = {length.group: length.prompt - 1 for length in lengths if length.group >= 0}
    return apart + sum(shared.values())
