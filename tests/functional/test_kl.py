"""k3 and its importance correction: numbers by hand, and what the gradients estimate, by enumeration in float64."""

import math

import pytest
import torch
from torch import Tensor

from trl_steady.functional import kl


def policies() -> tuple[Tensor, Tensor, Tensor]:
    """Logits of policy, old policy and reference over a vocabulary of 5."""
    generator = torch.Generator().manual_seed(0)
    theta, old, ref = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    return theta.requires_grad_(), old, ref


def gradient(loss: Tensor, theta: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(loss, theta)
    return grad


def reverse_kl(theta: Tensor, ref: Tensor) -> Tensor:
    return (theta.softmax(-1) * (theta.log_softmax(-1) - ref.log_softmax(-1))).sum()


def test_k3_by_hand() -> None:
    # π = 1/2, ref = 1/4: r = 1/2, k3 = 1/2 + ln 2 - 1
    half, quarter = torch.tensor(0.5, dtype=torch.float64).log(), torch.tensor(0.25, dtype=torch.float64).log()
    assert kl.k3(half, quarter).item() == pytest.approx(math.log(2) - 0.5, abs=1e-15)


def test_k3_keeps_its_digits_near_zero_in_float32() -> None:
    # k3(x) = x²/2 + x³/6 + ...; exp(x) - x - 1 rounds to 0 or to 1.2e-7 here
    value = kl.k3(torch.tensor(0.0), torch.tensor(1e-4)).item()
    assert value == pytest.approx(5.00017e-9, rel=2e-3)


def test_corrected_k3_has_the_gradient_of_the_reverse_kl_whatever_the_old_policy() -> None:
    theta, old, ref = policies()
    logps, old_logps, ref_logps = theta.log_softmax(-1), old.log_softmax(-1), ref.log_softmax(-1)
    corrected = kl.importance_corrected(kl.k3(logps, ref_logps), logps - old_logps)
    expected = gradient(reverse_kl(theta, ref), theta)
    got = gradient((old_logps.exp() * corrected).sum(), theta)
    assert (got - expected).abs().max() < 1e-12
    # negative controls: no ratio, and a detached ratio
    theta, old, ref = policies()
    logps = theta.log_softmax(-1)
    plain = gradient((old_logps.exp() * kl.k3(logps, ref_logps)).sum(), theta)
    logps = theta.log_softmax(-1)
    detached = kl.importance_corrected(kl.k3(logps, ref_logps), (logps - old_logps).detach())
    detached = gradient((old_logps.exp() * detached).sum(), theta)
    assert (plain - expected).abs().max() > 1e-2
    assert (detached - expected).abs().max() > 1e-2


def test_value_of_the_corrected_k3_is_the_kl() -> None:
    theta, old, ref = policies()
    logps, old_logps = theta.log_softmax(-1), old.log_softmax(-1)
    corrected = kl.importance_corrected(kl.k3(logps, ref.log_softmax(-1)), logps - old_logps)
    assert (old_logps.exp() * corrected).sum().item() == pytest.approx(reverse_kl(theta, ref).item(), abs=1e-14)


def test_value_and_gradient_vanish_at_the_reference() -> None:
    theta, old, _ = policies()
    logps = theta.log_softmax(-1)
    corrected = kl.importance_corrected(kl.k3(logps, logps.detach()), logps - old.log_softmax(-1))
    assert corrected.abs().max() == 0
    assert gradient(corrected.sum(), theta).abs().max() == 0


def test_gradcheck() -> None:
    theta, old, ref = policies()
    old_logps, ref_logps = old.log_softmax(-1), ref.log_softmax(-1)
    function = lambda x: kl.importance_corrected(kl.k3(x, ref_logps), x - old_logps)
    assert torch.autograd.gradcheck(function, theta.log_softmax(-1).detach().requires_grad_())
