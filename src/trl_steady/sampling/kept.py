"""Kept tokens as data: among which tokens each one of a rollout was sampled.

Ragged, since a peaked distribution keeps one token and a flat one thousands. An empty set stands for the whole
vocabulary: of a token that was not sampled, or sampled among all, or among more than are worth keeping.
"""

# pyright: reportUnknownMemberType=false
# torch's annotations are partial

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trl_steady.functional.pooling import LARGEST_COUNT

__all__ = ["MAX_KEPT", "KeptTokens"]

MAX_KEPT = LARGEST_COUNT
"""Tokens of the largest set that is recorded; of a larger one, the vocabulary stands in."""


@dataclass(frozen=True)
class KeptTokens:
    """Sets of `N` positions, `M` tokens in all. The order within a set means nothing."""

    ids: Tensor
    """(M,) int32, the sets one after the other."""
    offsets: Tensor
    """(N + 1,) int64: set n is `ids[offsets[n]:offsets[n + 1]]`."""

    @classmethod
    def of(cls, sets: Iterable[Sequence[int]]) -> "KeptTokens":
        """From lists of token ids.

        >>> KeptTokens.of([[5, 7], [], [3]]).offsets.tolist()
        [0, 2, 2, 3]

        Raises:
            ValueError: a set with a token twice, or with a negative one.
        """
        sets = list(sets)
        counts = torch.tensor([0, *map(len, sets)])
        kept = cls(torch.tensor([token for each in sets for token in each], dtype=torch.int32), counts.cumsum(0))
        kept.check()
        return kept

    def check(self) -> None:
        """Refuse what is no set of tokens.

        Raises:
            ValueError: a set with a token twice, or with a negative one.
        """
        rows = self.rows
        order = (rows * 2**32 + self.ids).argsort()
        rows, ids = rows[order], self.ids[order]
        wrong = ids < 0
        wrong[1:] |= (rows.diff() == 0) & (ids.diff() == 0)
        if wrong.any():
            number = int(rows[wrong][0])
            raise ValueError(
                f"kept tokens of position {number} are {self.lists()[number][:8]}: token ids, each one once."
            )

    @classmethod
    def of_counts(cls, ids: Tensor, counts: Tensor) -> "KeptTokens":
        """From the sets one after the other, (M,), and how many tokens each has, (N,)."""
        offsets = torch.cat([counts.new_zeros(1, dtype=torch.int64), counts.long().cumsum(0)])
        return cls(ids.to(torch.int32), offsets)

    @classmethod
    def of_mask(cls, is_kept: Tensor, limit: int = MAX_KEPT) -> "KeptTokens":
        """From (N, V) bool, with empty sets for those of more than `limit` tokens and for the whole vocabulary.

        >>> KeptTokens.of_mask(torch.tensor([[True, True], [False, True]])).lists()
        [[], [1]]
        """
        counts = is_kept.sum(-1)
        fits = (counts <= limit) & (counts < is_kept.size(-1))
        return cls.of_counts((is_kept & fits.unsqueeze(-1)).nonzero()[:, 1], counts.where(fits, 0))

    @classmethod
    def joined(cls, parts: Sequence["KeptTokens"]) -> "KeptTokens":
        """All positions of all parts, in order."""
        return cls.of_counts(torch.cat([part.ids for part in parts]), torch.cat([part.counts for part in parts]))

    def __len__(self) -> int:
        """N."""
        return len(self.offsets) - 1

    @property
    def counts(self) -> Tensor:
        """(N,) tokens in each set, 0 for the whole vocabulary."""
        return self.offsets.diff()

    @property
    def rows(self) -> Tensor:
        """(M,) the position that each token of `ids` belongs to."""
        counts = self.counts
        return torch.arange(len(counts), device=counts.device).repeat_interleave(counts)

    def of_samples(self, width: int) -> list[tuple[Tensor, Tensor]]:
        """The same as a list, with `ids` and `offsets` of every `width` positions: what TRL can shuffle and divide."""
        ends = self.offsets[width::width]
        parts = self.ids.tensor_split(ends[:-1].cpu())
        starts = self.offsets[:-1].view(-1, width)
        offsets = torch.cat([starts, ends.unsqueeze(-1)], dim=1) - starts[:, :1]
        return list(zip(parts, offsets, strict=True))

    def lists(self) -> list[list[int]]:
        """The sets as lists.

        >>> KeptTokens.of([[5, 7], [], [3]]).lists()
        [[5, 7], [], [3]]
        """
        if not len(self):
            return []
        return [part.tolist() for part in self.ids.tensor_split(self.offsets[1:-1].cpu())]

    def take(self, index: Tensor) -> "KeptTokens":
        """The sets of some positions, in the order of (n,) `index`; -1 for an empty set.

        >>> KeptTokens.of([[5, 7], [], [3]]).take(torch.tensor([2, -1, 0, 2])).lists()
        [[3], [], [5, 7], [3]]
        """
        index = index.to(self.offsets.device)
        starts, counts = self.offsets[:-1], self.counts
        own = index.clamp(min=0)
        taken = counts[own].where(index >= 0, 0) if len(counts) else torch.zeros_like(index)
        offsets = torch.cat([taken.new_zeros(1), taken.cumsum(0)])
        shifts = (starts[own] if len(counts) else taken) - offsets[:-1]
        places = torch.arange(int(offsets[-1]), device=index.device) + shifts.repeat_interleave(taken)
        return KeptTokens(self.ids[places], offsets)

    def without_large(self, vocabulary: int, limit: int = MAX_KEPT) -> "KeptTokens":
        """The same, with empty sets for those of more than `limit` tokens and for those that have the vocabulary.

        >>> KeptTokens.of([[0, 1, 2], [1], [2, 1]]).without_large(vocabulary=3, limit=1).lists()
        [[], [1], []]
        """
        counts = self.counts
        fits = (counts <= limit) & (counts < vocabulary)
        return KeptTokens.of_counts(self.ids[fits[self.rows]], counts.where(fits, 0))

    def has(self, tokens: Tensor) -> Tensor:
        """(N,) bool: which of (N,) tokens, one a position, are in their sets; an empty one has all.

        >>> KeptTokens.of([[5, 7], [], [3]]).has(torch.tensor([7, 1, 4])).tolist()
        [True, True, False]
        """
        rows = self.rows
        matches = self.ids == tokens.to(self.ids.device)[rows]
        found = torch.zeros(len(tokens), dtype=torch.bool, device=self.ids.device)
        found[rows[matches]] = True
        return found | (self.counts == 0)

    def to(self, device: torch.device) -> "KeptTokens":
        """The same on a device."""
        return KeptTokens(self.ids.to(device), self.offsets.to(device))
