"""Attend within the segments of a packed row, with the model's own attention function.

The functions are registered with transformers' public attention and mask interfaces, under prefixed names. The
segments reach the layers in place of the attention mask. A layer that gradient checkpointing recomputes therefore gets
the segments of its first run.
"""

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trl_steady.padding.packing import Segment

__all__ = ["IMPLEMENTATIONS", "attending_in", "own_implementation", "switched"]

IMPLEMENTATIONS = ("sdpa", "eager")
"""Attention functions of transformers that follow the given mask in any layout."""
_OURS = "trl_steady_packed_"  # prefix of the name of the model's own function


class Segments:
    """The segments of a packed row, which the layers get in place of an attention mask."""

    # Not a dataclass: FSDP2 would rebuild it for each layer, and the masks with it.

    def __init__(self, of_row: Sequence[Segment], window: int | None = None) -> None:
        self.of_row = of_row
        self.window = window
        """How many tokens a token attends to in these layers, including itself; None for no limit."""
        self._masks: dict[tuple[Any, ...], Tensor] = {}

    def __getitem__(self, index: tuple[slice, ...]) -> "Segments":
        """Return the segments unchanged if a layer cuts the mask to the number of queries and keys."""
        if any(part.start not in (None, 0) or part.step is not None for part in index):
            raise IndexError(f"the segments of a packed row cannot be cut to {index}. Set trim_padding=False.")
        return self

    def mask(self, own: int, shared: int, like: Tensor, implementation: str) -> Tensor | None:
        """Return a mask (1, 1, own, shared + own), or None if "sdpa" attends causally without one."""
        length = shared + own
        window = min(self.window or length, length)
        if implementation == "sdpa" and window == length and not shared:
            return None
        key_of_mask = (own, shared, like.device, like.dtype)
        if key_of_mask not in self._masks:
            query = torch.arange(shared, length, device=like.device).unsqueeze(1)
            key = torch.arange(length, device=like.device)
            sees = (key <= query) & (key > query - window)
            if implementation == "eager":
                sees = torch.zeros_like(sees, dtype=like.dtype).masked_fill(~sees, torch.finfo(like.dtype).min)
            self._masks[key_of_mask] = sees[None, None]
        return self._masks[key_of_mask]


@dataclass
class _Forward:
    """A packed forward that is running. A layer that is recomputed for its gradients belongs to none."""

    segments: Sequence[Segment]
    was_attended_in: bool = False


_forward: _Forward | None = None


def _mask(name: str, *arguments: Any, local_size: int | None = None, **options: Any) -> Any:
    """Implement transformers' `AttentionMaskInterface`, which a model calls for each kind of its layers."""
    if _forward is None:  # a forward that is not packed, while the model stays switched
        local = {} if local_size is None else {"local_size": local_size}
        return ALL_MASK_ATTENTION_FUNCTIONS[name](*arguments, **local, **options)
    return Segments(_forward.segments, local_size)


def _attend(
    name: str,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Implement transformers' `AttentionInterface`: three tensors (1, heads, N, size) give (1, N, heads, size)."""
    attend: Callable[..., Any] = _eager(type(module)) if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]
    if not isinstance(attention_mask, Segments):
        if _forward is None:
            return attend(module, query, key, value, attention_mask, **options)
        raise RuntimeError(
            f"{type(module).__name__} does not pass on the attention mask that it gets, so trim_padding=True cannot "
            "keep packed sequences apart. Set trim_padding=False."
        )
    if _forward is not None:
        _forward.was_attended_in = True
    lengths = [segment.end - segment.start for segment in attention_mask.of_row]
    outputs: list[Tensor] = []
    # Split the row: the gradient of each slice of it would be as large as the row.
    pieces = (tensor.split(lengths, dim=2) for tensor in (query, key, value))
    for segment, queries, keys, values in zip(attention_mask.of_row, *pieces, strict=True):
        if segment.prefix is not None:
            keys = torch.cat([key[:, :, segment.prefix], keys], dim=2)
            values = torch.cat([value[:, :, segment.prefix], values], dim=2)
        own = queries.size(2)
        mask = attention_mask.mask(own, keys.size(2) - own, query, name)
        outputs.append(attend(module, queries, keys, values, mask, **options)[0])
    return torch.cat(outputs, dim=1), None


def _eager(module: type) -> Callable[..., Any]:
    """Return the eager attention function of the module's modeling file. It has the same name in every file."""
    modules = (sys.modules[each.__module__] for each in module.__mro__)
    return next(vars(each)["eager_attention_forward"] for each in modules if "eager_attention_forward" in vars(each))


for _name in IMPLEMENTATIONS:
    AttentionInterface.register(_OURS + _name, functools.partial(_attend, _name))
    AttentionMaskInterface.register(_OURS + _name, functools.partial(_mask, _name))


def own_implementation(model: PreTrainedModel) -> str | None:
    """Return the name of the model's attention function, without the prefix of a switched model."""
    name = model.config.get_text_config()._attn_implementation
    return name and name.removeprefix(_OURS)


@contextmanager
def switched(model: PreTrainedModel) -> Iterator[None]:
    """Switch the model to attention functions that read segments, for packed forwards and recomputed layers."""
    configs: dict[int, Any] = {id(each.config): each.config for each in model.modules() if hasattr(each, "config")}
    before = {key: config._attn_implementation for key, config in configs.items()}
    try:
        for config in configs.values():
            if config._attn_implementation in IMPLEMENTATIONS:
                config._attn_implementation = _OURS + config._attn_implementation
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation = before[key]


@contextmanager
def attending_in(segments: Sequence[Segment]) -> Iterator[None]:
    """Set the segments in which a switched model attends during one forward.

    Raises:
        RuntimeError: no layer called its attention function through transformers' interface.
    """
    global _forward
    before, _forward = _forward, _Forward(segments)
    try:
        yield
        if not _forward.was_attended_in:
            raise RuntimeError(
                "the model does not call its attention function through transformers' interface, so trim_padding=True "
                "cannot keep packed sequences apart. Set trim_padding=False."
            )
    finally:
        _forward = before
