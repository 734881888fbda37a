"""What was recorded of tokens while they were generated: put together over an agent's turns, laid on TRL's padding.

Values of tokens are integers of shape (..., *) in a dtype that has one value more than they need, "nothing": a token
of which nothing was recorded has it everywhere. Cutting, padding and joining are a tensor's own.
"""

# pyright: reportUnknownMemberType=false
# torch's annotations are partial

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

__all__ = ["Traced", "aligned", "nothing", "stitched"]


class Traced(NamedTuple):
    """Tokens that an engine has had, with what was recorded of them."""

    ids: list[int]
    """(T,) of a prompt and what was generated for it."""
    values: Tensor
    """(T - 1, *), where the last token was sampled and not yet fed, or (T, *)."""


def nothing(dtype: torch.dtype) -> int:
    """What stands for "nothing recorded": 255 in uint8, else -1."""
    return 255 if dtype == torch.uint8 else -1


def _widened(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.to(dtype).where(values != nothing(values.dtype), nothing(dtype))


def stitched(turns: Sequence[Sequence[Traced]]) -> list[Traced]:
    """One sequence for each of the first turn, with what later turns went on with.

    A token has the values of the turn in which it first had some: a sampled token those of the turn that sampled it,
    the last of a turn perhaps those of the next turn, which fed it.

    Args:
        turns: of the first turn all sequences; of a later one those that went on, in the same order, each beginning
            with all tokens that it had before.

    Raises:
        ValueError: a sequence that goes on with none of those before it.
    """
    sequences = [Traced(list(each.ids), _of_all(each)) for each in turns[0]]
    for number, turn in enumerate(turns[1:], start=2):
        owners = _owners([each.ids for each in sequences], [each.ids for each in turn])
        if owners is None:
            raise ValueError(
                f"turn {number} of a rollout has sequences that begin with none of those before it, so that what was "
                "recorded of them cannot be put together."
            )
        for own, later in zip(owners, turn, strict=True):
            values, known = _of_all(later), sequences[own].values
            dtype = max(values.dtype, known.dtype, key=lambda each: each.itemsize)
            values, known = _widened(values, dtype), _widened(known, dtype)
            values[: len(known)] = known.where(known != nothing(dtype), values[: len(known)])
            sequences[own] = Traced(list(later.ids), values)
    return sequences


def _owners(before: Sequence[list[int]], later: Sequence[list[int]]) -> list[int] | None:
    """Which sequence each later one goes on with, in order: those ways of all that share the most tokens.

    None if there is none.
    """
    best: list[tuple[int, list[int]] | None] = [(0, []) for _ in range(len(before) + 1)]
    for ids in later:  # best[i]: of what has been placed so far, among the first i
        following: list[tuple[int, list[int]] | None] = [None]
        for i, own in enumerate(before):
            ways = [following[i]]
            rest = best[i]
            if rest is not None and ids[: len(own)] == own:
                ways.append((rest[0] + len(own), [*rest[1], i]))
            known = [way for way in ways if way is not None]
            following.append(max(known, key=lambda way: way[0]) if known else None)
        best = following
    return None if best[-1] is None else best[-1][1]


def _of_all(traced: Traced) -> Tensor:
    """(T, *): with a row for the last token."""
    tokens, rows = len(traced.ids), len(traced.values)
    if rows not in (tokens - 1, tokens):
        raise ValueError(
            f"the engine returned values of {rows} tokens of a sequence of {tokens}; the last alone may have none."
        )
    values = _of_nothing((tokens, *traced.values.shape[1:]), traced.values.dtype)
    values[:rows] = traced.values
    return values


def _of_nothing(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.full(tuple(shape), nothing(dtype), dtype=dtype)


def aligned(sequences: Sequence[Traced], input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Values of a padded batch, whose tokens the sequences are, perhaps cut off at their ends.

    Args:
        sequences: B, in the order of the rows; of those that began alike either may have gone on.
        input_ids: (B, T), padded on either side or both.
        attention_mask: (B, T), not 0 = token.

    Returns:
        (B, T, *) on the device of `input_ids`; padding has nothing, nor has a last token without a row.

    Raises:
        ValueError: another number of sequences, or a row of other tokens than any of them.
    """
    if len(sequences) != len(input_ids):
        raise ValueError(f"{len(sequences)} sequences were recorded, and the batch has {len(input_ids)}.")
    mask = attention_mask.bool().cpu()
    tokens = [cast(list[int], ids[own].tolist()) for ids, own in zip(input_ids.cpu(), mask, strict=True)]
    dtype = max((traced.values.dtype for traced in sequences), key=lambda each: each.itemsize)
    batch = _of_nothing((*input_ids.shape, *sequences[0].values.shape[1:]), dtype)
    free = dict(enumerate(sequences))
    for row in sorted(free, key=lambda row: -len(tokens[row])):
        own = tokens[row]
        fitting = next((i for i in (row, *free) if i in free and free[i].ids[: len(own)] == own), None)
        if fitting is None:
            raise ValueError(
                f"sequence {row} of the rollout has other tokens than were recorded: a subclass or a tool may have "
                "changed them after they were sampled."
            )
        values = _of_all(free.pop(fitting))[: len(own)]
        batch[row, mask[row].nonzero().squeeze(-1)] = _widened(values.cpu(), dtype)
    return batch.to(input_ids.device)
