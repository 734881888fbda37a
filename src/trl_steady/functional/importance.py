"""Importance ratios between the policy and the policy that generated, as log-ratios."""

from torch import Tensor

from trl_steady.functional.reduction import sequence_mean

__all__ = ["gspo_token_surrogate", "sequence_log_ratio"]


def sequence_log_ratio(logps: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
    """log s_i, the log of GSPO's length-normalised sequence ratio (arXiv 2507.18071, section 4.1).

    log s_i = 1/|y_i| sum_t [log π(y_it) - log π_old(y_it)], the log of the geometric mean of the token ratios.

    Gradient: flows through `logps`. Differs from TRL's sequence level only in that values under the mask are never
    read.

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
    """The pair of log-probs that turns a token-level loss into GSPO-token (arXiv 2507.18071, section 4.3).

    s_it = sg[s_i] · π(y_it) / sg[π(y_it)]: the sequence's ratio in value, the token's own log-prob in gradient. A loss
    that forms exp(logps - old_logps) gets exactly that from (log π - sg[log π], -sg[log s_i]).

    Gradient: through the first member, one for one; the second is detached. The difference is bit-equal to log s_i,
    because log π - sg[log π] is exactly 0. Leaving log π in place and handing over sg[log π] - log s_i is the same on
    paper, but its rounding is of the size of the paper's clip range (3e-4) times 1e-3, enough to split a sequence.

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
