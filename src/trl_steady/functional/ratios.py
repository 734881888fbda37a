"""Ratios of the policy to the policy at rollout, or to the sampler."""

import math

import torch
from torch import Tensor

from trl_steady.functional.masks import sequence_mean


def truncate(log_ratio: Tensor, largest: float) -> Tensor:
    """Return min(log_ratio, largest), with the gradient of `log_ratio` everywhere: a bounded weight drops no token.

    >>> log_ratio = torch.tensor([[0.5, 3.0]], requires_grad=True)
    >>> bounded = truncate(log_ratio, 2.0)
    >>> bounded.tolist(), torch.autograd.grad(bounded.sum(), log_ratio)[0].tolist()
    ([[0.5, 2.0]], [[1.0, 1.0]])
    """
    return log_ratio - (log_ratio.detach() - largest).clamp(min=0)


def gmpo_log_ratio(
    log_ratio: Tensor, advantages: Tensor, mask: Tensor, *, low: float, high: float, delta: float | None = None
) -> Tensor:
    """Return the log of GMPO's ratio, the geometric mean of clipped token ratios (arXiv 2507.20673, equation 4).

    No gradient flows at tokens that are held at a bound.

    Args:
        log_ratio: (B, T), with gradient. Never read where `mask` is False.
        advantages: (B, 1) or (B, T). Their sign decides which bound holds: the upper one if they are positive.
        mask: (B, T) bool, True = loss token.
        low: Lower bound, as a distance of the log-ratio from 0.
        high: Upper bound, likewise.
        delta: Upper bound of a ratio where the advantage is negative, above e^high, as in TRL's two-sided clip.

    Returns:
        (B, 1), 0 for a sequence without loss tokens.

    >>> log_ratio, mask = torch.tensor([[1.2, 0.5]]).log(), torch.ones(1, 2, dtype=torch.bool)
    >>> for advantage in (2.0, -2.0):  # 1.2 * 0.5, and 1.2 * e^-0.4
    ...     ratio = gmpo_log_ratio(log_ratio, torch.tensor([[advantage]]), mask, low=0.4, high=0.4).exp()
    ...     print(round(ratio.item() ** 2, 4))
    0.6
    0.8044
    """
    clipped = log_ratio.clamp(-low, high)
    smaller = torch.minimum(log_ratio, clipped)
    bounded = log_ratio
    if delta is not None:
        bounded = log_ratio.clamp(max=math.log(delta))
    larger = torch.maximum(bounded, clipped)
    return sequence_mean(torch.where(advantages > 0, smaller, larger), mask)
