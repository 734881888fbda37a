"""The candidates of each token of a rollout: the tokens among which it was sampled, which top-p and the like kept.

Sets of candidates are ragged, because a peaked distribution keeps one token and a flat one keeps thousands. An empty
set stands for the whole vocabulary. It belongs to a token that was not sampled, or was sampled among all tokens or
among more than `MAX_CANDIDATES`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

MAX_CANDIDATES = 4096
"""Size of the largest set that is recorded. A larger set is replaced by the whole vocabulary."""
_AT_A_TIME = 2**18
"""Tokens of sets that are indexed at a time. Their indices would take six times the memory of the tokens."""


@dataclass(frozen=True)
class CandidateSets:
    """Sets of tokens at `N` positions, `M` tokens in all. The order within a set has no meaning."""

    ids: Tensor
    """(M,) int32 token ids, one set after the other."""
    offsets: Tensor
    """(N + 1,) int64: set n is `ids[offsets[n]:offsets[n + 1]]`."""
    sizes: Tensor = field(default_factory=lambda: torch.empty(0))
    """(N,) `counts` on the CPU, for which `take` has waited; otherwise empty."""

    @classmethod
    def from_counts(cls, ids: Tensor, counts: Tensor) -> "CandidateSets":
        """Build from token ids (M,), one set after the other, and the sizes (N,) of the sets."""
        return cls(ids.to(torch.int32), torch.nn.functional.pad(counts.long().cumsum(0), (1, 0)))

    @classmethod
    def from_mask(cls, mask: Tensor) -> "CandidateSets":
        """Build from a (N, V) bool mask. Sets of all tokens or of more than `MAX_CANDIDATES` become empty."""
        counts = mask.sum(-1)
        fits = _fits(counts, mask.size(-1))
        return cls.from_counts((mask & fits.unsqueeze(-1)).nonzero()[:, 1], counts.where(fits, 0))

    @classmethod
    def cat(cls, parts: Sequence["CandidateSets"]) -> "CandidateSets":
        """Concatenate the sets of several parts, in order."""
        ids = torch.cat([part.ids for part in parts])
        counts = torch.cat([part.counts for part in parts])
        return cls.from_counts(ids, counts)

    def __len__(self) -> int:
        """Return the number of positions, N."""
        return len(self.offsets) - 1

    @property
    def counts(self) -> Tensor:
        """(N,) number of tokens in each set, 0 for the whole vocabulary."""
        return self.offsets.diff()

    @property
    def positions(self) -> Tensor:
        """(M,) position of each token in `ids`."""
        return torch.repeat_interleave(self.counts)

    def split(self, width: int) -> list[tuple[Tensor, Tensor]]:
        """Return a list of `ids` and `offsets` for every `width` positions, which TRL can shuffle and divide."""
        ends = self.offsets[width::width]
        parts = self.ids.tensor_split(ends[:-1].cpu())
        starts = self.offsets[:-1].view(-1, width)
        offsets = torch.cat([starts, ends.unsqueeze(-1)], dim=1) - starts[:, :1]
        return list(zip(parts, offsets, strict=True))

    def take(self, index: Tensor) -> "CandidateSets":
        """Return the sets of the positions in (n,) `index`, in this order; -1 gives an empty set."""
        index = index.to(self.offsets.device)
        counts = torch.cat([self.counts, self.offsets.new_zeros(1)])[index]  # -1 is the last, an empty set
        offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        shifts = self.offsets[index] - offsets[:-1]
        sizes = counts.cpu()
        ids = self.ids.new_empty(int(sizes.sum()))
        for positions, tokens in _parts(sizes):
            indices = torch.arange(tokens.start, tokens.stop, device=index.device)
            indices += shifts[positions].repeat_interleave(counts[positions], output_size=len(indices))
            ids[tokens] = self.ids[indices]
        return CandidateSets(ids, offsets, sizes)

    def without_large(self, vocabulary: int) -> "CandidateSets":
        """Return the sets, with those of more than `MAX_CANDIDATES` tokens or of the whole vocabulary made empty."""
        fits = _fits(self.counts, vocabulary)
        if fits.all():
            return self
        return self.take(torch.arange(len(self), device=fits.device).where(fits, -1))

    def has(self, tokens: Tensor) -> Tensor:
        """Return (N,) bool, True where the token of a position is in its set. An empty set has all tokens."""
        counts = self.counts
        tokens = tokens.to(counts.device)
        has_token = counts == 0
        numbers = torch.arange(len(self), device=counts.device)
        for positions, of_sets in _parts(counts.cpu()):
            size = of_sets.stop - of_sets.start
            owners = numbers[positions].repeat_interleave(counts[positions], output_size=size)
            has_token[owners[self.ids[of_sets] == tokens[owners]]] = True
        return has_token

    def to(self, device: torch.device) -> "CandidateSets":
        """Return the sets on a device."""
        return CandidateSets(self.ids.to(device), self.offsets.to(device), self.sizes)


def _fits(counts: Tensor, vocabulary: int) -> Tensor:
    """Return bool, False for the size of a set that is replaced by the whole vocabulary."""
    return (counts <= MAX_CANDIDATES) & (counts < vocabulary)


def _parts(sizes: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield slices of positions and of the tokens of their sets, about `_AT_A_TIME` tokens at a time.

    `sizes` (N,) are those of the sets, on the CPU. Empty sets at the end are left out.
    """
    ends = sizes.cumsum(0)
    limits = torch.arange(_AT_A_TIME, int(sizes.sum()) + _AT_A_TIME, _AT_A_TIME)
    stops = (torch.searchsorted(ends, limits) + 1).clamp(max=len(sizes)).unique()
    position = 0
    token = 0
    for stop in stops.tolist():
        end = int(ends[stop - 1])
        yield slice(position, stop), slice(token, end)
        position = stop
        token = end
