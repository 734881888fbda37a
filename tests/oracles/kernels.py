"""Attend as kernels of GPUs do by their documentation, in loops over sequences. The functions count their calls.

FlashAttention's `flash_attn_varlen_func`: if there are more keys than queries, the last query meets the last key;
query i attends to keys from i + keys - queries - left to i + keys - queries + right. A sink is one more logit a head.
"""

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers import modeling_flash_attention_utils as flash

from trl_steady.features.padding_free import attention


class Calls:
    count = 0


def _softmax(scores: Tensor, allowed: Tensor, value: Tensor, sink: Tensor | None = None) -> Tensor:
    scores = scores.masked_fill(~allowed, float("-inf"))
    if sink is not None:
        scores = torch.cat([scores, sink.view(-1, 1, 1).expand(*scores.shape[:-1], 1)], dim=-1)
    return scores.softmax(-1)[..., : allowed.size(-1)] @ value


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    longest: tuple[int, int],
    *,
    scale: float | None,
    window: tuple[int, int],
    softcap: float = 0.0,
    sink: Tensor | None = None,
) -> Tensor:
    for table in (starts, key_starts):
        assert table.dtype == torch.int32 and table.device == q.device
    assert q.size(-1) == k.size(-1) == v.size(-1), "one size of heads"
    assert (int(starts[-1]), int(key_starts[-1])) == (len(q), len(k))
    assert longest == tuple(int(table.diff().max()) for table in (starts, key_starts))
    out: list[Tensor] = []
    own, seen = starts.diff().tolist(), key_starts.diff().tolist()
    for query, key, value in zip(q.split(own), k.split(seen), v.split(seen), strict=True):
        query, key, value = (each.transpose(0, 1) for each in (query, key, value))
        key, value = (each.repeat_interleave(query.size(0) // each.size(0), dim=0) for each in (key, value))
        scores = query @ key.transpose(1, 2) * (scale or query.size(-1) ** -0.5)
        if softcap:
            scores = softcap * (scores / softcap).tanh()
        late = key.size(1) - query.size(1)
        distance = torch.arange(query.size(1))[:, None] + late - torch.arange(key.size(1))[None]
        left, right = (math.inf if each < 0 else each for each in window)
        out.append(_softmax(scores, (distance <= left) & (-distance <= right), value, sink).transpose(0, 1))
    return torch.cat(out)


@contextmanager
def flash_attention(name: str = "flash_attention_2") -> Iterator[Calls]:
    """Put a kernel behind transformers' function for FlashAttention."""
    calls = Calls()

    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        deterministic: bool = False,
        s_aux: Tensor | None = None,
    ) -> Tensor:
        calls.count += 1
        assert causal and not dropout_p and not deterministic
        return _varlen(
            *(q, k, v, cu_seqlens_q, cu_seqlens_k, (max_seqlen_q, max_seqlen_k)),
            scale=softmax_scale,
            window=(window_size[0], 0),
            softcap=softcap,
            sink=s_aux,
        )

    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        starts, key_starts = (torch.arange(len(q) + 1, dtype=torch.int32) * each.size(1) for each in (q, k))
        q, k, v, shape = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), q.shape
        longest = {"max_seqlen_q": shape[1], "max_seqlen_k": len(k) // shape[0]}
        return flash_attn_varlen_func(q, k, v, starts, key_starts, **longest, **options).view(shape)

    function: Any = flash_attn_varlen_func
    with (
        patch.object(flash, "_loaded_implementation", name),
        patch.object(flash, "_flash_fn", flash_attn_func),
        patch.object(flash, "_flash_varlen_fn", function),
        patch.object(flash, "_pad_fn", flash._pad_input),
        patch.object(flash, "_unpad_fn", flash._unpad_input),
        patch.object(flash, "_process_flash_kwargs_fn", flash._lazy_define_process_function(function)),
    ):
        yield calls


@contextmanager
def torch_varlen() -> Iterator[Calls]:
    """Put a kernel in the place of torch's `varlen_attn`, which "sdpa" then takes as it does on a GPU."""
    calls = Calls()

    def varlen_attn(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False,
    ) -> Tensor:
        calls.count += 1
        assert query.dtype == key.dtype == value.dtype
        assert enable_gqa == (key.size(1) != query.size(1))
        return _varlen(query, key, value, cu_seq_q, cu_seq_k, (max_q, max_k), scale=scale, window=window_size)

    with (
        patch.object(attention, "varlen_attn", varlen_attn),
        patch.object(attention, "_takes_varlen", lambda *_, **__: True),
    ):
        yield calls


@contextmanager
def varlen_before_gqa() -> Iterator[None]:
    """Let ours call the `varlen_attn` of torch 2.11 and 2.12, which has one head of keys for each of queries."""
    try:
        from torch.nn.attention.varlen import varlen_attn as older
    except ImportError:
        older = None
    if attention.varlen_attn is not None or older is None or "window_size" not in inspect.signature(older).parameters:
        yield
        return

    def varlen_attn(query: Tensor, key: Tensor, value: Tensor, *tables: Any, enable_gqa: bool, **options: Any) -> Any:
        assert enable_gqa == (key.size(1) != query.size(1))
        key, value = (each.repeat_interleave(query.size(1) // each.size(1), dim=1) for each in (key, value))
        return older(query, key, value, *tables, **options)

    with patch.object(attention, "varlen_attn", varlen_attn):
        yield


def use(model: PreTrainedModel, name: str) -> None:
    """Let a model attend by a function that transformers would refuse to load here."""
    for module in model.modules():
        if isinstance(config := getattr(module, "config", None), PretrainedConfig):
            config._attn_implementation = name


KERNELS: dict[str, Callable[[], Any]] = {
    "flash_attention_2": flash_attention,
    "sdpa": torch_varlen,
}
