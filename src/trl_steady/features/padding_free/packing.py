"""Choose the sequences that go through a model together, and pack their tokens into one row."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from trl_steady.core.devices import copy_async


class Length(NamedTuple):
    """Numbers of tokens in a sequence."""

    prompt: int
    completion: int
    group: int = -1
    """Number of the group of sequences that share one copy of their prompt; -1 for no group."""


def group_numbers(lengths: Sequence[Length]) -> list[int]:
    """Return a number for each sequence, the same for all of a group and for no other."""
    numbers: list[int] = []
    for row, length in enumerate(lengths):
        is_alone = length.group < 0
        numbers.append(-1 - row if is_alone else length.group)
    return numbers


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of a packed row that attend causally to each other, and to all tokens of a prefix."""

    start: int
    end: int
    prefix: slice | None = None
    """Earlier tokens of the row to which every token of the segment also attends."""

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def shared(self) -> int:
        """Number of tokens of the prefix."""
        if self.prefix is None:
            return 0
        return self.prefix.stop - self.prefix.start

    @property
    def tokens(self) -> slice:
        """Slice of the packed row."""
        return slice(self.start, self.end)


@dataclass(frozen=True)
class Packing:
    """`N` tokens of a padded batch (B, L), packed into one row."""

    rows: Tensor  # (N,) of the padded batch
    columns: Tensor  # (N,) of the padded batch, which are also the positions in transformers
    predicted: Tensor  # indices of all tokens but the first of each segment, which no token predicts
    segments: Sequence[Segment] = field(repr=False)  # cover all tokens, in order

    def gather(self, padded: Tensor) -> Tensor:
        """Return the values (1, N) of a padded (B, L) tensor at the packed tokens."""
        return padded[self.rows, self.columns].unsqueeze(0)

    def scatter_predictions(self, packed: Tensor, shape: tuple[int, int]) -> Tensor:
        """Return a padded (B, L - 1) tensor from packed values (1, N - 1), each of which is for the next token.

        All other entries are 0, among them those of the first token of each segment, which no token predicts.
        """
        indices = self.rows[self.predicted] * shape[1] + self.columns[self.predicted] - 1
        flat = packed.new_zeros(shape[0] * shape[1])
        return flat.index_put((indices,), packed[0, self.predicted - 1]).view(shape)


def longest(lengths: Sequence[Length]) -> tuple[int, int]:
    """Return the tokens of the longest prompt and of the longest completion."""
    prompt, completion = 0, 0
    for length in lengths:
        prompt = max(prompt, length.prompt)
        completion = max(completion, length.completion)
    return prompt, completion


def sequence_lengths(
    attention_mask: Tensor, *, prompt_width: int, input_ids: Tensor | None = None
) -> list[Length] | None:
    """Return the lengths of the sequences of a padded batch; None if one has padding between its tokens.

    This waits for the device of `attention_mask` (B, L), nonzero = token. The first `prompt_width` columns are those
    of the prompts. With `input_ids` (B, L), sequences whose prompts have the same tokens before the last one are a
    group. Such a prompt has two tokens or more.
    """
    mask = attention_mask.bool()
    prompts = mask[:, :prompt_width].sum(-1)
    completions = mask[:, prompt_width:].sum(-1)
    is_fit = _fits(mask, prompts, completions, prompt_width)
    table: list[list[int]] = torch.stack([prompts, completions, is_fit], dim=-1).tolist()  # one wait for all three
    lengths: list[Length] = []
    for prompt, completion, is_row_fit in table:
        if not is_row_fit:
            return None
        lengths.append(Length(prompt, completion))
    if input_ids is None:
        return lengths
    group_of: dict[tuple[int, ...], int] = {}  # tokens of a prompt before its last -> number
    tokens: list[list[int]] = input_ids[:, : prompt_width - 1].tolist()
    for row, length in enumerate(lengths):
        if length.prompt > 1:
            prefix = tuple(tokens[row][prompt_width - length.prompt :])
            group = group_of.setdefault(prefix, len(group_of))
            lengths[row] = length._replace(group=group)
    return lengths


def fits(lengths: Sequence[Length], attention_mask: Tensor, *, prompt_width: int) -> Tensor:
    """Return a bool scalar, on the device of a mask (B, L): whether the sequences have these lengths."""
    prompts, completions, _ = copy_async(torch.tensor(lengths), attention_mask.device).unbind(-1)
    return _fits(attention_mask.bool(), prompts, completions, prompt_width).all()


def _fits(mask: Tensor, prompts: Tensor, completions: Tensor, prompt_width: int) -> Tensor:
    columns = torch.arange(mask.size(1), device=mask.device)
    starts = prompt_width - prompts.unsqueeze(-1)
    ends = prompt_width + completions.unsqueeze(-1)
    expected = (columns >= starts) & (columns < ends)
    return (mask == expected).all(-1)


def partition(lengths: Sequence[Sequence[Length]], budget: int, *, padded: bool) -> list[int]:
    """Return the sizes of batches, in order, with which no process exceeds a budget of tokens.

    `lengths` are the sequences of each process, as many on each, and the sizes are the same for all. A sequence above
    the budget is a batch of its own. `padded` is True if the sequences of a batch are padded to the longest.
    """
    counts: list[int] = []
    start = 0
    total = len(lengths[0])
    for end in range(1, total + 1):
        if end - start == 1:
            continue
        most = max(_tokens(process[start:end], padded=padded) for process in lengths)
        if most > budget:
            counts.append(end - 1 - start)
            start = end - 1
    counts.append(total - start)
    return counts


def _tokens(lengths: Sequence[Length], *, padded: bool) -> int:
    if padded:
        longest_prompt, longest_completion = longest(lengths)
        return len(lengths) * (longest_prompt + longest_completion)
    tokens = 0
    shared: dict[int, int] = {}  # group -> tokens of its prompt before the last one
    for length in lengths:
        tokens += length.completion
        if length.group < 0:
            tokens += length.prompt
        else:  # a prompt's last token predicts the first of a completion, so that each completion has one of its own
            tokens += 1
            shared[length.group] = length.prompt - 1
    return tokens + sum(shared.values())


def pack(lengths: Sequence[Length], *, prompt_width: int, device: torch.device) -> Packing:
    """Pack the tokens of a padded batch into one row, with one segment for each sequence. No device is waited for.

    Several sequences of one group share one copy of their prompt before its last token, which predicts the first token
    of each completion. The copy is a segment of its own, and the prefix of their segments.
    """
    members: dict[int, list[int]] = {}
    for row, group in enumerate(group_numbers(lengths)):
        members.setdefault(group, []).append(row)
    indices: list[Tensor] = []
    segments: list[Segment] = []

    def add(row: int, first: int, end: int, prefix: slice | None = None) -> slice:
        start = 0
        if segments:
            start = segments[-1].end
        segments.append(Segment(start, start + end - first, prefix))
        columns = torch.arange(first, end)
        indices.append(torch.stack([torch.full_like(columns, row), columns]))
        return segments[-1].tokens

    for rows in members.values():
        first = prompt_width - lengths[rows[0]].prompt
        prefix = None
        if len(rows) > 1:
            prefix = add(rows[0], first, prompt_width - 1)
            first = prompt_width - 1  # the last token of the prompt
        for row in rows:
            add(row, first, prompt_width + lengths[row].completion, prefix)
    predicted = torch.cat([torch.arange(segment.start + 1, segment.end) for segment in segments])
    token_rows, token_columns = copy_async(torch.cat(indices, dim=1), device)
    return Packing(token_rows, token_columns, copy_async(predicted, device), segments)
