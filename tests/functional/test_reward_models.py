"""Losses, labels and calibration of reward models: numbers by hand, identities, and gradients in float64."""

import math

import pytest
import torch
from torch.nn.functional import binary_cross_entropy

from trl_steady.functional import reward_models

SCORES = torch.tensor([2.0, -1.0, 0.5], dtype=torch.float64)
OTHERS = torch.tensor([-1.0, 0.5, 0.5], dtype=torch.float64)


def test_pairs_by_hand() -> None:
    """-log sigmoid of 3, -1.5 and 0."""
    expected = [math.log(1 + math.exp(-3)), math.log(1 + math.exp(1.5)), math.log(2)]
    assert reward_models.pair_loss(SCORES, OTHERS).tolist() == pytest.approx(expected, rel=1e-12)


def test_the_gradient_of_pairs_is_the_probability_of_the_wrong_order() -> None:
    right, wrong = SCORES.clone().requires_grad_(), OTHERS.clone().requires_grad_()
    reward_models.pair_loss(right, wrong).sum().backward()
    wrong_order = 1 / (1 + (SCORES - OTHERS).exp())
    assert right.grad is not None and wrong.grad is not None
    torch.testing.assert_close(right.grad, -wrong_order, rtol=1e-12, atol=0)
    torch.testing.assert_close(wrong.grad, wrong_order, rtol=1e-12, atol=0)
    assert torch.autograd.gradcheck(reward_models.pair_loss, (right, wrong))


def test_verdicts_by_hand_and_as_torch_has_them_for_probabilities() -> None:
    """log(1 + e^-2) for right, log(1 + e^-1) for wrong, log 2."""
    labels = torch.tensor([1.0, 0.0, 0.0])
    found = reward_models.verdict_loss(torch.tensor([2.0, -1.0, 0.0], dtype=torch.float64), labels)
    assert found.tolist() == pytest.approx([math.log(1 + math.exp(-2)), math.log(1 + math.exp(-1)), math.log(2)])
    logits = SCORES.clone().requires_grad_()
    expected = binary_cross_entropy(logits.sigmoid(), labels.double(), reduction="none")
    torch.testing.assert_close(reward_models.verdict_loss(logits, labels), expected, rtol=1e-12, atol=0)
    (gradient,) = torch.autograd.grad(reward_models.verdict_loss(logits, labels).sum(), logits)
    torch.testing.assert_close(gradient, SCORES.sigmoid() - labels, rtol=1e-12, atol=1e-15)


def test_far_scores_have_finite_losses() -> None:
    """log(sigmoid(-1000)) alone would be -inf."""
    far = torch.tensor([-1000.0])
    assert reward_models.pair_loss(far, -far).tolist() == [2000.0]
    assert reward_models.verdict_loss(far, torch.ones(1)).tolist() == [1000.0]


def test_one_continuation_that_arrives_makes_a_step_good() -> None:
    reached = torch.tensor([[False, True, False], [False, False, False], [True, True, True]])
    assert reward_models.step_labels(reached).tolist() == [1.0, 0.0, 1.0]


def test_calibration_by_hand() -> None:
    """Bin 0.8 to 0.9 states 0.85 twice for one success; bin 0.1 to 0.2 states 0.15 once for none; 1.0 is right."""
    stated, happened = torch.tensor([0.85, 0.85, 0.15, 1.0]), torch.tensor([1.0, 0.0, 0.0, 1.0])
    expected = (2 * abs(0.85 - 0.5) + 0.15 + 0) / 4
    assert reward_models.calibration_error(stated, happened).item() == pytest.approx(
        expected, abs=1e-7
    )  # float32 input
    assert reward_models.calibration_error(stated, happened, bins=1).item() == pytest.approx(
        abs(2.85 - 2) / 4, abs=1e-7
    )
    assert reward_models.calibration_error(stated[:0], happened[:0]).isnan()
