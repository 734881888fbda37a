"""Attend within the segments of a packed row, with the model's own attention function.

The functions are registered with transformers' public attention and mask interfaces, under names of their own. The
segments reach the layers in place of the attention mask. A layer that gradient checkpointing recomputes therefore gets
the segments of its first run.

transformers keeps packed sequences apart too, but not with a shared prompt, and "sdpa" and "eager" get one mask of all
tokens by all tokens. Forward and backward of a Qwen2 of 4 layers and width 256 with "sdpa" on a CPU core then take 2.3
times as long for 8 sequences of 1,024 tokens in all, and 5.9 times as long, with 1.7 times the peak memory, for 16 of
8,192.
"""

import functools
import re
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from packaging.version import Version
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trl_steady.core.devices import copy_async
from trl_steady.features.padding_free.packing import Segment

# an older torch has no such function, or one that takes less; 2.13.0a0 has it
if Version(torch.__version__).release >= (2, 13):
    from torch.nn.attention.varlen import varlen_attn
else:
    varlen_attn = None

_PREFIX = "trl_steady_packed_"


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
        for part in index:
            if part.start not in (None, 0) or part.step is not None:
                raise IndexError(f"the segments of a packed row cannot be cut to {index}. Set trim_padding=False.")
        return self

    def varlen(self, device: torch.device) -> Varlen:
        """Return what one call for all segments needs, made once for the layers of a device."""
        if device in self._varlen:
            return self._varlen[device]
        queries = list(map(len, self.segments))
        keys = [len(segment) + segment.shared for segment in self.segments]
        keys_in_row = None
        if keys != queries:
            row = torch.arange(self.segments[-1].end)
            parts: list[Tensor] = []
            for segment in self.segments:
                if segment.prefix is not None:
                    parts.append(row[segment.prefix])
                parts.append(row[segment.tokens])
            keys_in_row = copy_async(torch.cat(parts), device)
        query_starts = _starts(queries, device)
        key_starts = _starts(keys, device)
        self._varlen[device] = Varlen(query_starts, key_starts, max(queries), max(keys), keys_in_row)
        return self._varlen[device]

    def mask(self, length: int, shared: int, device: torch.device) -> Tensor:
        """Return which keys each query attends to: (length, shared + length), True = attend."""
        query = torch.arange(shared, shared + length, device=device).unsqueeze(1)
        key = torch.arange(shared + length, device=device)
        window = self.attention_window or shared + length
        return (key <= query) & (key > query - window)


def _starts(lengths: Sequence[int], device: torch.device) -> Tensor:
    ends = torch.tensor(lengths).cumsum(0)
    return copy_async(pad(ends, (1, 0)).to(torch.int32), device)


def why_not_packed(implementation: str | None) -> str | None:
    """Return why an attention function cannot attend within segments; None if it can."""
    if implementation in ("sdpa", "eager") or _is_flash(implementation):
        return None
    return f"attn_implementation={implementation!r} has not been tested with packed sequences"


def _is_flash(implementation: str | None) -> bool:
    """Return whether transformers' function for FlashAttention is behind a name, as for kernels from the hub."""
    return ALL_ATTENTION_FUNCTIONS.get(implementation) is flash_attention_forward


def own_implementation(model: PreTrainedModel) -> str | None:
    """Return the name of the model's attention function, also if the model is switched."""
    name = model.config.get_text_config()._attn_implementation
    return name and re.sub(rf"^{_PREFIX}\d+_", "", name)


class PackedAttention:
    """The attention of one model within the segments of packed rows.

    The model is `switched` for the whole pass, also while backward recomputes layers, and `within` the segments of one
    forward. Forwards that are not packed attend as usual.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._config = model.config
        self._name = own_implementation(model) or ""
        self._segments: Sequence[Segment] | None = None
        """Those of the packed forward that is running. A layer that backward recomputes belongs to none."""
        self._was_called = False

    @contextmanager
    def switched(self) -> Generator[None]:
        """Switch the model to attention functions that read segments."""
        name = f"{_PREFIX}{id(self)}_{self._name}"  # other models may be switched at the same time
        AttentionInterface.register(name, self._attend)
        AttentionMaskInterface.register(name, self._mask)
        with _named(self._config, name):
            yield

    @contextmanager
    def within(self, segments: Sequence[Segment]) -> Generator[None]:
        """Set the segments in which the switched model attends during one forward.

        Raises:
            RuntimeError: no layer called its attention function through transformers' interface.
        """
        before = self._segments
        self._segments = segments
        self._was_called = False
        try:
            yield
            if not self._was_called:
                raise RuntimeError(
                    "the model does not call its attention function through transformers' interface, so "
                    "trim_padding=True cannot keep packed sequences apart. Set trim_padding=False."
                )
        finally:
            self._segments = before

    def _mask(self, *arguments: object, local_size: int | None = None, **options: object) -> Segments | Tensor | None:
        """Implement transformers' `AttentionMaskInterface`, which a model calls for each kind of its layers."""
        if self._segments is not None:
            return Segments(self._segments, local_size)
        if local_size is not None:
            options["local_size"] = local_size
        return ALL_MASK_ATTENTION_FUNCTIONS[self._name](*arguments, **options)

    def _attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Segments | Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Implement transformers' `AttentionInterface`: three tensors (1, heads, N, size) give (1, N, heads, size)."""
        attend = functools.partial(_function(self._name, type(module)), module)
        is_flash = _is_flash(self._name)
        # FlashAttention finds its kernel by the name in the config
        with _named(module.config, self._name) if is_flash else nullcontext():
            if not isinstance(attention_mask, Segments):
                if self._segments is None:
                    return attend(query, key, value, attention_mask, **options)
                raise RuntimeError(
                    f"{type(module).__name__} does not pass on the attention mask that it gets, so trim_padding=True "
                    "cannot keep packed sequences apart. Set trim_padding=False."
                )
            self._was_called = True
            is_varlen = not is_flash and self._name == "sdpa" and _takes_varlen(query, value, **options)
            if not is_flash and not is_varlen:
                return _one_by_one(self._name, attend, query, key, value, attention_mask, options), None
            varlen = attention_mask.varlen(query.device)
            if varlen.keys_in_row is not None:
                key = key.index_select(2, varlen.keys_in_row)
                value = value.index_select(2, varlen.keys_in_row)
            if is_varlen:
                return _by_varlen(query, key, value, attention_mask, options.get("scaling")), None
            options["cu_seq_lens_q"] = varlen.query_starts
            options["cu_seq_lens_k"] = varlen.key_starts
            options["max_length_q"] = varlen.longest_queries
            options["max_length_k"] = varlen.longest_keys
            return attend(query, key, value, None, **options)[0], None


