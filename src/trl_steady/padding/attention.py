"""Attention within the segments of a packed row, by the model's own attention function.

Registered with transformers under a name of ours, by its public interfaces. The segments travel to the layers in the
place of the attention mask, so that a layer which gradient checkpointing runs again gets those of its first run.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trl_steady.padding.packing import Segment

__all__ = ["IMPLEMENTATIONS", "attending_in", "switched"]

IMPLEMENTATIONS = ("sdpa", "eager")
"""Of transformers' attention functions those that attend as they are told, whatever the layout."""
_OURS = "trl_steady_packed"


@dataclass(frozen=True)
class Segments:
    """What the layers of a packed row get in the place of a mask."""

    of_row: Sequence[Segment]
    implementation: str | None
    """The model's own attention function."""
    window: int | None = None
    """How far back a token of these layers may look, itself included."""
    _masks: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)

    def __getitem__(self, index: tuple[slice, ...]) -> "Segments":
        """What a mask cut to as many queries and keys as there are would be."""
        if any(part.start not in (None, 0) or part.step is not None for part in index):
            raise IndexError(f"segments of a whole row cannot be cut to {index}")
        return self

    def mask(self, own: int, shared: int, like: Tensor) -> Tensor | None:
        """(1, 1, own, shared + own), or None for what "sdpa" takes as causal."""
        length = shared + own
        window = min(self.window or length, length)
        if self.implementation == "sdpa" and window == length and not shared:
            return None
        key_of_mask = (own, shared, like.device, like.dtype)
        if key_of_mask not in self._masks:
            query = torch.arange(shared, length, device=like.device).unsqueeze(1)
            key = torch.arange(length, device=like.device)
            sees = (key <= query) & (key > query - window)
            if self.implementation == "eager":
                sees = torch.zeros_like(sees, dtype=like.dtype).masked_fill(~sees, torch.finfo(like.dtype).min)
            self._masks[key_of_mask] = sees[None, None]
        return self._masks[key_of_mask]


_segments: Segments | None = None


def _mask(*_: Any, local_size: int | None = None, **__: Any) -> Segments:
    """Of transformers' `AttentionMaskInterface`: a model calls it for each kind of its layers."""
    assert _segments is not None
    return replace(_segments, window=local_size, _masks={})


def _attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Of transformers' `AttentionInterface`: (1, heads, N, size) each, to (1, N, heads, size)."""
    if not isinstance(attention_mask, Segments):
        raise RuntimeError(
            f"{type(module).__name__} does not pass on the attention mask it is given, which trim_padding=True relies "
            "on to keep the sequences of a batch apart. Set trim_padding=False."
        )
    attend: Callable[..., Any] = (
        _eager(type(module))
        if attention_mask.implementation == "eager"
        else ALL_ATTENTION_FUNCTIONS[attention_mask.implementation]
    )
    outputs: list[Tensor] = []
    for segment in attention_mask.of_row:
        tokens, prefix = segment.tokens, segment.prefix
        keys, values = key[:, :, tokens], value[:, :, tokens]
        if prefix is not None:
            keys = torch.cat([key[:, :, prefix], keys], dim=2)
            values = torch.cat([value[:, :, prefix], values], dim=2)
        length = segment.end - segment.start
        mask = attention_mask.mask(length, keys.size(2) - length, query)
        outputs.append(attend(module, query[:, :, tokens], keys, values, mask, **options)[0])
    return torch.cat(outputs, dim=1), None


def _eager(module: type) -> Callable[..., Any]:
    """Each of transformers' modeling files has its own, by this name."""
    modules = (sys.modules[each.__module__] for each in module.__mro__)
    return next(vars(each)["eager_attention_forward"] for each in modules if "eager_attention_forward" in vars(each))


AttentionInterface.register(_OURS, _attend)
AttentionMaskInterface.register(_OURS, _mask)


@contextmanager
def switched(model: PreTrainedModel) -> Iterator[None]:
    """The model attends in segments, also where a layer is run again for its gradients."""
    configs: list[Any] = [module.config for module in model.modules() if hasattr(module, "config")]
    before = [config._attn_implementation for config in configs]
    try:
        for config in configs:
            config._attn_implementation = _OURS
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation = name


@contextmanager
def attending_in(segments: Sequence[Segment], implementation: str | None) -> Iterator[None]:
    """What the layers of a switched model attend to in a forward, each by `implementation`."""
    global _segments
    _segments = Segments(segments, implementation)
    try:
        yield
    finally:
        _segments = None
