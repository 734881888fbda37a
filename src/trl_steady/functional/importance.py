"""Importance ratios between the current policy and the policy at rollout, as log-ratios."""

from torch import Tensor

from trl_steady.functional.reduction import sequence_mean

__all__ = ["gspo_token_surrogate", "sequence_log_ratio"]


def sequence_log_ratio(logps: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
    """Return log s_i, the log of GSPO's length-normalised sequence ratio (arXiv 2507.18071, section 4.1).

    log s_i = 1/|y_i| sum_t [log π(y_it) - log π_old(y_it)], the log of the geometric mean of the token ratios.

    Gradient: flows through `logps`. The only difference from TRL's sequence level is that values where `mask` is False
    are never read.

    Args:
        logps: (B, T) log-probs under the policy, in nats.
        old_logps: (B, T) log-probs under the policy at rollout, same tokens.
        mask: (B, T) bool, True = loss token.

    Returns:
        (B, 1); 0 (ratio 1) for a sequence without loss tokens.

    Raises:
        ValueError: shapes differ, or `mask` is not boolean.

    >>> import torch
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

    Args:
        logps: (B, T) log-probs under the policy, finite everywhere.
        old_logps: (B, T) log-probs under the policy at rollout, same tokens.
        mask: (B, T) bool, True = loss token.

    Returns:
        (B, T) and (B, T).

    Raises:
        ValueError: shapes differ, or `mask` is not boolean.

    >>> import torch
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
