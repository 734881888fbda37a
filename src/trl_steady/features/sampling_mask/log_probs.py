"""Compute log-probs among the candidates of each token, from the inputs of an LM head.

No logits of the whole vocabulary are computed. Each position reads only the rows of the head for the tokens in its
set. Positions are processed in chunks, and again in backward.
"""

# pyright: reportIncompatibleMethodOverride=false
# an autograd function has other arguments than torch declares

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from trl_steady.features.sampling_mask.candidates import CandidateSets
from trl_steady.trl_bridge.lm_head import Head

_CHUNK = 2**22
"""Numbers of the head that are read at a time on CPU; 8 times as many on a GPU, where launching kernels costs most."""


class _Chunk(NamedTuple):
    """Chunk of `n` positions with sets of similar size, of at most `K` tokens each."""

    positions: Tensor  # (n,)
    ids: Tensor  # (n, K)
    is_candidate: Tensor  # (n, K) bool, False for entries that only fill up a row
    is_target: Tensor  # (n, K) bool
    count: int  # of candidates


def _chunks(sets: CandidateSets, targets: Tensor, width: int) -> Iterator[_Chunk]:
    """Yield all positions whose sets have two tokens or more, those with the largest sets first."""
    counts = sets.counts
    order = counts.argsort(descending=True, stable=True)
    sizes = cast(list[int], (sets.sizes if len(sets.sizes) else counts).sort(descending=True).values.tolist())
    with_choice = sum(size >= 2 for size in sizes)
    size = _CHUNK if counts.device.type == "cpu" else 8 * _CHUNK
    start = 0
    while start < with_choice:
        end = min(start + max(1, size // (sizes[start] * width)), with_choice)
        positions = order[start:end]
        columns = torch.arange(sizes[start], device=counts.device)
        is_candidate = columns < counts[positions].unsqueeze(-1)
        indices = (sets.offsets[positions].unsqueeze(-1) + columns).clamp(max=len(sets.ids) - 1)
        ids = sets.ids[indices].long().where(is_candidate, 0)
        is_target = is_candidate & (ids == targets[positions].unsqueeze(-1))
        yield _Chunk(positions, ids, is_candidate, is_target, sum(sizes[start:end]))
        start = end


class _CandidateLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        sets: CandidateSets,
        scaling: tuple[float, float, float | None],
    ) -> Tensor:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        ctx.targets, ctx.sets, ctx.options = targets, sets, (dtype, *scaling)
        log_probs = hidden.new_zeros(len(hidden), dtype=torch.promote_types(dtype, torch.float32))
        normalisers = torch.zeros_like(log_probs)
        for chunk in _chunks(sets, targets, hidden.size(-1)):
            logits = _logits(chunk, hidden, weight, bias, *ctx.options)[0]
            normaliser = logits.logsumexp(-1)
            log_probs[chunk.positions] = logits.where(chunk.is_target, 0).sum(-1) - normaliser
            normalisers[chunk.positions] = normaliser
        ctx.save_for_backward(hidden, weight, bias, normalisers)
        return log_probs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, normalisers = ctx.saved_tensors
        # autocast would round the sums
        with torch.autocast(hidden.device.type, enabled=False):
            grad_hidden, grad_weight, grad_bias = (
                torch.zeros(source.shape, dtype=grad.dtype, device=grad.device) if is_needed else None
                for source, is_needed in zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)
            )
            for chunk in _chunks(ctx.sets, ctx.targets, hidden.size(-1)):
                positions, ids, is_candidate, is_target, count = chunk
                logits, slope, rows = _logits(chunk, hidden, weight, bias, *ctx.options)
                probabilities = (logits - normalisers[positions].unsqueeze(-1)).exp()
                grad_products = grad[positions].unsqueeze(-1) * (is_target.to(grad.dtype) - probabilities) * slope
                if grad_hidden is not None:
                    grad_hidden[positions] = torch.bmm(grad_products.unsqueeze(1), rows.to(grad.dtype)).squeeze(1)
                if grad_weight is not None or grad_bias is not None:
                    counts = is_candidate.sum(1)
                    row = torch.repeat_interleave(counts, output_size=count)  # an index by the mask would wait for it
                    column = torch.arange(count, device=row.device) - (counts.cumsum(0) - counts)[row]
                    tokens, grads = ids[row, column], grad_products[row, column]
                    if grad_weight is not None:
                        grad_weight.index_add_(0, tokens, grads.unsqueeze(-1) * hidden[positions[row]].to(grad.dtype))
                    if grad_bias is not None:
                        grad_bias.index_add_(0, tokens, grads)
        return grad_hidden, grad_weight, grad_bias, None, None, None  # autograd casts them to the inputs' dtypes


def _logits(
    chunk: _Chunk,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    temperature: float,
    logit_scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor | float, Tensor]:
    """Return the logits (n, K), -inf outside the sets, their slopes, and the rows of the head (n, K, H).

    The slopes are the derivatives of the logits with respect to the products of hidden states and rows.
    """
    rows = weight[chunk.ids].to(dtype)
    products = torch.bmm(rows, hidden[chunk.positions].to(dtype).unsqueeze(-1)).squeeze(-1)
    if bias is not None:
        products = products + bias[chunk.ids].to(dtype)
    logits = products.to(torch.promote_types(dtype, torch.float32)) * logit_scale
    slope: Tensor | float = logit_scale / temperature
    if softcap is not None:
        bent = torch.tanh(logits / softcap)
        logits, slope = softcap * bent, slope * (1 - bent * bent)
    return (logits * (1 / temperature)).where(chunk.is_candidate, -torch.inf), slope, rows


def candidate_log_probs(head: Head, sets: CandidateSets) -> Tensor:
    """Return log-probs of tokens under a policy renormalised on their candidates, z_a - logsumexp of z_j over the set.

    This is "Keep Sampling Mask" of DeepSeek-V3.2 (arXiv 2512.02556, section 3.1). The logits are
    z = s(h W^T + b) / temperature, where s multiplies by `logit_scale` and applies softcap * tanh(. / softcap).
    Products are computed in the dtype of `hidden` or of autocast, everything else in float32 or higher precision.

    Args:
        head: The inputs of the LM head at N positions. Each target is in its set.
        sets: Candidates at the N positions.

    Returns:
        (N,) log-probs. A set of one token gives exactly 0. An empty set also gives 0, and the caller must replace it.
        The gradient with respect to a logit outside of the set is exactly 0.
    """
    scaling = head.temperature, head.logit_scale, head.softcap
    arguments = head.hidden, head.weight, head.bias, head.targets, sets.to(head.hidden.device), scaling
    return cast(Tensor, _CandidateLogProbs.apply(*arguments))
