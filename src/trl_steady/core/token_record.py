"""Values that a rollout records token by token, turn by turn, until the padded batch is known.

Values of tokens are integers of shape (..., *). Their dtype has one value more than they need, which means "nothing".
It fills the row of a token for which nothing was recorded. Tensor operations cut, pad and join values.
"""

import contextlib
from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trl_steady.core.types import Turn


class Traced(NamedTuple):
    """Tokens of a sequence in an engine, with the values that were recorded for them."""

    ids: list[int]
    """(T,) token ids of a prompt and its completion."""
    values: Tensor
    """(T, *), or (T - 1, *) if the last token was sampled and not yet fed to the model."""


def refuse_other_count(turn: Turn, option: str) -> None:
    """Raise a ValueError if generation has not returned one completion for each prompt."""
    if len(turn.completion_ids) != len(turn.prompt_ids):
        raise ValueError(
            f"{option}: generation returned {len(turn.completion_ids)} completions for {len(turn.prompt_ids)} "
            "prompts, and TRL repeats prompts itself. Set num_generations, and leave num_return_sequences (n of vLLM) "
            "out of generation_kwargs and of the model's generation_config."
        )


def nothing(dtype: torch.dtype) -> int:
    """Return the value for "nothing recorded": 255 in uint8, otherwise -1."""
    return 255 if dtype == torch.uint8 else -1


class TokenRecord:
    """The values of one rollout. `instead` is a sentence for messages that names an alternative to the option."""

    def __init__(self, option: str, instead: str = "") -> None:
        self._option, self._instead = option, instead
        self.sequences: list[Traced] = []
        """The records of generation: those of all turns so far, joined, so that no token is held twice."""
        self._turn_count = 0
        self.values: Any = None
        """The values of the padded batch, once they are known."""

    @property
    def turns(self) -> list[list[Traced]]:
        """The sequences as `stitched` takes them: one turn, because later turns are joined to it as they come."""
        return [self.sequences]

    def add(self, turn: Turn, values: Sequence[Tensor]) -> None:
        """Add the values of a turn: (T, *) for each of its sequences, or (T - 1, *) without the last token."""
        sequences: list[Traced] = []
        for prompt, completion, of_tokens in zip(turn.prompt_ids, turn.completion_ids, values, strict=True):
            sequences.append(Traced(list(prompt) + list(completion), of_tokens))
        if not self.sequences:
            self._turn_count = 1
            self.sequences = sequences
            return
        self._turn_count += 1
        with self._naming_option():
            self.sequences = continued(self.sequences, sequences, self._turn_count)

    def as_padded(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the values (B, L, *) of the tokens of a padded batch, as the function `aligned`."""
        with self._naming_option():
            return aligned(stitched(self.turns), input_ids, attention_mask)

    def take(self, sequences: Sequence[list[int]]) -> list[Any]:
        """Remove what was recorded for B sequences of tokens, and return it, one item for each, as `matched`."""
        with self._naming_option():
            turns = self.turns
            self.sequences = []
            return matched(stitched(turns), sequences)

    def give(self, items: Sequence[Any]) -> None:
        """Record items of `take` again, of any sequences and rounds."""
        self.sequences = list(items)

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
    sequences = _one_row_per_token(turns[0])
    for number, turn in enumerate(turns[1:], start=2):
        sequences = continued(sequences, turn, number)
    return sequences


def continued(sequences: Sequence[Traced], turn: Sequence[Traced], number: int) -> list[Traced]:
    """Join a turn to the sequences so far, as `stitched`. `number` is that of the turn, for messages."""
    whole = _one_row_per_token([*sequences, *turn])
    joined = whole[: len(sequences)]
    index = 0  # of the earlier sequence that is tried next; each is tried once, so that the order is kept
    for later in whole[len(sequences) :]:
        while index < len(joined) and not _continues(later, joined[index]):
            index += 1
        if index == len(joined):
            raise ValueError(
                f"turn {number} of a rollout has sequences that continue none of the earlier ones, so their "
                "recorded values cannot be joined."
            )
        known = joined[index].values
        recorded_now, recorded_first = later.values.tensor_split([len(known)])
        known = known.where(known != nothing(known.dtype), recorded_now)
        joined[index] = Traced(later.ids, torch.cat([known, recorded_first]))
        index += 1
    return joined


def _continues(later: Traced, earlier: Traced) -> bool:
    return later.ids[: len(earlier.ids)] == earlier.ids


def _one_row_per_token(sequences: Sequence[Traced]) -> list[Traced]:
    """Return sequences with values (T, *) in the widest dtype of all, with a row for the last token."""
    dtypes = [traced.values.dtype for traced in sequences]
    dtype = max(dtypes, key=lambda candidate: candidate.itemsize, default=torch.uint8)
    whole: list[Traced] = []
    for ids, values in sequences:
        tokens = len(ids)
        rows = len(values)
        if rows not in (tokens - 1, tokens):
            raise ValueError(
                f"the engine returned values for {rows} tokens of a sequence of {tokens}. Only the last may have none."
            )
        if values.dtype != dtype:
            values = values.to(dtype).where(values != nothing(values.dtype), nothing(dtype))
        if rows < tokens:
            values = torch.cat([values, values.new_full((1, *values.shape[1:]), nothing(dtype))])
        whole.append(Traced(ids, values))
    return whole


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
    tokens: list[list[int]] = []
    for ids, is_token in zip(input_ids.cpu(), mask, strict=True):
        tokens.append(ids[is_token].tolist())
    first = sequences[0].values
    batch = first.new_full(input_ids.shape + first.shape[1:], nothing(first.dtype))
    for row, traced in enumerate(matched(sequences, tokens)):
        columns = mask[row].nonzero().squeeze(-1)
        batch[row, columns] = traced.values[: len(tokens[row])]
    return batch.to(input_ids.device)


def matched(sequences: Sequence[Traced], tokens: Sequence[list[int]]) -> list[Traced]:
    """Return for each row of tokens a sequence that begins with it: the one with the same index if that fits.

    Raises:
        ValueError: a row has other tokens than every sequence that is left.
    """
    free = dict(enumerate(sequences))
    sequence_of_row: dict[int, Traced] = {}
    for row in sorted(range(len(tokens)), key=lambda row: -len(tokens[row])):
        index = _fitting(free, row, tokens[row])
        if index is None:
            raise ValueError(
                f"sequence {row} of the rollout has other tokens than were recorded. A subclass or a tool may have "
                "changed them after they were sampled."
            )
        sequence_of_row[row] = free.pop(index)
    return [sequence_of_row[row] for row in range(len(tokens))]


def _fitting(free: Mapping[int, Traced], row: int, tokens: list[int]) -> int | None:
    """Return the index of the sequence that begins with the tokens of a row: the row's own, or the first."""
    for index in (row, *free):
        if index in free and free[index].ids[: len(tokens)] == tokens:
            return index
    return None
