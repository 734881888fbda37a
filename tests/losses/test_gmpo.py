"""GMPO through TRL's loss for everything but its policy term, against an oracle that multiplies as the paper does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import trl_steady
from tests.oracles import gmpo as gmpo_oracle
from tests.tools import tiny
from tests.tools.batches import Batch, Evaluate, Outcome, random_batch

CLIP = {"epsilon": 0.2, "epsilon_high": 0.3}
BOUNDS = {"low": 0.2, "high": 0.3}
CASES = [((6, 5), None), ((6, 5), 1.4), ((5, 5), 1.4), ((6, 1), None), ((1, 1), 1.4), ((2, 7), None)]


def gmpo(evaluate: Evaluate, batch: Batch, **options: Any) -> Outcome:
    return evaluate(batch, loss_type="gmpo", **{**CLIP, **options})


def is_oracle(found: Outcome, oracle: Any) -> bool:
    """To 1e-12, of products and roots in float64."""
    same = found.loss.item() == pytest.approx(oracle.loss, rel=1e-12, abs=1e-15)
    return same and torch.allclose(found.grad, oracle.grad, rtol=1e-12, atol=1e-15)


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(("shape", "delta"), CASES)
def test_loss_gradient_and_clip_metrics_are_the_oracles(
    evaluate: Evaluate, shape: tuple[int, int], delta: float | None
) -> None:
    batch = random_batch(*shape)
    if delta is not None:  # it acts on negative advantages
        batch = batch._replace(advantages=-batch.advantages)
    found = gmpo(evaluate, batch, delta=delta)
    assert is_oracle(found, gmpo_oracle.gmpo(*batch_of(batch), **BOUNDS, delta=delta))
    low, high = gmpo_oracle.clipped_share(*batch_of(batch), **BOUNDS)
    if shape[1] > 1:  # at T = 1 TRL counts rows, the empty one too
        assert found.metrics["clip_ratio/low_mean"] == pytest.approx(low)
        assert found.metrics["clip_ratio/high_mean"] == pytest.approx(high)
    if shape == (6, 5):  # a test of clipping that never clips shows nothing
        assert low > 0 and (high > 0 or delta is not None)
        assert delta is None or not is_oracle(found, gmpo_oracle.gmpo(*batch_of(batch), **BOUNDS))


def batch_of(batch: Batch) -> tuple[Tensor, ...]:
    return batch.logps, batch.old_logps, batch.advantages, batch.mask


def test_entropy_kl_weights_and_masks_of_trl_act_under_gmpo(evaluate: Evaluate) -> None:
    """Each option changes the loss by what it adds in the oracle, or in TRL's loss of tokens."""
    batch = random_batch()
    plain = gmpo(evaluate, batch)
    entropies = torch.rand(batch.logps.shape, generator=torch.manual_seed(0), dtype=torch.float64)

    # the entropy bonus: coefficient times the mean entropy of the loss tokens
    bonus = gmpo(evaluate, batch, entropies=entropies, entropy_coef=0.01)
    assert (plain.loss - bonus.loss).item() == pytest.approx(0.01 * entropies[batch.mask].mean().item(), rel=1e-12)

    # TRL's own KL, with its ratio per token: the same change as under GRPO
    inputs = {"ref_per_token_logps": batch.old_logps - 0.3}
    options: dict[str, Any] = {"beta": 0.1, "use_bias_correction_kl": True, "inputs": inputs}
    with_kl = gmpo(evaluate, batch, **options)
    grpo = [evaluate(batch, loss_type="grpo", ours=False, **given) for given in ({}, options)]
    assert (with_kl.loss - plain.loss).item() == pytest.approx((grpo[1].loss - grpo[0].loss).item(), rel=1e-11)
    assert torch.allclose(with_kl.grad - plain.grad, grpo[1].grad - grpo[0].grad, rtol=1e-9, atol=1e-14)
    assert with_kl.metrics["kl"] == pytest.approx(grpo[1].metrics["kl"], rel=1e-12)

    # weights of an engine
    for shape in (batch.logps.shape, (len(batch.logps), 1)):
        weights = 0.5 + torch.rand(shape, generator=torch.manual_seed(1), dtype=torch.float64)
        inputs = {"importance_sampling_ratio": weights, "sampling_per_token_logps": batch.old_logps}
        weighted = gmpo(evaluate, batch, inputs=inputs, attributes={"use_vllm": True})
        assert is_oracle(weighted, gmpo_oracle.gmpo(*batch_of(batch), **BOUNDS, weights=weights))
        assert weighted.loss.item() != pytest.approx(plain.loss.item(), rel=1e-3)

    # the off-policy mask, decided by hand: a negative advantage, and less likely by more than 0.2 nats a token
    drop = [
        bool(advantage < 0 and (old - new)[mask].mean() > 0.2)
        for new, old, advantage, mask in zip(*batch_of(batch), strict=True)
    ]
    keep = ~torch.tensor(drop)
    assert 0 < keep.sum() < len(keep)
    masked = gmpo(evaluate, batch, off_policy_mask_threshold=0.2)
    assert is_oracle(masked, gmpo_oracle.gmpo(*batch_of(batch), **BOUNDS, keep=keep.double()))


def test_the_entropy_quantile_limits_which_tokens_get_a_gradient(evaluate: Evaluate) -> None:
    """The geometric mean is over these tokens only."""
    batch = random_batch()
    entropies = torch.rand(batch.logps.shape, generator=torch.manual_seed(0), dtype=torch.float64)
    entropies[:, 0] = 2  # each sequence has a token of high entropy
    found = gmpo(evaluate, batch, entropies=entropies, top_entropy_quantile=0.5)
    mask = batch.mask & (entropies >= entropies[batch.mask].quantile(0.5))
    assert is_oracle(found, gmpo_oracle.gmpo(batch.logps, batch.old_logps, batch.advantages, mask, **BOUNDS))
    assert (found.grad[batch.mask & ~mask] == 0).all() and (found.grad[mask] != 0).any()


def test_the_defaults_are_the_papers(tmp_path: Path) -> None:
    args = tiny.arguments(trl_steady.GRPOConfig, tmp_path, loss_type="gmpo")
    assert (args.epsilon, args.epsilon_high, args.importance_sampling_level) == (0.4, 0.4, "token")


def test_a_ratio_beyond_float32_is_clipped_and_not_nan(evaluate: Evaluate) -> None:
    """TRL's own policy term would be infinite, and 0 times infinity is NaN."""
    batch = random_batch()
    logps = batch.logps.clone()
    logps[1, 0], logps[2, 1] = batch.old_logps[1, 0] + 200, batch.old_logps[2, 1] + 200
    far = Batch(logps.float(), batch.old_logps.float(), batch.mask, -batch.advantages.abs().float())
    near = far._replace(logps=logps.float(), advantages=batch.advantages.abs().float())
    found = gmpo(evaluate, near)
    assert found.loss.isfinite() and found.grad.isfinite().all() and found.grad[1, 0] == 0
    assert gmpo(evaluate, far, delta=5.0).grad.isfinite().all()
