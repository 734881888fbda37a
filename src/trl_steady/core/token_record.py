"""Values that a rollout records token by token, turn by turn, until the padded batch is known.

Values of tokens are integers of shape (..., *). Their dtype has one value more than they need, which means "nothing".
It fills the row of a token for which nothing was recorded. Tensor operations cut, pad and join values.
"""

import contextlib
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from trl_steady.core.types import Turn


class Traced(NamedTuple):
    """Tokens of a sequence in an engine, with the values that were recorded for them."""

    ids: list[int]
    """(T,) token ids of a prompt and its completion."""
    values: Tensor
    """(T, *), or (T - 1, *) if the last token was sampled and not yet fed to the model."""


def nothing(dtype: torch.dtype) -> int:
    """Return the value for "nothing recorded": 255 in uint8, otherwise -1."""
    return 255 if dtype == torch.uint8 else -1


class TokenRecord:
    """The values of one rollout. `instead` is a sentence for messages that names an alternative to the option."""

    def __init__(self, option: str, instead: str = "") -> None:
        self._option, self._instead = option, instead
        self.turns: list[list[Traced]] = []
        """The records of generation, turn by turn."""
        self.values: Any = None
        """The values of the padded batch, once they are known."""

    def add(self, turn: Turn, values: Sequence[Tensor]) -> None:
        """Add the values of a turn: (T, *) for each of its sequences, or (T - 1, *) without the last token."""
        sequences = zip(turn.prompt_ids, turn.completion_ids, values, strict=True)
        self.turns.append([Traced([*prompt, *completion], traced) for prompt, completion, traced in sequences])

    def aligned(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the values (B, L, *) of the tokens of a padded batch, as the function `aligned`."""
        with self._naming_option():
            return aligned(stitched(self.turns), input_ids, attention_mask)

    def take(self, sequences: Sequence[list[int]]) -> list[Any]:
        """Remove what was recorded for B sequences of tokens, and return it, one item for each, as `matched`."""
        with self._naming_option():
            turns, self.turns = self.turns, []
            return matched(stitched(turns), sequences)

    def give(self, items: Sequence[Any]) -> None:
        """Record items of `take` again, of any sequences and rounds."""
        self.turns = [list(items)]

    @contextlib.contextmanager
    def _naming_option(self) -> Generator[None]:
        try:
            yield
        except ValueError as error:
            raise ValueError(f"{self._option}: {error} {self._instead}") from error


def stitched(turns: Sequence[Sequence[Traced]]) -> list[Traced]:
    """Join the turns of each sequence in the first turn. The result has a row for each token, in the widest dtype.

    A token keeps the values of the first turn that recorded some for it. For a sampled token, this is the turn that
    sampled it. For the last token of a turn, it may be the next turn, which fed this token to the model.

    Args:
        turns: All sequences of the first turn, then for each later turn the sequences that continue. These keep their
            order, and each begins with all its earlier tokens. It continues the first sequence in order that fits.

    Raises:
        ValueError: a sequence continues none of the earlier ones.
    """
    dtype = max((each.values.dtype for turn in turns for each in turn), key=lambda each: each.itemsize)
    sequences = [_one_row_per_token(each, dtype) for each in turns[0]]
    for number, turn in enumerate(turns[1:], start=2):
        candidates = iter(range(len(sequences)))  # each is tried once, so that the order is kept
        for later in turn:
            index = next((i for i in candidates if later.ids[: len(sequences[i].ids)] == sequences[i].ids), None)
            if index is None:
                raise ValueError(
                    f"turn {number} of a rollout has sequences that continue none of the earlier ones, so their "
                    "recorded values cannot be joined."
                )
            known, joined = sequences[index].values, _one_row_per_token(later, dtype)
            joined.values[: len(known)] = known.where(known != nothing(dtype), joined.values[: len(known)])
            sequences[index] = joined
    return sequences


def _one_row_per_token(traced: Traced, dtype: torch.dtype) -> Traced:
    """Return a copy with values (T, *) of a dtype, with a row for the last token."""
    (ids, values), tokens, rows = traced, len(traced.ids), len(traced.values)
    if rows not in (tokens - 1, tokens):
        raise ValueError(
            f"the engine returned values for {rows} tokens of a sequence of {tokens}. Only the last may have none."
        )
    whole = torch.full((tokens, *values.shape[1:]), nothing(dtype), dtype=dtype)
    whole[:rows] = values.to(dtype).where(values != nothing(values.dtype), nothing(dtype))
    return Traced(list(ids), whole)


def aligned(sequences: Sequence[Traced], input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Arrange the values of `stitched` sequences as a padded batch. The batch may cut off ends of the sequences.

    Args:
        sequences: B sequences in the order of the rows. Sequences that began alike may be swapped, because either of
            them may be the one that continued.
        input_ids: (B, T), padded on one side or on both.
        attention_mask: (B, T), nonzero = token.

    Returns:
        (B, T, *) on the device of `input_ids`. Padding has the value "nothing", and so has a last token without a row.

    Raises:
        ValueError: a row has other tokens than every sequence that is left.
    """
    mask = attention_mask.bool().cpu()
    tokens = [cast(list[int], ids[is_token].tolist()) for ids, is_token in zip(input_ids.cpu(), mask, strict=True)]
    like = sequences[0].values
    batch = like.new_full((*input_ids.shape, *like.shape[1:]), nothing(like.dtype))
    for row, found in enumerate(matched(sequences, tokens)):
        batch[row, mask[row].nonzero().squeeze(-1)] = found.values[: len(tokens[row])]
    return batch.to(input_ids.device)


def matched(sequences: Sequence[Traced], tokens: Sequence[list[int]]) -> list[Traced]:
    """Return for each row of tokens a sequence that begins with it: the one at its place if that fits.

    Raises:
        ValueError: a row has other tokens than every sequence that is left.
    """
    free, found = dict(enumerate(sequences)), dict[int, Traced]()
    for row in sorted(range(len(tokens)), key=lambda row: -len(tokens[row])):
        count = len(tokens[row])
        fitting = next((i for i in (row, *free) if i in free and free[i].ids[:count] == tokens[row]), None)
        if fitting is None:
            raise ValueError(
                f"sequence {row} of the rollout has other tokens than were recorded. A subclass or a tool may have "
                "changed them after they were sampled."
            )
        found[row] = free.pop(fitting)
    return [found[row] for row in range(len(tokens))]
