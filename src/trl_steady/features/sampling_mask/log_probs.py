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


class _Scaling(NamedTuple):
    """Settings of the logits of a head."""

    dtype: torch.dtype  # of the products
    temperature: float
    logit_scale: float
    softcap: float | None


class _Chunk(NamedTuple):
    """Chunk of `n` positions with sets of similar size, of at most `K` tokens each."""

    positions: Tensor  # (n,)
    ids: Tensor  # (n, K)
    is_candidate: Tensor  # (n, K) bool, False for entries that only fill up a row
    is_target: Tensor  # (n, K) bool
    count: int  # of candidates


def _chunks(candidates: CandidateSets, targets: Tensor, width: int) -> Iterator[_Chunk]:
    """Yield all positions whose sets have two tokens or more, those with the largest sets first."""
    counts = candidates.counts
    order = counts.argsort(descending=True, stable=True)
    known_counts = candidates.sizes if len(candidates.sizes) else counts  # without a wait, if `take` has waited
    sizes: list[int] = known_counts.sort(descending=True).values.tolist()
    with_choice = sum(size >= 2 for size in sizes)
    numbers_at_a_time = _CHUNK
    if counts.device.type != "cpu":
        numbers_at_a_time = 8 * _CHUNK
    start = 0
    while start < with_choice:
        most_positions = max(1, numbers_at_a_time // (sizes[start] * width))
        end = min(start + most_positions, with_choice)
        positions = order[start:end]
        columns = torch.arange(sizes[start], device=counts.device)
        is_candidate = columns < counts[positions].unsqueeze(-1)
        indices = candidates.offsets[positions].unsqueeze(-1) + columns
        indices = indices.clamp(max=len(candidates.ids) - 1)
        ids = candidates.ids[indices].long().where(is_candidate, 0)
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
        candidates: CandidateSets,
        scaling: _Scaling,
    ) -> Tensor:
        ctx.targets = targets
        ctx.candidates = candidates
        ctx.scaling = scaling
        log_probs = hidden.new_zeros(len(hidden), dtype=torch.promote_types(scaling.dtype, torch.float32))
        normalisers = torch.zeros_like(log_probs)
        for chunk in _chunks(candidates, targets, hidden.size(-1)):
            logits = _logits(chunk, hidden, weight, bias, scaling)[0]
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
            grad_hidden = grad_weight = grad_bias = None
            if ctx.needs_input_grad[0]:
                grad_hidden = grad.new_zeros(hidden.shape)
            if ctx.needs_input_grad[1]:
                grad_weight = grad.new_zeros(weight.shape)
            if ctx.needs_input_grad[2]:
                grad_bias = grad.new_zeros(bias.shape)
            for chunk in _chunks(ctx.candidates, ctx.targets, hidden.size(-1)):
                positions, ids, is_candidate, is_target, count = chunk
                logits, slope, rows = _logits(chunk, hidden, weight, bias, ctx.scaling)
                probabilities = (logits - normalisers[positions].unsqueeze(-1)).exp()
                grad_logits = grad[positions].unsqueeze(-1) * (is_target.to(grad.dtype) - probabilities)
                grad_products = grad_logits * slope
                if grad_hidden is not None:
                    grad_hidden[positions] = torch.bmm(grad_products.unsqueeze(1), rows.to(grad.dtype)).squeeze(1)
                if grad_weight is not None or grad_bias is not None:
                    counts = is_candidate.sum(1)
                    row = torch.repeat_interleave(counts, output_size=count)  # an index by the mask would wait for it
                    starts = counts.cumsum(0) - counts
                    column = torch.arange(count, device=row.device) - starts[row]
                    tokens, grads = ids[row, column], grad_products[row, column]
                    if grad_weight is not None:
                        grad_weight.index_add_(0, tokens, grads.unsqueeze(-1) * hidden[positions[row]].to(grad.dtype))
                    if grad_bias is not None:
                        grad_bias.index_add_(0, tokens, grads)
        return grad_hidden, grad_weight, grad_bias, None, None, None  # autograd casts them to the inputs' dtypes


def _logits(
    chunk: _Chunk, hidden: Tensor, weight: Tensor, bias: Tensor | None, scaling: _Scaling
) -> tuple[Tensor, Tensor | float, Tensor]:
    """Return the logits (n, K), -inf outside the sets, their slopes, and the rows of the head (n, K, H).

    The slopes are the derivatives of the logits with respect to the products of hidden states and rows.
    """
    dtype, temperature, logit_scale, softcap = scaling
    rows = weight[chunk.ids].to(dtype)
    products = torch.bmm(rows, hidden[chunk.positions].to(dtype).unsqueeze(-1)).squeeze(-1)
    if bias is not None:
        products = products + bias[chunk.ids].to(dtype)
    logits = products.to(torch.promote_types(dtype, torch.float32)) * logit_scale
    slope: Tensor | float = logit_scale / temperature
    if softcap is not None:
        bent = torch.tanh(logits / softcap)
        logits = softcap * bent
        slope = slope * (1 - bent * bent)
    logits = logits * (1 / temperature)
    return logits.where(chunk.is_candidate, -torch.inf), slope, rows


def candidate_log_probs(head: Head, candidates: CandidateSets) -> Tensor:
    """Return log-probs of tokens under a policy renormalised on their candidates, z_a - logsumexp of z_j over the set.

    This is "Keep Sampling Mask" of DeepSeek-V3.2 (arXiv 2512.02556, section 3.1). The logits are
    z = s(h W^T + b) / temperature, where s multiplies by `logit_scale` and applies softcap * tanh(. / softcap).
    Products are computed in the dtype of `hidden` or of autocast, everything else in float32 or higher precision.

    Args:
        head: The inputs of the LM head at N positions. Each target is in its set.
        candidates: Those of the N positions.

    Returns:
        (N,) log-probs. A set of one token gives exactly 0. An empty set also gives 0, and the caller must replace it.
        The gradient with respect to a logit outside of the set is exactly 0.
    """
    device = head.hidden.device
    dtype = head.hidden.dtype
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    scaling = _Scaling(dtype, head.temperature, head.logit_scale, head.softcap)
    candidates = candidates.to(device)
    log_probs = _CandidateLogProbs.apply(head.hidden, head.weight, head.bias, head.targets, candidates, scaling)
    return cast(Tensor, log_probs)
