"""Say within which segments of a packed row the layers attend, in the form that each attention function takes."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from trl_steady.features.padding_free.packing import Segment, copy_async


class Varlen(NamedTuple):
    """`S` segments as kernels for sequences of different lengths take them, on one device."""

    query_starts: Tensor  # (S + 1,) int32, the first query of each segment, and the end of the last
    key_starts: Tensor  # (S + 1,) int32, the same for keys; those of a segment's prefix come first
    longest_queries: int
    longest_keys: int
    keys_in_row: Tensor | None  # indices of the keys in the row; None if the keys are those of the row


class Segments:
    """The segments of a packed row, which the layers get in place of an attention mask."""

    # Not a dataclass: FSDP2 would rebuild it for each layer, and what it has made with it.

    def __init__(self, segments: Sequence[Segment], attention_window: int | None = None) -> None:
        self.segments = segments
        self.attention_window = attention_window
        """How many tokens a token attends to in these layers, including itself; None for no limit."""
        self._varlen: dict[torch.device, Varlen] = {}

    def __getitem__(self, index: tuple[slice, ...]) -> "Segments":
        """Return the segments unchanged if a layer cuts the mask to the number of queries and keys."""
        if any(part.start not in (None, 0) or part.step is not None for part in index):
            raise IndexError(f"the segments of a packed row cannot be cut to {index}. Set trim_padding=False.")
        return self

    def varlen(self, device: torch.device) -> Varlen:
        """Return what one call for all segments needs, made once for the layers of a device."""
        if device in self._varlen:
            return self._varlen[device]
        queries = [len(segment) for segment in self.segments]
        keys = [len(segment) + segment.shared for segment in self.segments]
        keys_in_row = None
        if keys != queries:
            row = torch.arange(self.segments[-1].end)
            parts = [row[part] for segment in self.segments for part in (segment.prefix, segment.tokens) if part]
            keys_in_row = copy_async(torch.cat(parts), device)
        starts = _starts(queries, device), _starts(keys, device)
        self._varlen[device] = Varlen(*starts, max(queries), max(keys), keys_in_row)
        return self._varlen[device]

    def mask(self, length: int, shared: int, device: torch.device) -> Tensor:
        """Return which keys each query attends to: (length, shared + length), True = attend."""
        query = torch.arange(shared, shared + length, device=device).unsqueeze(1)
        key = torch.arange(shared + length, device=device)
        return (key <= query) & (key > query - (self.attention_window or shared + length))


def _starts(lengths: Sequence[int], device: torch.device) -> Tensor:
    return copy_async(pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32), device)
