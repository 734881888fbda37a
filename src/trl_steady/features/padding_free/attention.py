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
from packaging.version import Version
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trl_steady.features.padding_free.packing import Segment
from trl_steady.features.padding_free.segments import Segments

# an older torch has no such function, or one that takes less; 2.13.0a0 has it
if Version(torch.__version__).release >= (2, 13):
    from torch.nn.attention.varlen import varlen_attn
else:
    varlen_attn = None

_OURS = "trl_steady_packed_"  # prefix of the name of the model's own function


@dataclass
class _Forward:
    """A packed forward that is running. A layer that is recomputed for its gradients belongs to none."""

    segments: Sequence[Segment]
    was_attended_in: bool = False


_forward: _Forward | None = None


def why_not_packed(implementation: str | None) -> str | None:
    """Return why an attention function cannot attend within segments; None if it can."""
    if implementation in ("sdpa", "eager") or _is_flash(implementation):
        return None
    return f"attn_implementation={implementation!r} has not been tested with packed sequences"


def _is_flash(implementation: str | None) -> bool:
    """Return whether transformers' function for FlashAttention is behind a name, as for kernels from the hub."""
    return ALL_ATTENTION_FUNCTIONS.get(implementation) is flash_attention_forward


def _mask(name: str, *arguments: object, local_size: int | None = None, **options: object) -> Segments | Tensor | None:
    """Implement transformers' `AttentionMaskInterface`, which a model calls for each kind of its layers."""
    if _forward is not None:
        return Segments(_forward.segments, local_size)
    # a forward that is not packed, while the model stays switched
    local = {} if local_size is None else {"local_size": local_size}
    return ALL_MASK_ATTENTION_FUNCTIONS[name](*arguments, **local, **options)


def _attend(
    name: str,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Segments | Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Implement transformers' `AttentionInterface`: three tensors (1, heads, N, size) give (1, N, heads, size)."""
    attend = functools.partial(_eager(type(module)) if name == "eager" else ALL_ATTENTION_FUNCTIONS[name], module)
    if isinstance(attention_mask, Segments):
        if _forward is not None:
            _forward.was_attended_in = True
    elif _forward is None:
        with _named(module.config, name):
            return attend(query, key, value, attention_mask, **options)
    else:
        raise RuntimeError(
            f"{type(module).__name__} does not pass on the attention mask that it gets, so trim_padding=True cannot "
            "keep packed sequences apart. Set trim_padding=False."
        )
    is_flash = _is_flash(name)
    if not is_flash and not (name == "sdpa" and _takes_varlen(query, value, **options)):
        return _one_by_one(name, attend, (query, key, value), attention_mask, options), None
    varlen = attention_mask.varlen(query.device)
    if varlen.taken is not None:
        key, value = (tensor.index_select(2, varlen.taken) for tensor in (key, value))
    if not is_flash:
        return _by_varlen((query, key, value), attention_mask, options.get("scaling")), None
    options |= {"cu_seq_lens_q": varlen.queries, "cu_seq_lens_k": varlen.keys}
    options |= {"max_length_q": varlen.longest_queries, "max_length_k": varlen.longest_keys}
    with _named(module.config, name):
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
        and not dropout
        and position_bias is None
    )


def _autocast(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which "sdpa" would take a tensor. Rotary positions leave queries and keys in float32."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


def _by_varlen(inputs: Sequence[Tensor], segments: Segments, scaling: float | None) -> Tensor:
    query, key, value = (tensor[0].transpose(0, 1).to(_autocast(tensor)) for tensor in inputs)
    varlen = segments.varlen(query.device)
    assert varlen_attn is not None
    output: Any = varlen_attn(
        query,
        key,
        pad(value, (0, query.size(-1) - value.size(-1))),  # as large as the other two, which the kernel wants
        varlen.queries,
        varlen.keys,
        varlen.longest_queries,
        varlen.longest_keys,
        scale=scaling,
        window_size=(-1 if segments.window is None else segments.window - 1, 0),
        enable_gqa=key.size(1) != query.size(1),
    )
    return output[..., : value.size(-1)].unsqueeze(0)


def _one_by_one(
    name: str, attend: Callable[..., Any], inputs: Sequence[Tensor], segments: Segments, options: dict[str, Any]
) -> Tensor:
    def masked(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = segments.mask(query.size(2), key.size(2) - query.size(2), query.device)
        if name == "eager":
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
        return attend(query, key, value, mask[None, None], **options)[0]

    outputs: list[Tensor] = []
    # Split the row: the gradient of each slice of it would be as large as the row.
    pieces = (tensor.split([len(segment) for segment in segments.of_row], dim=2) for tensor in inputs)
    for segment, query, *seen in zip(segments.of_row, *pieces, strict=True):
        if segment.prefix is not None:
            of_prefix = [tensor[:, :, segment.prefix] for tensor in inputs[1:]]
            seen = [torch.cat(pair, dim=2) for pair in zip(of_prefix, seen, strict=True)]
        if name == "eager":
            outputs.append(masked(query, *seen))
        elif not segment.shared and (segments.window is None or segments.window >= len(segment)):
            outputs.append(attend(query, *seen, None, **options)[0])
        else:  # "sdpa" would keep each mask until the backward
            outputs.append(
                checkpoint(masked, query, *seen, use_reentrant=False, preserve_rng_state=bool(options.get("dropout")))
            )
    return torch.cat(outputs, dim=1)


def _eager(module: type) -> Callable[..., Any]:
    """Return the eager attention function of the module's modeling file. It has the same name in every file."""
    modules = (sys.modules[each.__module__] for each in module.__mro__)
    return next(vars(each)["eager_attention_forward"] for each in modules if "eager_attention_forward" in vars(each))


@contextmanager
def _named(config: Any, name: str) -> Iterator[None]:
    """Let a config name another attention function, by which layers find it, and FlashAttention its kernel."""
    before, config._attn_implementation = config._attn_implementation, name
    try:
        yield
    finally:
        config._attn_implementation = before


def own_implementation(model: PreTrainedModel) -> str | None:
    """Return the name of the model's attention function, without the prefix of a switched model."""
    name = model.config.get_text_config()._attn_implementation
    return name and name.removeprefix(_OURS)


@contextmanager
def switched(model: PreTrainedModel) -> Iterator[None]:
    """Switch the model to attention functions that read segments, for packed forwards and recomputed layers."""
    name = own_implementation(model)
    assert name is not None
    # kernels from the hub have names that are known only now
    AttentionInterface.register(_OURS + name, functools.partial(_attend, name))
    AttentionMaskInterface.register(_OURS + name, functools.partial(_mask, name))
    with _named(model.config, _OURS + name):
        yield


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
