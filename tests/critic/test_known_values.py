"""The critic and the policy of `PPOTrainer` find exact values, on the two problems of docs/figures/critic.py."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.tools import script
from tests.tools.headroom import within


@pytest.fixture(scope="module")
def figure() -> Iterator[Any]:
    with script.figure("critic") as module:
        yield module


@pytest.fixture(scope="module")
def chain(figure: Any) -> Any:
    return figure.train(figure.CHAIN)


@pytest.fixture(scope="module")
def bandit(figure: Any) -> Any:
    """Policy, critic and reference are adapters on one base."""
    return figure.train(figure.BANDIT, adapters=True)


def test_the_values_of_the_chain_are_those_found_by_hand(figure: Any) -> None:
    """To `a` from `b`, to `e` from `c` and `d`, then stop: 3/4 and 1, times 0.7 for each step on the way."""
    optimum = figure.CHAIN.optimum(torch.ones(5, 6))
    assert optimum.argmax(1).tolist() == [5, 0, 3, 4, 5]
    best = torch.tensor([0.75, 0.7 * 0.75, 0.7 * 0.7, 0.7, 1.0], dtype=torch.float64)
    assert within((figure.CHAIN.values(optimum, optimum) - best).abs(), 1e-12)


def test_exact_values_are_those_of_sampled_walks(figure: Any) -> None:
    torch.manual_seed(0)
    policy = torch.rand(5, 6, dtype=torch.float64).softmax(1)
    states, weights = torch.arange(5).repeat_interleave(40_000), torch.ones(200_000, dtype=torch.float64)
    found, goes_on = torch.zeros_like(weights), torch.ones_like(weights)
    for _ in range(40):
        actions = torch.multinomial(policy[states], 1).squeeze(1)
        found += goes_on * weights * figure.CHAIN.rewards[states, actions]
        goes_on, weights = goes_on * (actions < 5), weights * figure.GAMMA
        states = actions.clamp(max=4)
    assert within((found.view(5, -1).mean(1) - figure.CHAIN.values(policy, policy)).abs(), 0.05)


def test_the_optimum_with_a_kl_beats_its_neighbours(figure: Any) -> None:
    torch.manual_seed(0)
    reference = torch.rand(5, 6, dtype=torch.float64).softmax(1)
    logits = figure.BANDIT.optimum(reference).log()

    def value(logits: torch.Tensor) -> torch.Tensor:
        return figure.BANDIT.values(logits.softmax(1), reference).sum()

    assert within(torch.func.grad(value)(logits).abs(), 1e-12)
    assert all(value(logits + 0.1 * torch.randn(5, 6).double()) < value(logits) for _ in range(10))


def test_the_critic_finds_the_values_of_a_policy_that_stays(figure: Any, chain: Any) -> None:
    warm_up = slice(figure.WARM_UP + 1)
    assert bool((chain.policies[warm_up] == chain.policies[0]).all())
    assert not chain.values[0].any()  # a head of zeros
    last = chain.values[warm_up][-20:].mean(0)  # targets are sampled, and a mean is steadier than the last one
    assert within((last - chain.known[0]).abs(), 0.3)
    assert bool((last < -1).all())


def test_policy_and_critic_find_the_best_of_the_chain(chain: Any) -> None:
    assert within(chain.distances[-1], 0.04) and chain.distances[0] > 0.9
    assert within((chain.values[-1] - chain.known[-1]).abs(), 0.06)
    assert within((chain.values[-1] - chain.best).abs(), 0.06)


@pytest.mark.slow  # the chain is the same, with states
def test_policy_and_critic_find_the_best_of_the_bandit(bandit: Any) -> None:
    """At the optimum, all answers have the same reward with KL, so the targets have no noise."""
    assert within(bandit.distances[-1], 0.01) and bandit.distances[0] > 0.2
    assert within((bandit.values[-1] - bandit.known[-1]).abs(), 0.01)
    assert within((bandit.values[-1] - bandit.best).abs(), 0.01)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [{"bootstrap_truncated": False}, {"gamma": 1.0}])
def test_a_wrong_target_is_caught(figure: Any, wrong: dict[str, Any]) -> None:
    run = figure.train(figure.CHAIN, **wrong)
    last = run.values[: figure.WARM_UP + 1][-20:].mean(0)
    assert not within((last - run.known[0]).abs(), 0.15)
