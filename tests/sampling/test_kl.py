"""The corrected KL where policy, old policy and reference are renormalised on a kept set: enumerated in float64."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from tests.oracles import sampling as oracle
from tests.tools.headroom import within
from trl_steady.functional import kl
from trl_steady.sampling.kept import KeptTokens
from trl_steady.sampling.log_probs import kept_log_probs

VOCABULARY = 6
SETS = [[4, 1, 2], [0, 5], [5, 4, 3, 1, 0], [3]]
SEEDS = range(10)
EXACT = 1e-13  # sums of up to 6 numbers below 30, of which the tests' own controls are off by 1e-3 or more

Term = Callable[[Tensor, Tensor, Tensor], Tensor]  # of log π, log π_ref and log π / π_old
TERMS: dict[str, Term] = {"k1": kl.corrected_k1, "k2": kl.corrected_k2, "k3": kl.corrected_k3}


def by_oracle(z: Tensor, tokens: Sequence[int], kept: Sequence[int]) -> Tensor:
    return oracle.log_probs(z.expand(len(tokens), -1), torch.tensor(tokens), [kept] * len(tokens))


def by_head(z: Tensor, tokens: Sequence[int], kept: Sequence[int]) -> Tensor:
    """The scores as hidden states of a head that is the identity."""
    identity, sets = torch.eye(VOCABULARY, dtype=z.dtype), KeptTokens.of([kept] * len(tokens))
    return kept_log_probs(z.expand(len(tokens), -1), identity, None, torch.tensor(tokens), sets)


LogProbs = Callable[[Tensor, Sequence[int], Sequence[int]], Tensor]
both = pytest.mark.parametrize("log_probs", [by_oracle, by_head])
sets = pytest.mark.parametrize("kept", SETS, ids=str)


def policies(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of policy, old policy and reference."""
    theta, old, ref = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(seed)).double()
    return theta.requires_grad_(), old, ref


def expectation(term: Term, logps: Tensor, ref_logps: Tensor, old_logps: Tensor) -> Tensor:
    """Over the old policy, from the log-probs of all tokens that it can sample."""
    return (old_logps.exp() * term(logps, ref_logps, logps - old_logps)).sum()


def gradient(value: Tensor, theta: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(value, theta)
    return grad


def divergence(theta: Tensor, ref: Tensor, kept: Sequence[int]) -> Tensor:
    return oracle.kl(theta.unsqueeze(0), ref.unsqueeze(0), [kept]).squeeze(0)


@both
@sets
@pytest.mark.parametrize("name", TERMS)
def test_all_three_on_the_set_the_expected_gradient_is_that_of_the_kl_on_the_set(
    name: str, kept: list[int], log_probs: LogProbs
) -> None:
    for seed in SEEDS:
        theta, old, ref = policies(seed)
        value = expectation(TERMS[name], *(log_probs(z, kept, kept) for z in (theta, ref, old)))
        exact = divergence(theta, ref, kept)
        got, expected = gradient(value, theta), gradient(exact, theta)
        assert within((got - expected).abs(), EXACT)
        assert len(kept) == 1 or not within(expected.abs(), 2e-3)
        assert name == "k2" or within(abs(value - exact), EXACT)


@sets
def test_by_enumeration_of_the_oracle_it_is_too(kept: list[int]) -> None:
    for seed in SEEDS:
        theta, old, ref = policies(seed)
        references = iter(by_oracle(ref, kept, kept))
        term = lambda logps, old_logps, own=references: kl.corrected_k3(logps, next(own), logps - old_logps)
        got = oracle.expected_gradient(term, theta, old, kept)
        assert within((got - gradient(divergence(theta, ref, kept), theta)).abs(), EXACT)


@pytest.mark.parametrize("kept", SETS, ids=str)
@pytest.mark.parametrize("name", TERMS)
def test_a_policy_on_the_whole_vocabulary_has_another_gradient(name: str, kept: list[int]) -> None:
    """Beside an old policy on the set; and all on the vocabulary, as without the mask, sampled on the set."""
    for seed in SEEDS:
        theta, old, ref = policies(seed)
        right = [gradient(divergence(theta, ref, each), theta) for each in (kept, [])]
        logps = by_oracle(theta, kept, [])
        olds, refs = ([by_oracle(z, kept, each) for each in (kept, [])] for z in (old, ref))
        for old_logps, ref_logps in ((olds[0], refs[0]), (olds[0], refs[1]), (olds[1], refs[1])):
            value = (olds[0].exp() * TERMS[name](logps, ref_logps, logps - old_logps)).sum()
            (got,) = torch.autograd.grad(value, theta, retain_graph=True)
            assert min(float((got - each).abs().max()) for each in right) > 1e-3


@both
@sets
@pytest.mark.parametrize("name", TERMS)
def test_a_reference_on_the_whole_vocabulary_leaves_the_gradient_and_adds_to_the_value(
    name: str, kept: list[int], log_probs: LogProbs
) -> None:
    for seed in SEEDS:
        theta, old, ref = policies(seed)
        value = expectation(
            TERMS[name], log_probs(theta, kept, kept), by_oracle(ref, kept, []), log_probs(old, kept, kept)
        )
        exact = divergence(theta, ref, kept)
        assert within((gradient(value, theta) - gradient(exact, theta)).abs(), EXACT)
        mass = float(oracle.kept_mass(ref.unsqueeze(0), [kept]))
        excess = {"k1": -math.log(mass), "k3": mass - 1 - math.log(mass)}
        assert mass < 0.99
        if name != "k2":
            assert (value - exact).item() == pytest.approx(excess[name], abs=EXACT)
            assert excess[name] > 1e-5


@both
@sets
def test_ratios_to_an_old_policy_on_the_set_have_mean_1_and_on_policy_are_1(
    kept: list[int], log_probs: LogProbs
) -> None:
    for seed in SEEDS:
        theta, old, _ = policies(seed)
        own, own_old = log_probs(theta, kept, kept), log_probs(old, kept, kept)
        assert (own_old.exp() * (own - own_old).exp()).sum().item() == pytest.approx(1, abs=EXACT)
        assert (log_probs(theta.detach(), kept, kept) - own).count_nonzero() == 0
        # without the set it is what the policy has of it, for whichever token
        mass = float(oracle.kept_mass(theta.detach().unsqueeze(0), [kept]))
        ratios = (by_oracle(theta, kept, []) - own).exp().tolist()
        assert ratios == pytest.approx([mass] * len(kept), abs=EXACT)
        assert mass < 0.99