def _takes_varlen(
    query: Tensor, value: Tensor, dropout: float = 0.0, position_bias: Tensor | None = None, **_: object
) -> bool:
    """Return whether torch's function for sequences of different lengths can stand for "sdpa"."""
    return (
        varlen_attn is not None
        and query.is_cuda
        and torch.version.hip is None
        and torch.cuda.is_available()
        and torch.backends.cuda.flash_sdp_enabled()
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
        and _autocast(query) in (torch.bfloat16, torch.float16)
        and value.size(-1) <= query.size(-1) <= 256  # the kernel's largest head
        and query.size(-1) % 8 == 0  # the kernel refuses others, which "sdpa" pads
        and not dropout
        and position_bias is None
    )


def _autocast(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which "sdpa" would take a tensor. Rotary positions leave queries and keys in float32."""
    kind = tensor.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return tensor.dtype


def _by_varlen(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None) -> Tensor:
    query = query[0].transpose(0, 1).to(_autocast(query))
    key = key[0].transpose(0, 1).to(_autocast(key))
    value = value[0].transpose(0, 1).to(_autocast(value))
    varlen = segments.varlen(query.device)
    tokens_before = -1  # no limit
    if segments.attention_window is not None:
        tokens_before = segments.attention_window - 1
    assert varlen_attn is not None
    output: Any = varlen_attn(
        query,
        key,
        pad(value, (0, query.size(-1) - value.size(-1))),  # as large as the other two, which the kernel wants
        varlen.query_starts,
        varlen.key_starts,
        varlen.longest_queries,
        varlen.longest_keys,
        scale=scaling,
        window_size=(tokens_before, 0),
        enable_gqa=key.size(1) != query.size(1),
    )
    return output[..., : value.size(-1)].unsqueeze(0)


def _one_by_one(
    name: str,
    attend: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    options: dict[str, Any],
) -> Tensor:
    def masked(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = segments.mask(query.size(2), key.size(2) - query.size(2), query.device)
        if name == "eager":
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
        return attend(query, key, value, mask[None, None], **options)[0]

    outputs: list[Tensor] = []
    window = segments.attention_window
    has_dropout = bool(options.get("dropout"))
    # Split the row: the gradient of each slice of it would be as large as the row.
    lengths = list(map(len, segments.segments))
    parts = zip(
        segments.segments,
        query.split(lengths, dim=2),
        key.split(lengths, dim=2),
        value.split(lengths, dim=2),
        strict=True,
    )
    for segment, queries, keys, values in parts:
        if segment.prefix is not None:
            prefix_keys = key[:, :, segment.prefix]
            prefix_values = value[:, :, segment.prefix]
            keys = torch.cat([prefix_keys, keys], dim=2)
            values = torch.cat([prefix_values, values], dim=2)
        if name == "eager":
            output = masked(queries, keys, values)
        elif not segment.shared and (window is None or window >= len(segment)):
            output = attend(queries, keys, values, None, **options)[0]
        else:  # "sdpa" would keep each mask until the backward
            output = checkpoint(masked, queries, keys, values, use_reentrant=False, preserve_rng_state=has_dropout)
        outputs.append(output)
    return torch.cat(outputs, dim=1)


def _function(name: str, module: type) -> Callable[..., Any]:
    """Return transformers' attention function of a name. "eager" is in the modeling file of each family."""
    if name != "eager":
        return ALL_ATTENTION_FUNCTIONS[name]
    for kind in module.__mro__:
        functions = vars(sys.modules[kind.__module__])
        if "eager_attention_forward" in functions:
            return functions["eager_attention_forward"]
    raise RuntimeError(f"{module.__name__} has no function for eager attention. Set trim_padding=False.")


@contextmanager
def _named(config: Any, name: str) -> Generator[None]:
    """Let a config name another attention function, by which layers find it, and FlashAttention its kernel."""
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before
