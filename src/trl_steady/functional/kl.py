"""Estimators of KL(π || π_ref) from one sampled token, and what their gradients estimate.

Notation: r = π_ref / π and ρ = π / π_old at the sampled token, where π_old is the policy that sampled it. With
`log_ratio`, log ρ with its gradient, an estimator is corrected: multiplied by ρ.

All arguments are (B, T), in nats, of the same tokens: `logps` under the policy, whose gradient flows, and `ref_logps`
under the reference. All functions return (B, T), in nats; `k2` in nats squared.

Expected gradients, which `tests/functional/test_kl.py` checks by enumeration:

- All three have the gradient of KL(π || π_ref), in expectation under π_old, if they are corrected. Otherwise,
- `k1` has no expected gradient on-policy: as a loss it teaches nothing.
- `k2` has the gradient of KL(π || π_ref) on-policy.
- `k3` has the gradient of the forward KL(π_ref || π) on-policy.

Each estimator is the KL of one token given its prefix, and prefixes come from π_old. The sum over tokens does not have
the gradient of the KL of whole sequences, which also contains the effect of a token on the divergence of later tokens.
The ratio is always that of the token, even if the loss uses that of the sequence, and it is not clipped. At the
sequence level TRL 1.16 multiplies by the ratio of the sequence (huggingface/trl#6586), which estimates no KL.
"""

from torch import Tensor


def k1(logps: Tensor, ref_logps: Tensor, log_ratio: Tensor | None = None) -> Tensor:
    """Return -log r, of either sign: unbiased in value. Corrected, it has a noisier gradient than the others.

    >>> import torch
    >>> logps, ref_logps = torch.tensor([[-1.0]]), torch.tensor([[-1.5]])
    >>> k1(logps, ref_logps).item(), k1(logps, ref_logps, torch.tensor([[2.0]]).log()).item()
    (0.5, 1.0)
    """
    value = logps - ref_logps
    if log_ratio is None:
        return value
    return log_ratio.exp() * value


def k2(logps: Tensor, ref_logps: Tensor, log_ratio: Tensor | None = None) -> Tensor:
    """Return (log r)² / 2: non-negative, and biased in value.

    Corrected, it has the gradient of `k3` for every sample. No gradient flows through the ratio, or it would be the
    gradient of E[k2], which is not a KL.

    >>> import torch
    >>> logps, ref_logps = torch.tensor([[-1.0]]), torch.tensor([[-1.5]])
    >>> k2(logps, ref_logps).item(), k2(logps, ref_logps, torch.tensor([[2.0]]).log()).item()
    (0.125, 0.25)
    """
    value = (logps - ref_logps) ** 2 / 2
    if log_ratio is None:
        return value
    return log_ratio.detach().exp() * value


def k3(logps: Tensor, ref_logps: Tensor, log_ratio: Tensor | None = None) -> Tensor:
    """Return r - log r - 1, the KL of GRPO (arXiv 2402.03300, eq. 4): non-negative and unbiased in value.

    Corrected, it is DeepSeek-V3.2's unbiased KL (arXiv 2512.02556, section 3.1), whose gradient is -ρ log r · d log π.
    It flows through both factors: with a detached ratio it would be that of the forward KL. The value overflows
    float32, as in TRL, if the reference is 88 nats or more above the policy.

    >>> import math, torch
    >>> logps, ref_logps = torch.tensor([[0.0]]), torch.tensor([[math.log(2.0)]])
    >>> round(k3(logps, ref_logps).item(), 6), round(k3(logps, ref_logps, torch.tensor([[2.0]]).log()).item(), 6)
    (0.306853, 0.613706)
    """
    log_r = ref_logps - logps
    # expm1 keeps the digits that exp(x) - x - 1 loses near x = 0, the usual case in training
    value = log_r.expm1() - log_r
    if log_ratio is None:
        return value
    return log_ratio.exp() * value


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
"""`kl_estimator` -> its function. The policy loss adds `beta` times its values."""
