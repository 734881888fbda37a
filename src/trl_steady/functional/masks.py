"""Which sequences a policy term leaves out because they are too far from what sampled them. True = keep.

A mask multiplies the policy term and nothing else: the KL stays, and dropped sequences still count in every mean, so
that dropping one does not weigh the others up. No gradient flows through a mask. `sampler_logps` may be NaN where an
engine could not score a token, which is no evidence either way: such a token counts as equally likely under both.
"""

from torch import Tensor

from trl_steady.functional.reduction import sequence_mean

__all__ = ["geometric_mask", "log_ratio", "off_policy_mask", "off_policy_statistic", "token_veto"]


def log_ratio(logps: Tensor, sampler_logps: Tensor) -> Tensor:
    """log π - log μ without gradient, 0 where the sampler's log-prob is NaN.

    Args:
        logps: (B, T) log-probs under a policy, in nats.
        sampler_logps: (B, T) log-probs under what sampled, same tokens.

    Returns:
        (B, T), in nats.

    >>> import torch
    >>> log_ratio(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, torch.nan]])).tolist()
    [[0.5, 0.0]]
    """
    difference = logps.detach() - sampler_logps.detach()
    return difference.where(~sampler_logps.isnan(), 0)


def off_policy_statistic(logps: Tensor, sampler_logps: Tensor, mask: Tensor) -> Tensor:
    """1/|y_i| sum_t log(μ / π): positive where the policy has made the sequence less likely than it was sampled.

    DeepSeek-V3.2 (arXiv 2512.02556, section 3.1), whose μ is the inference engine's probability. With the policy at
    rollout in its place it is -log s_i of GSPO.

    Args:
        logps: (B, T) log-probs under the policy as it is now, in nats.
        sampler_logps: (B, T) log-probs under what sampled, same tokens.
        mask: (B, T) bool, True = loss token.

    Returns:
        (B, 1), in nats a token; 0 for a sequence without loss tokens.

    Raises:
        ValueError: shapes differ, or `mask` is not boolean.

    >>> import torch
    >>> logps, sampled = torch.tensor([[-2.0, -3.0, -9.0]]), torch.tensor([[-1.0, -1.0, 0.0]])
    >>> off_policy_statistic(logps, sampled, torch.tensor([[True, True, False]])).tolist()  # (1 + 2) / 2
    [[1.5]]
    """
    return -sequence_mean(log_ratio(logps, sampler_logps), mask)


def off_policy_mask(advantages: Tensor, statistic: Tensor, mask: Tensor, *, threshold: float) -> Tensor:
    """DeepSeek-V3.2's off-policy sequence mask (arXiv 2512.02556, section 3.1): one decision a sequence.

    Drops a sequence whose advantage is negative and whose statistic exceeds the threshold. With advantages per token
    the sign is that of their mean over loss tokens; TRL 1.16 decides token by token there.

    Args:
        advantages: (B, 1) or (B, T).
        statistic: (B, 1), from `off_policy_statistic`.
        mask: (B, T) bool, True = loss token.
        threshold: δ, in nats a token. Infinity drops nothing.

    Returns:
        (B, 1) bool, True = keep.

    Raises:
        ValueError: advantages per token are not of the mask's shape, or `mask` is not boolean.

    >>> import torch
    >>> mask = torch.ones(3, 2, dtype=torch.bool)
    >>> advantages = torch.tensor([[1.0, -2.0], [2.0, -1.0], [-1.0, -1.0]])
    >>> off_policy_mask(advantages, torch.tensor([[0.6], [0.6], [0.4]]), mask, threshold=0.5).flatten().tolist()
    [False, True, True]
    """
    if advantages.shape != statistic.shape:
        advantages = sequence_mean(advantages, mask)
    return (advantages >= 0) | (statistic <= threshold)


def geometric_mask(mismatch: Tensor, mask: Tensor, *, low: float, high: float) -> Tensor:
    """Keeps sequences whose geometric-mean ratio of trainer to sampler lies in [low, high], whatever the advantage.

    A mean, not a product: the bounds mean the same for long answers as for short ones.

    Args:
        mismatch: (B, T), log π_old - log μ of the sampled tokens, from `log_ratio`.
        mask: (B, T) bool, True = loss token.
        low: Lower bound of the ratio, at most 1.
        high: Upper bound of the ratio, at least 1.

    Returns:
        (B, 1) bool, True = keep; a sequence without loss tokens is kept.

    Raises:
        ValueError: shapes differ, or `mask` is not boolean.

    >>> import torch
    >>> mismatch = torch.tensor([[0.02, -0.01], [0.02, 0.01]])
    >>> geometric_mask(mismatch, torch.ones(2, 2, dtype=torch.bool), low=0.99, high=1.01).flatten().tolist()
    [True, False]
    """
    ratio = sequence_mean(mismatch, mask).exp()
    return (low <= ratio) & (ratio <= high)


def token_veto(mismatch: Tensor, mask: Tensor, *, threshold: float) -> Tensor:
    """Drops a sequence in which the trainer finds any one token far less likely than the sampler did.

    Args:
        mismatch: (B, T), log π_old - log μ of the sampled tokens, from `log_ratio`.
        mask: (B, T) bool, True = loss token.
        threshold: The smallest ratio π_old / μ that passes, between 0 and 1.

    Returns:
        (B, 1) bool, True = keep.

    >>> import math, torch
    >>> mismatch = torch.tensor([[0.0, math.log(1e-3)], [0.0, math.log(1e-5)]])
    >>> token_veto(mismatch, torch.ones(2, 2, dtype=torch.bool), threshold=1e-4).flatten().tolist()
    [True, False]
    """
    return ~((mismatch.exp() < threshold) & mask).any(-1, keepdim=True)
