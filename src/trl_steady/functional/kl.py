"""Estimators of KL(π || π_ref) from one sampled token, and what their gradients estimate.

r = π_ref / π and ρ = π / π_old at the sampled token, where π_old is what sampled it. Corrected, each has the gradient
of KL(π || π_ref) in expectation under π_old; plain, on policy, k1 has none, k2 that one, and k3 that of the forward
KL(π_ref || π). All of it is enumerated in `tests/functional/test_kl.py`.

Each is the KL of one token given its prefix. Their sum does not have the gradient of the KL of whole sequences, which
also carries what a token does to the divergence of those after it; prefixes come from π_old.
"""

from torch import Tensor

__all__ = ["corrected_k1", "corrected_k2", "corrected_k3", "k1", "k2", "k3"]


def k1(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """-log r: unbiased in value under π, of either sign. As a loss it teaches nothing; see `corrected_k1`.

    Gradient: d log π, through `logps`.

    Args:
        logps: (B, T) log-probs under the policy, in nats.
        ref_logps: (B, T) log-probs under the reference, same tokens.

    Returns:
        (B, T), in nats.

    >>> import torch
    >>> k1(torch.tensor([[-1.0]]), torch.tensor([[-1.5]])).item()
    0.5
    """
    return logps - ref_logps


def k2(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """(log r)² / 2: non-negative, biased in value, with the gradient of the reverse KL on policy.

    Gradient: -log r · d log π, through `logps`.

    Args:
        logps: (B, T) log-probs under the policy, in nats.
        ref_logps: (B, T) log-probs under the reference, same tokens.

    Returns:
        (B, T), in nats squared.

    >>> import torch
    >>> k2(torch.tensor([[-1.0]]), torch.tensor([[-1.5]])).item()
    0.125
    """
    return (logps - ref_logps) ** 2 / 2


def k3(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """r - log r - 1: non-negative and unbiased in value under π.

    The KL of GRPO (arXiv 2402.03300, eq. 4). As a loss its expected gradient on policy is that of the *forward*
    KL(π_ref || π); see `corrected_k3`.

    Gradient: (1 - r) d log π, through `logps`.

    Args:
        logps: (B, T) log-probs under the policy, in nats.
        ref_logps: (B, T) log-probs under the reference, same tokens.

    Returns:
        (B, T), in nats.

    >>> import math, torch
    >>> round(k3(torch.tensor([[0.0]]), torch.tensor([[math.log(2.0)]])).item(), 6)  # 2 - ln 2 - 1
    0.306853
    """
    log_r = ref_logps - logps
    # expm1 keeps the digits that exp(x) - x - 1 loses near x = 0, where a trained policy spends its time
    return log_r.expm1() - log_r


def corrected_k1(logps: Tensor, ref_logps: Tensor, log_ratio: Tensor) -> Tensor:
    """ρ · k1: value and gradient unbiased for KL(π || π_ref), the gradient noisier than `corrected_k3`'s.

    Gradient: through both factors. Without the ratio it would be d log π, which is 0 in expectation on policy.

    Args:
        logps: (B, T) log-probs under the policy, in nats.
        ref_logps: (B, T) log-probs under the reference, same tokens.
        log_ratio: (B, T), log ρ = log π - log π_old of the same tokens, with its gradient.

    Returns:
        (B, T), in nats, of either sign.

    >>> import torch
    >>> corrected_k1(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]), torch.tensor([[2.0]]).log()).item()
    1.0
    """
    return log_ratio.exp() * k1(logps, ref_logps)


def corrected_k2(logps: Tensor, ref_logps: Tensor, log_ratio: Tensor) -> Tensor:
    """sg[ρ] · k2: sample by sample the gradient of `corrected_k3`, with another value.

    Gradient: through k2 alone. Through the ratio too, it would be that of E[k2], which is not a KL.

    Args:
        logps: (B, T) log-probs under the policy, in nats.
        ref_logps: (B, T) log-probs under the reference, same tokens.
        log_ratio: (B, T), log ρ = log π - log π_old of the same tokens.

    Returns:
        (B, T), in nats squared.

    >>> import torch
    >>> corrected_k2(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]), torch.tensor([[2.0]]).log()).item()
    0.25
    """
    return log_ratio.detach().exp() * k2(logps, ref_logps)


def corrected_k3(logps: Tensor, ref_logps: Tensor, log_ratio: Tensor) -> Tensor:
    """ρ · k3, DeepSeek-V3.2's unbiased KL (arXiv 2512.02556, section 3.1).

    Gradient: through both factors, -ρ log r · d log π. With the ratio detached it would be the forward KL's. The ratio
    is per token whatever the loss's own level, and is not clipped.

    Differs from TRL 1.16 under a sequence-level ratio: TRL multiplies by the sequence ratio there
    (huggingface/trl#6586), which estimates no KL.

    Args:
        logps: (B, T) log-probs under the policy, in nats.
        ref_logps: (B, T) log-probs under the reference, same tokens.
        log_ratio: (B, T), log ρ = log π - log π_old of the same tokens, with its gradient.

    Returns:
        (B, T), in nats, 0 or above. Overflows float32 where the reference is 88 nats or more above the policy, as
        TRL's does.

    >>> import math, torch
    >>> logps, ref_logps = torch.tensor([[0.0]]), torch.tensor([[math.log(2.0)]])
    >>> round(corrected_k3(logps, ref_logps, torch.tensor([[2.0]]).log()).item(), 6)  # 2 (2 - ln 2 - 1)
    0.613706
    """
    return log_ratio.exp() * k3(logps, ref_logps)
