"""The estimators of the KL: numbers by hand, and what the gradients estimate, by enumeration in float64."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.tools.headroom import within
from trl_steady.functional import kl

Term = Callable[[Tensor, Tensor, Tensor], Tensor]  # of log π, log π_ref and log π_old

corrected: dict[str, Term] = {
    "k1": lambda logps, ref_logps, old_logps: kl.k1(logps, ref_logps, logps - old_logps),
    "k2": lambda logps, ref_logps, old_logps: kl.k2(logps, ref_logps, logps - old_logps),
    "k3": lambda logps, ref_logps, old_logps: kl.k3(logps, ref_logps, logps - old_logps),
}
plain: dict[str, Term] = {
    "k1": lambda logps, ref_logps, _: kl.k1(logps, ref_logps),
    "k2": lambda logps, ref_logps, _: kl.k2(logps, ref_logps),
    "k3": lambda logps, ref_logps, _: kl.k3(logps, ref_logps),
}


def policies(seed: int = 0, *shape: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of policy, old policy and reference over a vocabulary of 5."""
    generator = torch.Generator().manual_seed(seed)
    theta, old, ref = torch.randn(3, *(shape or (5,)), generator=generator, dtype=torch.float64)
    return theta.requires_grad_(), old, ref


def gradient(loss: Tensor, theta: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(loss, theta)
    return grad


def divergence(left: Tensor, right: Tensor) -> Tensor:
    """KL(left || right) of logits."""
    return (left.softmax(-1) * (left.log_softmax(-1) - right.log_softmax(-1))).sum()


def expectation(term: Term, theta: Tensor, old: Tensor, ref: Tensor) -> Tensor:
    """Over the old policy, by enumeration."""
    logps, old_logps, ref_logps = theta.log_softmax(-1), old.log_softmax(-1), ref.log_softmax(-1)
    return (old_logps.exp() * term(logps, ref_logps, old_logps)).sum()


ROUNDED = 1e-14  # ten roundings of float64 in numbers below 8


def test_values_and_slopes_by_hand() -> None:
    """π = 1/2, ref = 1/4, old = 1/8: r = 1/2, ρ = 4."""
    half, quarter, eighth = (torch.tensor(p, dtype=torch.float64).log() for p in (0.5, 0.25, 0.125))
    ln2 = math.log(2)
    for name, value in {"k1": ln2, "k2": ln2**2 / 2, "k3": ln2 - 0.5}.items():
        assert plain[name](half, quarter, eighth).item() == pytest.approx(value, abs=ROUNDED)
        assert corrected[name](half, quarter, eighth).item() == pytest.approx(4 * value, abs=ROUNDED)
    # and the gradients with respect to log π: 4 (k1 + 1), 4 k1, 4 k1
    for name, slope in {"k1": 4 * (ln2 + 1), "k2": 4 * ln2, "k3": 4 * ln2}.items():
        logps = half.clone().requires_grad_()
        assert gradient(corrected[name](logps, quarter, eighth), logps).item() == pytest.approx(slope, abs=ROUNDED)


def test_k3_keeps_its_digits_near_zero_in_float32() -> None:
    # k3(x) = x²/2 + x³/6 + ...; exp(x) - x - 1 rounds to 0 or to 1.2e-7 here
    value = kl.k3(torch.tensor(0.0), torch.tensor(1e-4)).item()
    assert value == pytest.approx(5.00017e-9, rel=2e-3)


@pytest.mark.parametrize("name", corrected)
def test_corrected_estimators_have_the_gradient_of_the_reverse_kl_off_policy(name: str) -> None:
    theta, old, ref = policies()
    got = gradient(expectation(corrected[name], theta, old, ref), theta)
    expected = gradient(divergence(theta, ref), theta)
    assert within((got - expected).abs(), 1e-12)


def test_plain_estimators_have_three_different_gradients_on_policy() -> None:
    theta, _, ref = policies()
    old = theta.detach()
    zero, reverse, forward = (
        torch.zeros(5, dtype=torch.float64),
        gradient(divergence(theta, ref), theta),
        gradient(divergence(ref, theta), theta),
    )
    for name, expected in {"k1": zero, "k2": reverse, "k3": forward}.items():
        got = gradient(expectation(plain[name], theta, old, ref), theta)
        assert within((got - expected).abs(), 1e-12), name
    assert not within((reverse - forward).abs(), 1e-3)


def test_corrected_k1_and_k3_have_the_value_of_the_kl() -> None:
    theta, old, ref = policies()
    expected = divergence(theta, ref).item()
    for name in ("k1", "k3"):
        assert expectation(corrected[name], theta, old, ref).item() == pytest.approx(expected, abs=1e-13)
    assert not within(abs(expectation(corrected["k2"], theta, old, ref).item() - expected), 1e-3)
    assert (corrected["k3"](theta.log_softmax(-1), ref.log_softmax(-1), old.log_softmax(-1)) >= 0).all()


@pytest.mark.parametrize("on_policy", [False, True])
def test_over_two_tokens_it_is_the_kl_of_each_given_its_prefix(on_policy: bool) -> None:
    """V = 3, T = 2, enumerated. A sequence ratio is no KL at all: the negative of huggingface/trl#6586."""
    first, second = policies(1, 3), policies(2, 3, 3)  # logits of token 1, and of token 2 after each token 1
    if on_policy:
        first, second = (first[0], first[0].detach(), first[2]), (second[0], second[0].detach(), second[2])
    theta = (first[0], second[0])

    def terms(term: Callable[[Tensor, Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Gradient of sum over answers of π_old(answer) times `own` of its (2,) log-probs."""
        total = torch.zeros((), dtype=torch.float64)
        for a, b in itertools.product(range(3), repeat=2):
            logps, old_logps, ref_logps = (
                torch.stack([x.log_softmax(-1)[a], y.log_softmax(-1)[a, b]])
                for x, y in zip(first, second, strict=True)
            )
            total = total + old_logps.sum().exp().detach() * term(logps, ref_logps, old_logps).sum()
        return torch.autograd.grad(total, theta)

    def gap(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> float:
        return max(float((x - y).abs().max()) for x, y in zip(got, expected, strict=True))

    prefixes = first[1].softmax(-1)
    given_prefix = divergence(first[0], first[2]) + sum(
        prefixes[a] * divergence(second[0][a], second[2][a]) for a in range(3)
    )
    expected = torch.autograd.grad(given_prefix, theta)
    assert within(gap(terms(corrected["k3"]), expected), 1e-12)

    whole = divergence(first[0], first[2]) + sum(
        first[0].softmax(-1)[a] * divergence(second[0][a], second[2][a]) for a in range(3)
    )
    of_sequences = torch.autograd.grad(whole, theta)
    assert not within(gap(expected, of_sequences), 1e-2)

    broadcast = terms(lambda logps, ref, old: (logps - old).mean().exp() * kl.k3(logps, ref))
    assert not within(gap(broadcast, expected), 5e-3) and not within(gap(broadcast, of_sequences), 5e-3)
