"""Say within which segments of a packed row the layers attend, in the form that each attention function takes."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from trl_steady.padding.packing import Segment, without_waiting

__all__ = ["Segments", "Varlen"]


class Varlen(NamedTuple):
    """`S` segments as kernels for sequences of different lengths take them, on one device."""

    queries: Tensor
    """(S + 1,) int32, the first query of each segment, and the end of the last."""
    keys: Tensor
    """(S + 1,) int32, the same for keys, of which a segment has those of its prefix before its own."""
    longest_queries: int
    longest_keys: int
    taken: Tensor | None
    """Indices of the keys in the row; None if the keys are those of the row."""


class Segments:
    """The segments of a packed row, which the layers get in place of an attention mask."""

    # Not a dataclass: FSDP2 would rebuild it for each layer, and what it has made with it.

    def __init__(self, of_row: Sequence[Segment], window: int | None = None) -> None:
        self.of_row = of_row
        self.window = window
        """How many tokens a token attends to in these layers, including itself; None for no limit."""
        self._made: dict[tuple[Callable[..., Any], torch.device], Any] = {}

    def __getitem__(self, index: tuple[slice, ...]) -> "Segments":
        """Return the segments unchanged if a layer cuts the mask to the number of queries and keys."""
        if any(part.start not in (None, 0) or part.step is not None for part in index):
            raise IndexError(f"the segments of a packed row cannot be cut to {index}. Set trim_padding=False.")
        return self

    def varlen(self, device: torch.device) -> Varlen:
        """Return what one call for all segments needs, made once for the layers of a device."""
        return self._made_once(_varlen, device)

    def block_mask(self, device: torch.device) -> Any:
        """Return flex attention's mask of the row, made once for the layers of a device."""
        return self._made_once(_block_mask, device)

    def is_causal(self, own: int, shared: int) -> bool:
        """Return whether `own` tokens after `shared` ones of a prefix attend causally and to nothing else."""
        return not shared and (self.window is None or self.window >= own)

    def mask(self, own: int, shared: int, device: torch.device) -> Tensor:
        """Return which keys each query attends to: (own, shared + own), True = attend."""
        query = torch.arange(shared, shared + own, device=device).unsqueeze(1)
        key = torch.arange(shared + own, device=device)
        return (key <= query) & (key > query - (self.window or shared + own))

    def _made_once(self, make: Callable[["Segments", torch.device], Any], device: torch.device) -> Any:
        if (make, device) not in self._made:
            self._made[make, device] = make(self, device)
        return self._made[make, device]


def _varlen(segments: Segments, device: torch.device) -> Varlen:
    queries = [len(segment) for segment in segments.of_row]
    keys = [len(segment) + segment.shared for segment in segments.of_row]
    taken = None
    if keys != queries:
        row = torch.arange(segments.of_row[-1].end)
        parts = [row[part] for segment in segments.of_row for part in (segment.prefix, segment.tokens) if part]
        taken = without_waiting(torch.cat(parts), device)
    return Varlen(_starts(queries, device), _starts(keys, device), max(queries), max(keys), taken)


def _starts(lengths: Sequence[int], device: torch.device) -> Tensor:
    return without_waiting(pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32), device)


def _block_mask(segments: Segments, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask  # slow to import

    of_row = segments.of_row
    table = torch.tensor([[each.start, each.prefix.start if each.prefix else -1, each.shared] for each in of_row])
    table = table.repeat_interleave(torch.tensor([len(each) for each in of_row]), dim=0)
    start, prefix, shared = without_waiting(table, device).unbind(-1)
    count = len(start)
    position = torch.arange(count, device=device) - start + shared
    window = segments.window or count

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        is_in_segment = (start[key] == start[query]) | (start[key] == prefix[query])
        return is_in_segment & (position[key] <= position[query]) & (position[key] > position[query] - window)

    # Only if compiled does it not write down the mask of all pairs of tokens.
    return create_block_mask(sees, None, None, count, count, device, _compile=device.type != "cpu")
