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


@pytest.mark.parametrize("name", TOYS)
def test_the_toy_enumerates_all_outcomes(name: str) -> None:
    toy, going_on = TOYS[name], UNEVEN.sigmoid()
    assert within(abs(toy.probabilities(UNEVEN).sum() - 1), 1e-14)
    assert within(abs(toy.expected_steps(UNEVEN) - (1 + going_on[0] + going_on[0] * going_on[1])), 1e-14)
    assert (within(true_gradient(name).abs(), 1e-12)) == (name != "worth going on")


@placements
@pytest.mark.parametrize("scale", ["none", "group"])
@pytest.mark.parametrize(("name", "sign"), [("good", -1), ("bad", 1), ("good, skewed", -1), ("bad, skewed", 1)])
def test_process_stops_after_a_good_step_and_goes_on_after_a_bad_one(
    name: str, sign: int, scale: str, placement: str
) -> None:
    assert (sign * gradient_of(name, advantages.process, placement, scale)).min() > 2e-2


def test_process_does_not_see_that_going_on_is_worth_something() -> None:
    """Every step is worth 1/2, which the mean over the steps takes away."""
    assert true_gradient("worth going on").min() > 5e-2
    assert within(gradient_of("worth going on", advantages.process, figure.LAST_OF_THE_STEP).abs(), 1e-12)


@placements
@pytest.mark.parametrize("name", TOYS)
def test_return_to_go_has_the_true_gradient_but_for_the_factor_of_the_group(name: str, placement: str) -> None:
    gradient = gradient_of(name, advantages.return_to_go, placement)
    torch.testing.assert_close(gradient, true_gradient(name) * (2 / 3), rtol=0, atol=1e-12)


@placements
def test_a_scale_of_the_group_biases_skewed_rewards_only(placement: str) -> None:
    """What is rare and large raises the deviation that divides it. As with TRL's totals, whatever the baseline."""
    for name in ("good", "bad"):
        assert within(gradient_of(name, advantages.return_to_go, placement, "group").abs(), 1e-12)
    for name, share in (("good, skewed", 0.32), ("bad, skewed", 0.40)):
        biased = gradient_of(name, advantages.return_to_go, placement, "group")
        assert (-biased).min() > 4e-3
        assert biased.abs().max() < share * gradient_of(name, advantages.process, placement, "group").abs().max()
        assert within(gradient_of(name, of_totals, placement, "none").abs(), 1e-12)
        assert not within(gradient_of(name, of_totals, placement, "group").abs(), 4e-3)


@pytest.mark.parametrize("formula", [advantages.process, advantages.return_to_go])
def test_a_batch_of_one_group_has_the_advantages_of_the_group(formula: Callable[..., Tensor]) -> None:
    toy = TOYS["good, skewed"]
    for group in toy.members[::37]:
        rewards = toy.rewards[group]
        batch, of_group = (formula(rewards, group_size=3, scale=scale) for scale in ("batch", "group"))
        torch.testing.assert_close(batch, of_group, rtol=0, atol=1e-14)


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
    for (own, chance), (other, chance_of_other) in itertools.product(outcomes, repeat=2):
        mean = sum(own + other) / Fraction(len(own + other))
        counted = own if placement == figure.LAST_OF_THE_STEP else own[1:]  # an empty sum is 0
        advantage = sum((reward - mean for reward in counted), Fraction(0))
        total += chance * chance_of_other * advantage * (half if len(own) == 2 else -half)
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


@pytest.mark.parametrize(
    ("first", "later", "formula", "scale", "placement", "pushed", "steps"),
    [
        ("FIRST_GOOD", "SYMMETRIC", "process", "none", 1, -0.101, 1.01),
        ("FIRST_BAD", "SYMMETRIC", "process", "none", 0, 0.076, 3.92),
        ("FIRST_GOOD", "SYMMETRIC", "return_to_go", "none", 0, 0.0, 1.875),
        ("FIRST_GOOD", "SKEWED", "return_to_go", "group", 1, -0.034, 1.02),
    ],
)
def test_the_page_states_pushes_and_lengths_of_the_toy(
    first: str, later: str, formula: str, scale: str, placement: int, pushed: float, steps: float
) -> None:
    toy = figure.Toy(getattr(figure, first), getattr(figure, later), 4)
    on_decisions = toy.on_decisions(getattr(advantages, formula), figure.PLACEMENTS[placement], scale)
    gradient = toy.expected_gradient(on_decisions, torch.zeros(3, dtype=torch.float64))
    # the page rounds to the digits that it prints
    assert within(abs(gradient[0] - pushed), 1e-9, granted=5e-4 if abs(pushed) < 0.11 else 5e-3)
    assert within(abs(figure.train(toy, on_decisions)[-1] - steps), 1e-9, granted=5e-3)


def test_the_picture_shows_lengths_that_collapse_grow_and_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theta = torch.zeros(2, dtype=torch.float64)
    ends = {}
    for formula, name in itertools.product((advantages.process, advantages.return_to_go), ("good", "bad")):
        toy = TOYS[name]
        lengths = figure.train(toy, toy.on_decisions(formula, figure.LAST_OF_THE_STEP, "none"))
        assert lengths[0] == toy.expected_steps(theta)
        ends[formula.__name__, name] = lengths[-1].item()
    assert ends["process", "good"] < 1.05 and ends["process", "bad"] > STEPS - 0.1
    assert within(abs(ends["return_to_go", "good"] - 1.75), 1e-9) and within(
        abs(ends["return_to_go", "bad"] - 1.75), 1e-9
    )

    pytest.importorskip("matplotlib", reason="needs the recipes extra")
    monkeypatch.setattr(figure, "UPDATES", 3)
    figure.draw(tmp_path / "bias.png")
    assert (tmp_path / "bias.png").stat().st_size > 10_000


def of_totals(rewards: Tensor, *, group_size: int, scale: str) -> Tensor:
    """Outcome supervision of the totals, TRL's: the same advantage at every step."""
    totals = advantages.process(rewards.nansum(1, keepdim=True), group_size=group_size, scale=scale)
    return totals.expand_as(rewards).where(~rewards.isnan(), 0)
