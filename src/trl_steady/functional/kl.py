"""Estimators of KL(policy || reference) from one sampled token, and what their gradients estimate."""

from torch import Tensor

__all__ = ["importance_corrected", "k3"]


def k3(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """Schulman's k3: r - log r - 1 with r = π_ref / π. Non-negative, unbiased in value under π.

    The KL of GRPO (arXiv 2402.03300, eq. 4). Used as a loss without correction, its expected gradient on policy is
    that of the *forward* KL(ref || π); see `importance_corrected`.

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


def importance_corrected(estimate: Tensor, log_ratio: Tensor) -> Tensor:
    """DeepSeek-V3.2's unbiased KL (arXiv 2512.02556, section 3.1): (π / π_old) times the estimate, token by token.

    Gradient: through both factors. With `k3`, each sample's gradient is (π / π_old) log(π / π_ref) d log π, whose
    expectation under π_old is the gradient of the reverse KL(π || ref) at each token. A detached ratio would give the
    forward KL's. The ratio is per token whatever the loss's own level, and is not clipped.

    Differs from TRL 1.16 under a sequence-level ratio: TRL multiplies by the sequence ratio there
    (huggingface/trl#6586), which estimates no KL.

    Args:
        estimate: (B, T), from `k3`.
        log_ratio: (B, T), log π - log π_old of the same tokens, with its gradient.

    Returns:
        (B, T), in nats. Overflows float32 where the reference is 88 nats or more above the policy, as TRL's does.

    >>> import torch
    >>> importance_corrected(torch.tensor([[0.5]]), torch.tensor([[2.0]]).log()).item()
    1.0
    """
    return log_ratio.exp() * estimate
