"""Pack the tokens of a padded batch into one row, and record to which tokens each of them may attend."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["Packing", "Segment", "pack"]


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
        return self.prefix.stop - self.prefix.start if self.prefix else 0

    @property
    def tokens(self) -> slice:
        """Slice of the packed row that holds the segment."""
        return slice(self.start, self.end)


@dataclass(frozen=True)
class Packing:
    """`N` tokens of a padded batch (B, L), packed into one row."""

    rows: Tensor
    """(N,) the row in the padded batch that each token comes from."""
    columns: Tensor
    """(N,) the column of each token in the padded batch, which is also its position in transformers."""
    segments: Sequence[Segment] = field(repr=False)
    """Segments that cover all tokens, in order."""

    def gather(self, padded: Tensor) -> Tensor:
        """Return the values (1, N) of a padded (B, L) tensor at the packed tokens."""
        return padded[self.rows, self.columns].unsqueeze(0)

    def scatter_predictions(self, packed: Tensor, shape: tuple[int, int]) -> Tensor:
        """Return a padded (B, L - 1) tensor from packed values (1, N - 1), each of which is for the next token.

        All other entries are 0, among them those of the first token of each segment, which no token predicts.
        """
        is_first = torch.zeros(len(self.rows), dtype=torch.bool)
        is_first[[segment.start for segment in self.segments]] = True
        predicted = (~is_first).nonzero().squeeze(-1).to(packed.device)
        indices = self.rows[predicted] * shape[1] + self.columns[predicted] - 1
        return packed.new_zeros(shape[0] * shape[1]).index_put((indices,), packed[0, predicted - 1]).view(shape)


def pack(attention_mask: Tensor, *, prompt_width: int, input_ids: Tensor | None = None) -> Packing:
    """Pack the tokens of a padded batch into one row, with one segment for each sequence.

    Args:
        attention_mask: (B, L), nonzero = token.
        prompt_width: Number of columns that belong to the prompts.
        input_ids: (B, L). If given, sequences whose prompts have the same tokens before the last one share one copy of
            these tokens. The copy is a segment of its own, and the prefix of their segments.

    Returns:
        The packing, on the device of `attention_mask`.
    """
    mask = attention_mask.bool()
    if input_ids is None:
        rows, columns = mask.nonzero().unbind(-1)
        ends = mask.sum(-1).cumsum(0).tolist()
        starts = [0, *ends[:-1]]
        return Packing(rows, columns, [Segment(a, b) for a, b in zip(starts, ends, strict=True) if b > a])
    mask = mask.cpu()  # on a GPU, the loops below would sync at every row
    # The last token of a prompt predicts the first token of each completion, so each sequence has its own copy.
    prefix = mask.clone()
    prefix[:, prompt_width - 1 :] = False
    tokens = [row[kept].tolist() for row, kept in zip(input_ids.cpu(), prefix, strict=True)]
    sharing: dict[tuple[int, ...], list[int]] = {}
    for row, prompt in enumerate(tokens):
        sharing.setdefault(tuple(prompt), []).append(row)
    indices: list[Tensor] = []
    segments: list[Segment] = []
    end = 0

    def add(row: int, kept: Tensor, before: slice | None = None) -> slice:
        nonlocal end
        columns = kept.nonzero().squeeze(-1)
        segment = Segment(end, end + len(columns), before)
        end = segment.end
        indices.append(torch.stack([torch.full_like(columns, row), columns]))
        if segment.end > segment.start:
            segments.append(segment)
        return segment.tokens

    for prompt, members in sharing.items():
        if len(members) == 1 or not prompt:
            for row in members:
                add(row, mask[row])
            continue
        shared = add(members[0], prefix[members[0]])
        for row in members:
            add(row, mask[row] & ~prefix[row], shared)
    rows, columns = torch.cat(indices, dim=1).to(attention_mask.device)
    return Packing(rows, columns, segments)
