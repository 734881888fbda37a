"""The critic and the policy of `PPOTrainer` find exact values, on the two problems of docs/figures/critic.py."""

import pytest
import torch

from tests.tools import script
from tests.tools.headroom import within


def test_the_values_of_the_chain_are_those_found_by_hand() -> None:
    """To `a` from `b`, to `e` from `c` and `d`, then stop: 3/4 and 1, times 0.7 for each step on the way."""
    with script.figure("critic") as figure:
        optimum = figure.CHAIN.optimum(torch.ones(5, 6))
        assert optimum.argmax(1).tolist() == [5, 0, 3, 4, 5]
        best = torch.tensor([0.75, 0.7 * 0.75, 0.7 * 0.7, 0.7, 1.0], dtype=torch.float64)
        assert within((figure.CHAIN.values(optimum, optimum) - best).abs(), 1e-12)


@pytest.mark.slow
def test_the_critic_finds_the_values_of_a_policy_that_stays_and_then_the_best() -> None:
    with script.figure("critic") as figure:
        chain = figure.train(figure.CHAIN)
        warm_up = slice(figure.WARM_UP + 1)
    assert bool((chain.policies[warm_up] == chain.policies[0]).all())
    assert not chain.values[0].any()  # a head of zeros
    last = chain.values[warm_up][-20:].mean(0)  # targets are sampled, and a mean is steadier than the last one
    assert within((last - chain.known[0]).abs(), 0.3)
    assert bool((last < -1).all())
    assert within(chain.distances[-1], 0.04) and chain.distances[0] > 0.9
    assert within((chain.values[-1] - chain.known[-1]).abs(), 0.06)
    assert within((chain.values[-1] - chain.best).abs(), 0.06)
