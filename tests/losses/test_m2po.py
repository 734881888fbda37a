"""M2PO through TRL's loss for everything but its policy term and its mask."""

from typing import Any

import pytest
import torch

from tests.oracles import trust_regions as oracles
from tests.tools.batches import Batch, Evaluate, Outcome, random_batch
from trl_steady.functional.masks import second_moment_mask

SHARE = 4  # TRL takes the micro-batch for one of four that share its tokens


def m2po(evaluate: Evaluate, batch: Batch, **options: Any) -> Outcome:
    return evaluate(batch, loss_type="m2po", **{"epsilon": None, "epsilon_high": None, **options})


def test_tokens_by_hand(evaluate: Evaluate) -> None:
    """Log-ratios 0.1, 0.2, 0.5, -3 with A = 1: the mean of 0.01, 0.04 and 0.25 is above 0.04, that of two is not."""
    log_ratio = torch.tensor([[0.1, 0.2, 0.5, -3.0]]).double()
    batch = Batch(log_ratio - 4, torch.full_like(log_ratio, -4), log_ratio < 1, torch.tensor([1.0]).double())
    found = m2po(evaluate, batch)
    expected = -log_ratio.exp() * torch.tensor([1.0, 1.0, 0.0, 1.0]) / 4 * SHARE  # the mean over all four tokens
    assert torch.allclose(found.grad, expected, rtol=1e-12) and found.metrics["dropped/m2po"] == 0.25
    assert found.loss.item() == pytest.approx(expected.sum().item(), rel=1e-12)
    assert found.metrics["clip_ratio/region_mean"] == 0


@pytest.mark.parametrize("budget", [0.0, 0.02, 0.04])
@pytest.mark.parametrize("per_token", [False, True])
def test_loss_and_gradient_are_the_oracles(evaluate: Evaluate, budget: float, per_token: bool) -> None:
    batch = random_batch(per_token=per_token)
    found = m2po(evaluate, batch, m2po_budget=budget)
    options: dict[str, Any] = {"budget": budget}
    oracle = oracles.m2po(batch.logps, batch.old_logps, batch.mask, batch.advantages, **options)
    keep = oracles.m2po_keep(batch.logps, batch.old_logps, batch.mask, batch.advantages, **options)
    assert 0 < (batch.mask & (keep == 0)).sum() < batch.mask.sum()
    assert torch.allclose(found.grad, SHARE * oracle.grad, rtol=1e-12, atol=1e-15)
    assert found.loss.item() == pytest.approx(SHARE * oracle.loss, rel=1e-12)


def test_with_an_infinite_budget_it_is_cispo_without_a_cap(evaluate: Evaluate) -> None:
    batch = random_batch(per_token=True)
    found = m2po(evaluate, batch, m2po_budget=float("inf"))
    cispo = evaluate(batch, loss_type="cispo", epsilon_high=float("inf"), ours=False)
    assert torch.allclose(found.grad, cispo.grad, rtol=1e-12, atol=1e-15)
    assert found.metrics["dropped/m2po"] == 0


@pytest.mark.parametrize("seed", range(5))
def test_the_mask_keeps_as_many_tokens_as_the_budget_admits(seed: int) -> None:
    generator = torch.manual_seed(seed)
    log_ratio = torch.randn(3, 7, generator=generator).double() * 0.4
    log_ratio[0, :3] = 0.3  # equal ones
    counted = torch.rand(3, 7, generator=generator) < 0.6
    kept = second_moment_mask(log_ratio, counted, budget=0.1)
    squares = (log_ratio**2)[counted].sort().values.tolist()
    most = max((k for k in range(1, len(squares) + 1) if sum(squares[:k]) / k <= 0.1), default=0)
    assert (kept & counted).sum() == most and kept[~counted].all()
    left = log_ratio.abs()[counted & ~kept]
    assert not len(left) or not most or left.min() >= log_ratio.abs()[counted & kept].max()


def test_the_mask_of_bf16_sums_in_float32() -> None:
    log_ratio = (0.25 + 0.02 * torch.randn(1, 20_000, generator=torch.manual_seed(0))).bfloat16()
    masks = [second_moment_mask(each, log_ratio > 0, budget=0.06) for each in (log_ratio, log_ratio.float())]
    assert masks[0].sum() == masks[1].sum()


@pytest.mark.parametrize(("delta", "weight"), [(None, 20.0), (3.0, 3.0)])
def test_one_wrong_log_prob_of_a_sampler_is_not_the_whole_update(
    evaluate: Evaluate, delta: float | None, weight: float
) -> None:
    """The mask does not count the token, because the update moves it back towards the sampler."""
    logps = torch.full((1, 2), -1.0).double()
    sampled = torch.tensor([[-100.0, -1.0]]).double()
    mask = torch.ones(1, 2, dtype=torch.bool)
    found = m2po(evaluate, Batch(logps, sampled, mask, torch.tensor([-1.0]).double()), delta=delta)
    expected = torch.tensor([[weight, 1.0]]).double() / 2 * SHARE
    assert torch.allclose(found.grad, expected, rtol=1e-12)


def test_extremes(evaluate: Evaluate) -> None:
    """No counted token, infinite log-ratios, and a ratio beyond float32 that is dropped or not."""
    zero = torch.zeros(1, 3)
    assert second_moment_mask(zero, zero.bool(), budget=0.0).all()
    infinite = torch.tensor([[float("inf"), 0.1, float("-inf")]])
    assert second_moment_mask(infinite, zero == 0, budget=0.04).tolist() == [[False, True, False]]
    logps, mask = torch.tensor([[100.0, -1.0]]), torch.ones(1, 2, dtype=torch.bool)
    for advantage in (1.0, -1.0):
        found = m2po(evaluate, Batch(logps, torch.full((1, 2), -1.0), mask, torch.tensor([advantage])))
        assert found.loss.isfinite() and found.grad.isfinite().all()
        assert (found.grad[0, 0] == 0) == (advantage > 0)


def test_the_sampler_is_the_engine_where_it_has_a_log_prob(evaluate: Evaluate) -> None:
    batch = random_batch(per_token=True)
    sampler = batch.old_logps - 0.2
    to_engine = m2po(evaluate, batch._replace(old_logps=sampler))
    inputs = {"sampling_per_token_logps": sampler, "importance_sampling_ratio": torch.full_like(sampler, 0.3)}
    found = m2po(evaluate, batch, inputs=inputs, attributes={"use_vllm": True})
    assert torch.equal(found.grad, to_engine.grad) and torch.equal(found.loss, to_engine.loss)
