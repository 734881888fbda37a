"""Which sequences go through a model together, by their tokens."""

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Length", "partition"]


class Length(NamedTuple):
    """Tokens of a sequence."""

    prompt: int
    completion: int
    group: int = -1
    """Of sequences with the same prompt that have one copy of it between them; -1 = none."""


def partition(lengths: Sequence[Sequence[Length]], budget: int, *, padded: bool) -> list[int]:
    """How many sequences to take at a time, in order, so that none of the processes computes more than a budget.

    Args:
        lengths: Of the sequences of each process, in the order in which they will be taken; as many on each.
        budget: Tokens at a time. A sequence that is longer is taken alone.
        padded: Whether sequences taken together are padded to the longest.

    Returns:
        Counts, which add up to the number of sequences of a process.
    """
    counts: list[int] = []
    start, total = 0, len(lengths[0])
    for end in range(1, total + 1):
        if end - start > 1 and any(_tokens(own[start:end], padded=padded) > budget for own in lengths):
            counts.append(end - 1 - start)
            start = end - 1
    return [*counts, total - start] if total else counts


def _tokens(taken: Sequence[Length], *, padded: bool) -> int:
    if padded:
        return len(taken) * (max(length.prompt for length in taken) + max(length.completion for length in taken))
    own = sum(length.completion + (length.prompt if length.group < 0 else 1) for length in taken)
    shared = {length.group: length.prompt - 1 for length in taken if length.group >= 0}
    return own + sum(shared.values())
