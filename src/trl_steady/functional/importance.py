"""Importance ratios between the current policy and the policy at rollout, as log-ratios.

`logps` and `old_logps` are (B, T) log-probs of the same tokens, in nats, under the policy and under the policy at
rollout. `mask` is (B, T) bool, True = loss token. Functions raise a ValueError if shapes differ or the mask is not
boolean.
"""

import math

import torch
from torch import Tensor

from trl_steady.functional.reduction import sequence_mean


def sequence_log_ratio(logps: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
    """Return log s_i, the log of GSPO's length-normalised sequence ratio (arXiv 2507.18071, section 4.1).

    log s_i = 1/|y_i| sum_t [log π(y_it) - log π_old(y_it)], the log of the geometric mean of the token ratios.

    Gradient: flows through `logps`. The only difference from TRL's sequence level is that values where `mask` is False
    are never read.

    Returns:
        (B, 1); 0 (ratio 1) for a sequence without loss tokens.

    >>> logps = torch.tensor([[-1.0, -2.0, -9.0]])
    >>> old_logps = torch.tensor([[-1.5, -2.25, 0.0]])
    >>> sequence_log_ratio(logps, old_logps, torch.tensor([[True, True, False]])).tolist()  # (0.5 + 0.25) / 2
    [[0.375]]
    """
    return sequence_mean(logps - old_logps, mask)


def gspo_token_surrogate(logps: Tensor, old_logps: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-prob pair that turns a token-level loss into GSPO-token (arXiv 2507.18071, section 4.3).

    s_it = sg[s_i] · π(y_it) / sg[π(y_it)]: the value is the sequence's ratio, the gradient that of the token's own
    log-prob. A loss that forms exp(logps - old_logps) gets exactly this ratio from the pair
    (log π - sg[log π], -sg[log s_i]).

    Gradient: flows through the first member with a factor of 1. The second member is detached.

    The difference of the pair is bit-equal to log s_i, because log π - sg[log π] is exactly 0. The pair
    (log π, sg[log π] - log s_i) is the same on paper. But its rounding error is about 1e-3 times the paper's clip
    range (3e-4), so a clip bound could separate tokens of one sequence.

    Returns:
        (B, T) and (B, T). `logps` must be finite everywhere.

    >>> logps = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    >>> old_logps = torch.tensor([[-1.5, -2.5]])
    >>> centred, surrogate = gspo_token_surrogate(logps, old_logps, torch.tensor([[True, True]]))
    >>> log_s_it = centred - surrogate
    >>> log_s_it.sum().backward()
    >>> log_s_it.tolist(), logps.grad.tolist()
    ([[0.5, 0.5]], [[1.0, 1.0]])
    """
    log_s = sequence_log_ratio(logps.detach(), old_logps, mask)
    return logps - logps.detach(), (-log_s).expand_as(logps)


def log_geometric_mean_ratio(
    logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    low: float,
    high: float,
    delta: float | None = None,
) -> Tensor:
    """Return the log of GMPO's ratio: the geometric mean of a sequence's clipped token ratios.

    Source: GMPO (arXiv 2507.20673, equation 4). Its objective for a sequence is
    (prod_t |min(ρ_t A, clip(ρ_t, e^-low, e^high) A)|)^(1/|y|) sgn(A), which is this ratio times A. The minimum takes
    the smaller ratio if A is positive, and the larger one if A is negative.

    Gradient: flows through `logps`, except at tokens that are held at a bound.

    Args:
        advantages: (B, 1). Only the signs are read.
        low: How far the log-ratio may fall below 0.
        high: How far it may rise above 0.
        delta: Bound of the ratio that is not clipped, above e^high. It acts on negative advantages, as the two-sided
            clip of TRL does. None for no bound.

    Returns:
        (B, 1); 0 (ratio 1) for a sequence without loss tokens.

    >>> old_logps, mask = torch.zeros(2, 2), torch.ones(2, 2, dtype=torch.bool)
    >>> logps = torch.tensor([[0.75, -0.75], [0.75, -0.75]])
    >>> advantages = torch.tensor([[2.0], [-1.0]])
    >>> log_ratio = log_geometric_mean_ratio(logps, old_logps, advantages, mask, low=0.5, high=0.5)
    >>> log_ratio.flatten().tolist()  # (0.5 - 0.75) / 2, (0.75 - 0.5) / 2
    [-0.125, 0.125]
    """
    log_ratio = logps - old_logps
    clipped = log_ratio.clamp(-low, high)
    smaller = torch.minimum(log_ratio, clipped)
    larger = torch.maximum(log_ratio if delta is None else log_ratio.clamp(max=math.log(delta)), clipped)
    return sequence_mean(torch.where(advantages > 0, smaller, larger), mask)


def engine_weights(
    mismatch: Tensor, mask: Tensor, *, mode: str, low: float | None = None, high: float | None = None
) -> Tensor:
    """Return the weights of TRL's engine correction (`vllm_importance_sampling_mode`): π_old / μ within bounds.

    Args:
        mismatch: (B, T) log π_old - log μ of the sampled tokens, from `masks.log_ratio`.
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
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    if mode.endswith("truncate"):
        return weights.clamp(low, high)
    return weights.masked_fill((weights < low) | (weights > high), 0)
