"""Where the tokens of a padded batch go when they are laid end to end, and which tokens each may attend to."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["Packing", "Segment", "pack"]


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of a packed row that attend causally to each other, and to all of a prefix before them."""

    start: int
    end: int
    prefix: slice | None = None
    """Tokens of the row that every token of the segment sees too."""

    @property
    def tokens(self) -> slice:
        """Of the packed row."""
        return slice(self.start, self.end)


@dataclass(frozen=True)
class Packing:
    """`N` tokens of a padded batch (B, L), laid end to end."""

    rows: Tensor
    """(N,) the sequence each token comes from."""
    columns: Tensor
    """(N,) its column in the padded batch, which is the position that transformers gives it there."""
    segments: Sequence[Segment] = field(repr=False)
    """All tokens, in order."""

    def gather(self, padded: Tensor) -> Tensor:
        """(1, N): the values of a padded (B, L) at the packed tokens."""
        return padded[self.rows, self.columns].unsqueeze(0)

    def scatter_predictions(self, packed: Tensor, shape: tuple[int, int]) -> Tensor:
        """A padded (B, L - 1) with what a packed row (1, N - 1) says of the token after each; 0 elsewhere.

        The first token of a segment has none before it, and stays 0.
        """
        is_first = torch.zeros(len(self.rows), dtype=torch.bool)
        is_first[[segment.start for segment in self.segments]] = True
        told = (~is_first).nonzero().squeeze(-1).to(packed.device)
        places = self.rows[told] * shape[1] + self.columns[told] - 1
        return packed.new_zeros(shape[0] * shape[1]).index_put((places,), packed[0, told - 1]).view(shape)


def pack(attention_mask: Tensor, *, prompt_width: int, input_ids: Tensor | None = None) -> Packing:
    """Lay the tokens of a padded batch end to end, one segment a sequence.

    Args:
        attention_mask: (B, L), not 0 = token.
        prompt_width: how many of the columns belong to the prompts.
        input_ids: (B, L); if given, sequences whose prompts are the same but for the last token have one copy of what
            is the same between them, as a segment of its own that is the prefix of theirs.

    Returns:
        The packing, on the device of `attention_mask`.
    """
    mask = attention_mask.bool()
    if input_ids is None:
        rows, columns = mask.nonzero().unbind(-1)
        ends = mask.sum(-1).cumsum(0).tolist()
        starts = [0, *ends[:-1]]
        return Packing(rows, columns, [Segment(a, b) for a, b in zip(starts, ends, strict=True) if b > a])
    mask = mask.cpu()  # the loops below would sync with a GPU at every row
    # The last token of a prompt predicts another token for each completion, so that each has a copy of its own.
    prefix = mask.clone()
    prefix[:, prompt_width - 1 :] = False
    tokens = [row[kept].tolist() for row, kept in zip(input_ids.cpu(), prefix, strict=True)]
    sharing: dict[tuple[int, ...], list[int]] = {}
    for row, prompt in enumerate(tokens):
        sharing.setdefault(tuple(prompt), []).append(row)
    places: list[Tensor] = []
    segments: list[Segment] = []
    end = 0

    def lay(row: int, kept: Tensor, before: slice | None = None) -> slice:
        nonlocal end
        columns = kept.nonzero().squeeze(-1)
        segment = Segment(end, end + len(columns), before)
        end = segment.end
        places.append(torch.stack([torch.full_like(columns, row), columns]))
        if segment.end > segment.start:
            segments.append(segment)
        return segment.tokens

    for prompt, members in sharing.items():
        if len(members) == 1 or not prompt:
            for row in members:
                lay(row, mask[row])
            continue
        shared = lay(members[0], prefix[members[0]])
        for row in members:
            lay(row, mask[row] & ~prefix[row], shared)
    rows, columns = torch.cat(places, dim=1).to(attention_mask.device)
    return Packing(rows, columns, segments)
