"""Means under a mask; weights and masks for tokens and sequences that are too far off-policy.

Weights and masks multiply only the policy term. The KL stays, and dropped sequences still count in every mean, so that
dropping one sequence does not increase the weight of the others. No gradient flows through them. In a mask that drops
sequences, True = keep.

The sampler is the inference engine or policy that generated the tokens. `sampler_logps` may be NaN where an engine
could not score a token. NaN is no evidence either way, so such a token counts as equally likely under both policies.

Log-probs are (B, T), in nats, and `mask` is (B, T) bool, True = loss token. Means over a
sequence raise a ValueError if shapes differ or the mask is not boolean.
"""

import math

import torch
from torch import Tensor


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of `values` over each sequence's loss tokens, or 0 for a sequence that has none.

    `values` (B, T) are never read where `mask` (B, T) is False. It returns (B, 1) in the dtype of `values`.

    >>> values = torch.tensor([[1.0, 3.0, torch.nan], [5.0, torch.nan, torch.nan]])
    >>> sequence_mean(values, torch.tensor([[True, True, False], [False, False, False]])).tolist()
    [[2.0], [0.0]]
    """
    check_mask(mask, values)
    count = mask.sum(-1, keepdim=True).clamp(min=1)
    return values.where(mask, 0).sum(-1, keepdim=True) / count


def check_mask(mask: Tensor, *values: Tensor) -> None:
    """Raise a ValueError for shapes that would broadcast: if B = T, a (B,) tensor would follow the wrong axis."""
    has_other_shape = any(tensor.shape != mask.shape for tensor in values)
    if mask.dim() != 2 or mask.dtype != torch.bool or has_other_shape:
        shapes = [tuple(tensor.shape) for tensor in (mask, *values)]
        raise ValueError(
            f"expected a boolean (B, T) mask and values like the mask, got shapes {shapes} and a mask of {mask.dtype}."
        )


def log_ratio(logps: Tensor, sampler_logps: Tensor) -> Tensor:
    """Return log π - log μ without gradient, and 0 where the sampler's log-prob is NaN.

    >>> log_ratio(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, torch.nan]])).tolist()
    [[0.5, 0.0]]
    """
    difference = logps.detach() - sampler_logps.detach()
    return difference.where(~sampler_logps.isnan(), 0)


def binary_divergence(logps: Tensor, sampler_logps: Tensor, *, kind: str) -> Tensor:
    """Return how far the sampled token's probability has moved from μ to π, (B, T): positive if it has grown.

    Source: DPPO (arXiv 2602.04879, equations 13 and 14). The vocabulary counts as two tokens, the sampled one and the
    rest. `"tv"` is π - μ. `"kl"` is KL(μ || π) in nats, with the sign of π - μ. The rest is at least 1e-8, because
    float32 has no digits below. No gradient flows.

    >>> logps, sampled = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    >>> for kind in ("tv", "kl"):
    ...     print(round(binary_divergence(logps, sampled, kind=kind)[0, 0].item(), 4))
    0.25
    0.1308
    """
    logps, sampler_logps = logps.detach(), sampler_logps.detach()
    moved = logps.exp() - sampler_logps.exp()
    if kind == "tv":
        return moved
    rest = (-logps.expm1()).clamp(min=1e-8)
    sampler_rest = (-sampler_logps.expm1()).clamp(min=1e-8)
    divergence = sampler_logps.exp() * (sampler_logps - logps) + sampler_rest * (sampler_rest.log() - rest.log())
    return divergence * moved.sign()


def second_moment_mask(log_ratio: Tensor, is_counted: Tensor, *, budget: float) -> Tensor:
    """Drop the counted tokens with the largest squared log-ratio, until the mean of the others is at most the budget.

    Source: M2PO (arXiv 2510.01161, Algorithm 1). It counts tokens whose gradient leads on away from the sampler: A > 0
    and π > μ, or A < 0 and π < μ.

    Args:
        log_ratio: (B, T) log π - log μ, in nats.
        is_counted: (B, T) bool. Other tokens are kept, and not in the mean.
        budget: The largest mean of squared log-ratios, in squared nats.

    Returns:
        (B, T) bool, True = keep.

    >>> log_ratio = torch.tensor([[0.1, -0.2, 0.5, 3.0]])
    >>> second_moment_mask(log_ratio, torch.tensor([[True, True, True, False]]), budget=0.04).tolist()
    [[True, True, False, True]]
    """
    # of squares in ascending order, the mean of the first k grows with k; infinity puts the other tokens last
    log_ratio = log_ratio.to(torch.promote_types(log_ratio.dtype, torch.float32))  # a long sum in bf16 is too small
    squares, order = log_ratio.square().where(is_counted, torch.inf).flatten().sort()
    numbers = torch.arange(1, len(squares) + 1, device=squares.device)
    keep = torch.empty_like(order, dtype=torch.bool)
    keep[order] = squares.cumsum(0) <= budget * numbers
    return keep.view_as(is_counted) | ~is_counted


def off_policy_statistic(logps: Tensor, sampler_logps: Tensor, mask: Tensor) -> Tensor:
    """Return 1/|y_i| sum_t log(μ / π): positive if the sequence is now less likely than when it was sampled.

    Source: DeepSeek-V3.2 (arXiv 2512.02556, section 3.1), where μ is the inference engine's probability. If μ is the
    policy at rollout instead, the statistic is -log s_i of GSPO.

    Returns:
        (B, 1), in nats per token; 0 for a sequence without loss tokens.

    >>> logps, sampled = torch.tensor([[-2.0, -3.0, -9.0]]), torch.tensor([[-1.0, -1.0, 0.0]])
    >>> off_policy_statistic(logps, sampled, torch.tensor([[True, True, False]])).tolist()  # (1 + 2) / 2
    [[1.5]]
    """
    return -sequence_mean(log_ratio(logps, sampler_logps), mask)


def geometric_mask(mismatch: Tensor, mask: Tensor, *, low: float, high: float) -> Tensor:
    """Keep sequences whose geometric-mean ratio of trainer to sampler is in [low, high], for any advantage.

    The ratio is a mean, not a product, so the bounds mean the same for long and for short answers.

    `mismatch` (B, T) is log π_old - log μ of the sampled tokens, from `log_ratio`. The result is (B, 1) bool, True =
    keep. A sequence without loss tokens is kept.

    >>> mismatch = torch.tensor([[0.02, -0.01], [0.02, 0.01]])
    >>> geometric_mask(mismatch, torch.ones(2, 2, dtype=torch.bool), low=0.99, high=1.01).flatten().tolist()
    [True, False]
    """
    ratio = sequence_mean(mismatch, mask).exp()
    return (low <= ratio) & (ratio <= high)


def token_veto(mismatch: Tensor, mask: Tensor, *, threshold: float) -> Tensor:
    """Drop each sequence that has a token much less likely under the trainer than under the sampler.

    `mismatch` (B, T) is as above. `threshold` is the smallest ratio π_old / μ that passes, between 0 and 1. The result
    is (B, 1) bool, True = keep.

    >>> import math
    >>> mismatch = torch.tensor([[0.0, math.log(1e-3)], [0.0, math.log(1e-5)]])
    >>> token_veto(mismatch, torch.ones(2, 2, dtype=torch.bool), threshold=1e-4).flatten().tolist()
    [True, False]
    """
    return ~((mismatch.exp() < threshold) & mask).any(-1, keepdim=True)


def engine_weights(
    mismatch: Tensor, mask: Tensor, *, mode: str, low: float | None = None, high: float | None = None
) -> Tensor:
    """Return the weights of TRL's engine correction (`vllm_importance_sampling_mode`): π_old / μ within bounds.

    Args:
        mismatch: (B, T) log π_old - log μ of the sampled tokens, from `log_ratio`.
        mode: `"token_..."`: the ratio of each token. `"sequence_..."`: the product of a sequence's ratios.
            `"..._truncate"`: a ratio outside the bounds becomes the bound. `"..._mask"`: it becomes 0.
        low: Lower bound; None for none.
        high: Upper bound; None for none.

    Returns:
        (B, T), from ratios of 1 where `mask` is False, or (B, 1).

    >>> mismatch = torch.tensor([[1.0, 2.0, 9.0]]).log()
    >>> mask = torch.tensor([[True, True, False]])
    >>> for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"):
    ...     print(mode, engine_weights(mismatch, mask, mode=mode, high=1.5).tolist())
    token_truncate [[1.0, 1.5, 1.0]]
    token_mask [[1.0, 0.0, 1.0]]
    sequence_truncate [[1.5]]
    sequence_mask [[0.0]]
    """
    log_weights = mismatch.where(mask, 0)
    if mode.startswith("sequence"):
        log_weights = log_weights.sum(-1, keepdim=True)
    weights = log_weights.exp()
    if low is None:
        low = -math.inf
    if high is None:
        high = math.inf
    if mode.endswith("truncate"):
        return weights.clamp(low, high)
    return weights.masked_fill((weights < low) | (weights > high), 0)
