"""Targets and loss of a critic.

Axes: `B` sequences, `T` completion tokens, `S` steps. Masks are boolean, True = action token.
"""

import math

import torch
from torch import Tensor

_EPSILON = 1e-8  # of a variance, as in the PPO of OpenAI's and TRL's


def at_ends(rewards: Tensor, ends: Tensor, mask: Tensor) -> Tensor:
    """Return step rewards as rewards of tokens: each at the last action token of its step.

    `rewards` (B, S) are NaN where there is no such step. `ends` (B, S) are exclusive, in tokens, and may be beyond the
    last token. The result is (B, T). The reward of a step with no action token before its end is dropped.

    >>> mask = torch.tensor([[True, True, False, True]])
    >>> at_ends(torch.tensor([[1.0, 2.0]]), torch.tensor([[3, 9]]), mask).tolist()
    [[0.0, 1.0, 0.0, 2.0]]
    """
    tokens = mask.size(1)
    indices = torch.arange(tokens, device=mask.device).expand_as(mask)
    last = indices.where(mask, -1).cummax(1).values.gather(1, ends.clamp(max=tokens) - 1)
    placed = rewards.new_zeros(mask.shape)
    return placed.scatter_add(1, last.clamp(min=0), rewards.nan_to_num(nan=0.0).where(last >= 0, 0))


def moments(values: Tensor, mask: Tensor) -> Tensor:
    """Return (3,) number, sum and sum of squares of the values under the mask. Moments of several processes add up.

    >>> moments(torch.tensor([[1.0, 3.0, torch.nan]]), torch.tensor([[True, True, False]])).tolist()
    [2.0, 4.0, 10.0]
    """
    clean = values.where(mask, 0)
    return torch.stack([mask.sum().to(clean.dtype), clean.sum(), clean.square().sum()])


def variance(totals: Tensor) -> Tensor:
    """Return the unbiased variance of values with these (3,) moments, 0 for fewer than two.

    >>> variance(torch.tensor([2.0, 4.0, 10.0])).item()
    2.0
    """
    count, total, squares = totals
    return ((squares - total.square() / count.clamp(min=1)) / (count - 1).clamp(min=1)).clamp(min=0)


def whitened(values: Tensor, mask: Tensor, totals: Tensor, *, shift_mean: bool = True) -> Tensor:
    """Return the values divided by their standard deviation, with mean 0 or, without `shift_mean`, with their mean.

    It returns (B, T), 0 where `mask` is False. `totals` are the (3,) `moments` over all processes, in float64 if the
    device has it.

    >>> values, mask = torch.tensor([[1.0, 3.0]]).double(), torch.ones(1, 2, dtype=torch.bool)
    >>> whitened(values, mask, moments(values, mask)).round(decimals=4).tolist()
    [[-0.7071, 0.7071]]
    """
    count, total, _ = totals
    mean = total / count.clamp(min=1)
    scaled = (values - mean) * (variance(totals) + _EPSILON).rsqrt()
    if not shift_mean:
        scaled = scaled + mean
    return scaled.to(values.dtype).where(mask, 0)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, cliprange: float | None) -> Tensor:
    """Return the critic's loss: half the larger of the squared errors of the value and of the clipped value.

    Source: the implementation of PPO (arXiv 1707.06347) by its authors, OpenAI Baselines `ppo2`.

    All tensors are (B, T). The clipped value is at most `cliprange` from the value at rollout. None: no clip.

    >>> value_loss(torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([2.0]), cliprange=0.5).tolist()
    [1.125]
    """
    error = (values - returns).square()
    if cliprange is None:
        return 0.5 * error
    clipped = old_values + (values - old_values).clamp(-cliprange, cliprange)
    return 0.5 * torch.maximum(error, (clipped - returns).square())


def adapted_kl_coef(coef: float, kl: float, *, target: float, horizon: float, completions: int) -> float:
    """Return the next coefficient of an adaptive KL penalty (arXiv 1909.08593, section 2.2).

    Args:
        coef: The coefficient at the rollout.
        kl: Mean KL of a completion, summed over its tokens, in nats. NaN leaves the coefficient as it is.
        target: The KL that is wanted, in the same unit.
        horizon: Number of completions in which an error of 100 % changes the coefficient by a factor of about e; the
            error is limited to 20 %.
        completions: Number of completions of which `kl` is the mean.

    >>> adapted_kl_coef(0.1, 9.0, target=6.0, horizon=100, completions=10)
    0.10200000000000001
    >>> adapted_kl_coef(0.1, float("nan"), target=6.0, horizon=100, completions=10)
    0.1
    """
    if math.isnan(kl):
        return coef
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * completions / horizon)
