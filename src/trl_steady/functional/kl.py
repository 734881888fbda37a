"""Estimators of KL(π || π_ref) from one sampled token, and what their gradients estimate.

Notation: r = π_ref / π and ρ = π / π_old at the sampled token, where π_old is the policy that sampled it.

Expected gradients, which `tests/functional/test_kl.py` checks by enumeration:

- The corrected estimators have the gradient of KL(π || π_ref), in expectation under π_old.
- `k1` has no expected gradient on-policy.
- `k2` has the gradient of KL(π || π_ref) on-policy.
- `k3` has the gradient of the forward KL(π_ref || π) on-policy.

All arguments are (B, T), in nats, of the same tokens: `logps` under the policy, `ref_logps` under the reference, and
`log_ratio`, which is log ρ with its gradient. All functions return (B, T), in nats; `k2` and `corrected_k2` in nats
squared.

Each estimator is the KL of one token given its prefix, and prefixes come from π_old. The sum over tokens does not have
the gradient of the KL of whole sequences, which also contains the effect of a token on the divergence of later tokens.
"""

from torch import Tensor


def k1(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """Return -log r: unbiased in value under π, of either sign.

    As a loss it teaches nothing: use `corrected_k1` instead.

    Gradient: d log π, through `logps`.

    >>> import torch
    >>> k1(torch.tensor([[-1.0]]), torch.tensor([[-1.5]])).item()
    0.5
    """
    return logps - ref_logps


def k2(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """Return (log r)² / 2: non-negative, biased in value, with the gradient of the reverse KL on-policy.

    Gradient: -log r · d log π, through `logps`.

    >>> import torch
    >>> k2(torch.tensor([[-1.0]]), torch.tensor([[-1.5]])).item()
    0.125
    """
    return (logps - ref_logps) ** 2 / 2


def k3(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """Return r - log r - 1: non-negative and unbiased in value under π.

    This is the KL of GRPO (arXiv 2402.03300, eq. 4). As a loss, its expected gradient on-policy is that of the
    *forward* KL(π_ref || π); see `corrected_k3`.

    Gradient: (1 - r) d log π, through `logps`.

    >>> import math, torch
    >>> round(k3(torch.tensor([[0.0]]), torch.tensor([[math.log(2.0)]])).item(), 6)  # 2 - ln 2 - 1
    0.306853
    """
    log_r = ref_logps - logps
    # expm1 keeps the digits that exp(x) - x - 1 loses near x = 0, the usual case in training
    return log_r.expm1() - log_r


def corrected_k1(logps: Tensor, ref_logps: Tensor, log_ratio: Tensor) -> Tensor:
    """Return ρ · k1: unbiased for KL(π || π_ref) in value and gradient, with a noisier gradient than `corrected_k3`.

    Gradient: through both factors. Without the ratio it would be d log π, which is 0 in expectation on-policy.

    >>> import torch
    >>> corrected_k1(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]), torch.tensor([[2.0]]).log()).item()
    1.0
    """
    return log_ratio.exp() * k1(logps, ref_logps)


def corrected_k2(logps: Tensor, ref_logps: Tensor, log_ratio: Tensor) -> Tensor:
    """Return sg[ρ] · k2: the gradient of `corrected_k3` for every sample, but another value.

    Gradient: through k2 only. If it also went through the ratio, it would be the gradient of E[k2], which is not a KL.

    >>> import torch
    >>> corrected_k2(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]), torch.tensor([[2.0]]).log()).item()
    0.25
    """
    return log_ratio.detach().exp() * k2(logps, ref_logps)


def corrected_k3(logps: Tensor, ref_logps: Tensor, log_ratio: Tensor) -> Tensor:
    """Return ρ · k3, DeepSeek-V3.2's unbiased KL (arXiv 2512.02556, section 3.1).

    Gradient: through both factors, -ρ log r · d log π. With a detached ratio it would be the gradient of the forward
    KL. The ratio is always per token, even if the loss uses a sequence-level ratio, and it is not clipped.

    With a sequence-level ratio this differs from TRL 1.16, which multiplies by the sequence ratio
    (huggingface/trl#6586). That product estimates no KL.

    The value is 0 or above. It overflows float32, as in TRL, if the reference is 88 nats or more above the policy.

    >>> import math, torch
    >>> logps, ref_logps = torch.tensor([[0.0]]), torch.tensor([[math.log(2.0)]])
    >>> round(corrected_k3(logps, ref_logps, torch.tensor([[2.0]]).log()).item(), 6)  # 2 (2 - ln 2 - 1)
    0.613706
    """
    return log_ratio.exp() * k3(logps, ref_logps)


def estimates(logps: Tensor, ref_logps: Tensor, log_ratio: Tensor | None = None) -> dict[str, Tensor]:
    """Return the KL by each estimator, corrected if there is a `log_ratio`."""
    if log_ratio is None:
        return {"k1": k1(logps, ref_logps), "k2": k2(logps, ref_logps), "k3": k3(logps, ref_logps)}
    return {
        "k1": corrected_k1(logps, ref_logps, log_ratio),
        "k2": corrected_k2(logps, ref_logps, log_ratio),
        "k3": corrected_k3(logps, ref_logps, log_ratio),
    }
