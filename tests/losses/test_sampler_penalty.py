"""The squared log-ratio of policy to sampler as a term of the loss."""

from typing import Any

import pytest
import torch

from tests.tools.batches import Batch, Evaluate, Outcome, random_batch
from trl_steady.losses import LOSSES

TAU = 0.3


@pytest.mark.fast_rows(2)
@pytest.mark.parametrize("loss_type", LOSSES)
def test_it_is_reduced_as_the_kl_in_every_loss(evaluate: Evaluate, loss_type: str) -> None:
    """The uncorrected k2 of twice the strength to a reference that is the sampler."""
    batch = random_batch()
    found = evaluate(batch, loss_type=loss_type, sampler_penalty=TAU)
    inputs = {"ref_per_token_logps": batch.old_logps}
    options: dict[str, Any] = {"beta": 2 * TAU, "kl_estimator": "k2", "use_bias_correction_kl": False}
    kl = evaluate(batch, loss_type=loss_type, inputs=inputs, **options)
    plain = evaluate(batch, loss_type=loss_type)
    assert found.loss.item() == pytest.approx(kl.loss.item(), rel=1e-12)
    assert torch.allclose(found.grad, kl.grad, rtol=1e-12, atol=1e-15)
    assert not torch.allclose(found.grad, plain.grad, rtol=1e-3)


def penalised(evaluate: Evaluate, batch: Batch, **options: Any) -> tuple[torch.Tensor, torch.Tensor, Outcome]:
    """Return what the penalty adds to the loss and to its gradient."""
    on, off = (evaluate(batch, loss_type="dr_grpo", sampler_penalty=tau, **options) for tau in (TAU, 0.0))
    return on.loss - off.loss, on.grad - off.grad, on


def test_value_gradient_and_metric_by_hand(evaluate: Evaluate) -> None:
    old_logps, logps = torch.tensor([[-1.0, -2.0, -1.0]]).double(), torch.tensor([[-0.5, -4.0, -9.0]]).double()
    batch = Batch(logps, old_logps, torch.tensor([[True, True, False]]), torch.tensor([0.7]).double())
    window = {"current_gradient_accumulation_steps": 2}  # micro-batches of a step, each with half of the weight
    value, grad, outcome = penalised(evaluate, batch, max_completion_length=10, attributes=window)
    assert value.item() == pytest.approx(TAU * (0.25 + 4.0) / 20, rel=1e-12)
    assert grad[0].tolist() == pytest.approx([2 * TAU * 0.5 / 20, 2 * TAU * -2.0 / 20, 0.0], rel=1e-12)
    assert outcome.metrics["sampler_penalty"] == pytest.approx((0.25 + 4.0) / 2)


def test_the_sampler_is_the_engine_where_it_has_a_log_prob(evaluate: Evaluate) -> None:
    batch = random_batch()
    sampler = batch.old_logps - 0.2
    _, to_engine, _ = penalised(evaluate, batch, inputs={"sampling_per_token_logps": sampler})
    _, to_old, _ = penalised(evaluate, batch)
    each = 2 * TAU * 0.2 / (len(sampler) * 8)  # for completions of at most 8 tokens
    assert torch.allclose(to_engine - to_old, each * batch.mask.double(), rtol=1e-9)
    unscored = sampler.where(torch.arange(5) > 0, torch.nan)
    value, grad, _ = penalised(evaluate, batch, inputs={"sampling_per_token_logps": unscored})
    assert value.isfinite()
    assert torch.allclose(grad[:, 0], to_old[:, 0]) and torch.allclose(grad[:, 1:], to_engine[:, 1:])


def test_masks_do_not_drop_it_and_on_policy_it_has_no_gradient(evaluate: Evaluate) -> None:
    batch = random_batch()
    inputs = {"sampling_per_token_logps": batch.old_logps}
    options: dict[str, Any] = {"inputs": inputs, "geometric_mask_range": [1.0, 1.0], "off_policy_mask_threshold": 0.0}
    options["build"] = {"rollout_func": lambda *_: {}}
    _, masked, outcome = penalised(evaluate, batch, **options)
    _, plain, _ = penalised(evaluate, batch)
    assert outcome.metrics["dropped/off_policy"] > 0
    assert torch.allclose(masked, plain, rtol=1e-12, atol=1e-15)
    _, grad, _ = penalised(evaluate, batch._replace(logps=batch.old_logps))
    assert not grad.any()
