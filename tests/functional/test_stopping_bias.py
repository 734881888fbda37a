"""The expected policy gradient of going on where that is worth nothing: over all outcomes of a group, in float64."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

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


def test_a_stop_without_a_step_of_its_own_is_biased() -> None:
    """Without a step of reward 0 those that stopped are in no baseline, and going on looks worth less than it is."""
    name, after = "worth going on", figure.FIRST_OF_THE_NEXT
    gradient = gradient_of(name, advantages.return_to_go, after, rest_is_a_step=False)
    assert (true_gradient(name) * (2 / 3) - gradient).min() > 1e-2
