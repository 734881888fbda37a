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
EXACT = 1e-13  # sums of up to 6 numbers below 30

Term = Callable[[Tensor, Tensor, Tensor], Tensor]  # of log π, log π_ref and log π / π_old
TERMS: dict[str, Term] = {"k1": kl.corrected_k1, "k2": kl.corrected_k2, "k3": kl.corrected_k3}


def by_head(z: Tensor, tokens: Sequence[int], kept: Sequence[int]) -> Tensor:
    """The scores as hidden states of a head that is the identity."""
    identity, sets = torch.eye(VOCABULARY, dtype=z.dtype), KeptTokens.of([kept] * len(tokens))
    return kept_log_probs(z.expand(len(tokens), -1), identity, None, torch.tensor(tokens), sets)


@pytest.mark.parametrize("is_reference_kept", [True, False])
@pytest.mark.parametrize("name", TERMS)
def test_the_expected_gradient_is_that_of_the_kl_on_the_set(name: str, is_reference_kept: bool) -> None:
    """A reference on the whole vocabulary leaves the gradient as it is, and adds a constant to the value."""
    for seed, kept in enumerate(SETS):
        theta, old, ref = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(seed)).double()
        theta.requires_grad_()
        logps, old_logps = by_head(theta, kept, kept), by_head(old, kept, kept)
        on_all = oracle.log_probs(ref.expand(len(kept), -1), torch.tensor(kept), [[]] * len(kept))
        ref_logps = by_head(ref, kept, kept) if is_reference_kept else on_all
        value = (old_logps.exp() * TERMS[name](logps, ref_logps, logps - old_logps)).sum()
        exact = oracle.kl(theta.unsqueeze(0), ref.unsqueeze(0), [kept]).squeeze(0)
        (gradient,), (expected,) = (torch.autograd.grad(each, theta) for each in (value, exact))
        assert within((gradient - expected).abs(), EXACT)
        assert len(kept) == 1 or not within(expected.abs(), 2e-3)
        mass = 1.0 if is_reference_kept else float(oracle.kept_mass(ref.unsqueeze(0), [kept]))
        excess = {"k1": -math.log(mass), "k3": mass - 1 - math.log(mass)}
        assert name == "k2" or within(abs(value - exact - excess[name]), EXACT)
