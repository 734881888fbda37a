"""The expected policy gradient of going on where that is worth nothing: over all outcomes of a group, in float64."""

import importlib.util
import itertools
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tools.headroom import within
from trl_steady.functional import advantages

SCRIPT = Path(__file__).parents[2] / "docs/figures/stopping_bias.py"
spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
assert spec and spec.loader
figure: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(figure)

STEPS = 3
UNEVEN = torch.tensor([0.7, -0.4], dtype=torch.float64)
WORTH_HALF = {0.0: 1 / 2, 1.0: 1 / 2}  # a later step that is worth taking
TOYS = {
    "good": figure.Toy(figure.FIRST_GOOD, figure.SYMMETRIC, STEPS),
    "bad": figure.Toy(figure.FIRST_BAD, figure.SYMMETRIC, STEPS),
    "good, skewed": figure.Toy(figure.FIRST_GOOD, figure.SKEWED, STEPS),
    "bad, skewed": figure.Toy(figure.FIRST_BAD, figure.SKEWED, STEPS),
    "worth going on": figure.Toy(figure.FIRST_GOOD, WORTH_HALF, STEPS),
}
placements = pytest.mark.parametrize("placement", figure.PLACEMENTS)


def gradient_of(
    name: str, formula: Callable[..., Tensor], placement: str, scale: str = "none", **options: bool
) -> Tensor:
    toy = TOYS[name]
    return toy.expected_gradient(toy.on_decisions(formula, placement, scale, **options), UNEVEN)


def true_gradient(name: str) -> Tensor:
    return torch.func.grad(TOYS[name].expected_reward)(UNEVEN)


@placements
@pytest.mark.parametrize("scale", ["none", "group"])
@pytest.mark.parametrize(("name", "sign"), [("good", -1), ("bad", 1), ("good, skewed", -1), ("bad, skewed", 1)])
def test_process_stops_after_a_good_step_and_goes_on_after_a_bad_one(
    name: str, sign: int, scale: str, placement: str
) -> None:
    assert (sign * gradient_of(name, advantages.process, placement, scale)).min() > 2e-2


@placements
@pytest.mark.parametrize("name", TOYS)
def test_return_to_go_has_the_true_gradient_but_for_the_factor_of_the_group(name: str, placement: str) -> None:
    gradient = gradient_of(name, advantages.return_to_go, placement)
    torch.testing.assert_close(gradient, true_gradient(name) * (2 / 3), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("placement", "expected"),
    [(figure.LAST_OF_THE_STEP, Fraction(-1, 24)), (figure.FIRST_OF_THE_NEXT, Fraction(-7, 96))],
)
def test_the_bias_of_process_by_hand(placement: str, expected: Fraction) -> None:
    """Two completions of one or two steps, theta = 0, first step 0 or 1, second -1/2 or 1/2.

    m is the mean of all steps' rewards, A the advantage of the decision, E the mean over the rewards:

        own steps  other's  E m              E A, last of its step    E A, first of the next
        1          1        1/2              1/2 - 1/2     =    0     0, no step
        1          2        (1/2 + 1/2) / 3  1/2 - 1/3     =  1/6     0, no step
        2          1        (1/2 + 1/2) / 3  1/2 - 2 (1/3) = -1/6     0 - 1/3 = -1/3
        2          2        (1/2 + 1/2) / 4  1/2 - 2 (1/4) =    0     0 - 1/4 = -1/4

    Each line has probability 1/4, d log π / d theta is -1/2 in the first two and 1/2 in the last two:
    (-1/6 - 1/6) / 8 = -1/24 and (-1/3 - 1/4) / 8 = -7/96.
    """
    half, total = Fraction(1, 2), Fraction(0)
    outcomes = [((Fraction(first),), Fraction(1, 4)) for first in (0, 1)]
    outcomes += [((Fraction(first), second), Fraction(1, 8)) for first in (0, 1) for second in (-half, half)]
    for (steps_of_one, chance), (other, chance_of_other) in itertools.product(outcomes, repeat=2):
        mean = sum(steps_of_one + other) / Fraction(len(steps_of_one + other))
        counted = steps_of_one if placement == figure.LAST_OF_THE_STEP else steps_of_one[1:]  # an empty sum is 0
        advantage = sum((reward - mean for reward in counted), Fraction(0))
        total += chance * chance_of_other * advantage * (half if len(steps_of_one) == 2 else -half)
    assert total == expected

    toy = figure.Toy(figure.FIRST_GOOD, figure.SYMMETRIC, steps=2, group_size=2)
    on_decisions = toy.on_decisions(advantages.process, placement, "none")
    gradient = toy.expected_gradient(on_decisions, torch.zeros(1, dtype=torch.float64))
    assert within(abs(gradient.item() - float(expected)), 1e-15)


def test_a_stop_without_a_step_of_its_own_is_biased() -> None:
    """Without a step of reward 0 those that stopped are in no baseline, and going on looks worth less than it is."""
    name, after = "worth going on", figure.FIRST_OF_THE_NEXT
    gradient = gradient_of(name, advantages.return_to_go, after, rest_is_a_step=False)
    assert (true_gradient(name) * (2 / 3) - gradient).min() > 1e-2
