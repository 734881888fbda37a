"""DPPO through TRL's loss for everything but its policy term and its masks."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import trl_steady
from tests.oracles import trust_regions as oracles
from tests.tools import tiny
from tests.tools.batches import Batch, Evaluate, Outcome, random_batch
from trl_steady.functional.masks import binary_divergence

RANGE = {"epsilon": 0.05, "epsilon_high": 0.06}  # probabilities: drops some of the random batch


def dppo(evaluate: Evaluate, batch: Batch, **options: Any) -> Outcome:
    return evaluate(batch, loss_type="dppo", **{**RANGE, "max_completion_length": 10, **options})


def from_probabilities(policy: list[float], sampler: list[float], advantages: list[float]) -> Batch:
    """One sequence of a token for each probability."""
    logps, old_logps = (torch.tensor([each], dtype=torch.float64).log() for each in (policy, sampler))
    mask = torch.ones(1, len(policy), dtype=torch.bool)
    return Batch(logps, old_logps, mask, torch.tensor([advantages], dtype=torch.float64))


# π, μ, A, and the token's term of the loss with its gradient: -min(π/μ, 20) · A, or 0 if it is dropped
BY_HAND = {
    "tv": [
        (0.60, 0.50, 1.0, -1.2),
        (0.80, 0.50, 1.0, 0.0),  # 0.3 up
        (0.20, 0.50, 1.0, -0.4),  # 0.3 down, back toward where the advantage points
        (0.75, 0.99, -1.0, 0.0),  # 0.24 down, within a clip range of 0.25
        (0.80, 0.99, -1.0, 0.8 / 0.99),
        (0.01, 1e-4, 2.0, -40.0),  # a ratio of 100, of little probability
        (0.80, 0.50, 0.0, 0.0),
    ],
    "kl": [
        (0.60, 0.50, 1.0, -1.2),  # 0.020 nats
        (0.70, 0.50, 1.0, 0.0),  # 0.087
        (0.30, 0.50, 1.0, -0.6),
        (0.80, 0.99, -1.0, 0.0),  # 0.181
        (0.80, 0.99, 1.0, -0.8 / 0.99),
    ],
}


@pytest.mark.parametrize("kind", BY_HAND)
def test_tokens_by_hand(evaluate: Evaluate, kind: str) -> None:
    *given, terms = zip(*BY_HAND[kind], strict=True)
    options: dict[str, Any] = {"dppo_divergence": kind, "epsilon": None, "epsilon_high": None}
    found = dppo(evaluate, from_probabilities(*map(list, given)), **options)
    expected = torch.tensor([terms], dtype=torch.float64) / 10
    assert torch.allclose(found.grad, expected, rtol=1e-12)
    assert found.loss.item() == pytest.approx(expected.sum().item(), rel=1e-12)
    dropped = {"low": 1, "high": 1}
    for side, count in dropped.items():
        assert found.metrics[f"dropped/dppo_{side}"] == pytest.approx(count / len(terms))
        assert found.metrics[f"clip_ratio/{side}_mean"] == 0


def test_the_kl_of_float32_is_finite_where_a_token_is_certain() -> None:
    logps, sampled = torch.tensor([[0.0, -1e-6, 0.0, -1.0, -90.0]]), torch.tensor([[-1e-6, 0.0, 0.0, 0.0, 0.0]])
    found = binary_divergence(logps, sampled, kind="kl")
    assert torch.allclose(found, torch.tensor([[3.6e-6, -1e-6, 0.0, -1.0, -90.0]]), rtol=0.1, atol=1e-7)


@pytest.mark.parametrize("largest", [math.inf, 1.5])
def test_with_an_infinite_range_it_is_the_truncated_policy_gradient(evaluate: Evaluate, largest: float) -> None:
    """That is CISPO, which TRL has, but for the number by which the sum over tokens is divided."""
    batch = random_batch(per_token=True)
    found = dppo(evaluate, batch, epsilon=math.inf, epsilon_high=math.inf, delta=largest)
    cispo = evaluate(batch, loss_type="cispo", epsilon_high=largest, ours=False)
    scale = batch.mask.sum().item() / 4 / (len(batch.mask) * 10)  # TRL takes the micro-batch for the first of four
    assert torch.allclose(found.grad, cispo.grad * scale, rtol=1e-12, atol=1e-15)
    ratio = (batch.logps - batch.old_logps).exp()
    assert (ratio[batch.mask] > 1.5).any()
    value = -(ratio.clamp(max=largest) * batch.advantages * batch.mask).sum() / (len(batch.mask) * 10)
    assert found.loss.item() == pytest.approx(value.item(), rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "shape", "delta"),
    [("tv", (6, 5), None), ("kl", (6, 5), 1.2), ("tv", (5, 5), 1.2), ("kl", (6, 1), None), ("tv", (1, 1), None)],
)
def test_loss_and_gradient_are_the_oracles(
    evaluate: Evaluate, kind: str, shape: tuple[int, int], delta: float | None
) -> None:
    """Whose mean over each sequence becomes a sum, with the longest possible length as the divisor."""
    batch = random_batch(*shape, per_token=True)
    limits: dict[str, Any] = {"low": 0.05, "high": 0.06} if kind == "tv" else {"low": 0.01, "high": 0.02}
    sampler = batch.old_logps - 0.1
    inputs = {"sampling_per_token_logps": sampler}
    options: dict[str, Any] = {"epsilon": limits["low"], "epsilon_high": limits["high"], "dppo_divergence": kind}
    found = dppo(evaluate, batch, inputs=inputs, delta=delta, **options)
    given = batch.logps, sampler, batch.mask, batch.advantages
    oracle = oracles.dppo(*given, **limits, divergence=kind, truncate=delta or 20.0)
    lengths = batch.mask.sum(1, keepdim=True)
    assert torch.allclose(found.grad, oracle.grad * lengths / 10, rtol=1e-12, atol=1e-15)
    assert found.loss.item() == pytest.approx(found.grad.sum().item(), rel=1e-12)  # d exp(x) is exp(x)
    if shape == (6, 5):
        dropped = (found.grad == 0) & batch.mask
        for side, own in (("low", batch.advantages < 0), ("high", batch.advantages > 0)):
            share = (dropped & own).sum().item() / batch.mask.sum().item()
            assert found.metrics[f"dropped/dppo_{side}"] == pytest.approx(share) and share


def test_the_sampler_is_the_engine_where_it_has_a_log_prob(evaluate: Evaluate) -> None:
    """The ratio is to the engine, and the weights of an engine are not read."""
    batch = random_batch(per_token=True)
    sampler = batch.old_logps - 0.2
    to_engine = dppo(evaluate, batch._replace(old_logps=sampler))
    inputs: dict[str, Tensor] = {"sampling_per_token_logps": sampler}
    found = dppo(evaluate, batch, inputs=inputs)
    assert torch.equal(found.grad, to_engine.grad) and torch.equal(found.loss, to_engine.loss)
    inputs["importance_sampling_ratio"] = torch.full_like(sampler, 0.3)
    weighted = dppo(evaluate, batch, inputs=inputs, attributes={"use_vllm": True})
    assert torch.equal(weighted.grad, to_engine.grad)
    inputs["sampling_per_token_logps"] = sampler.where(torch.arange(5) > 0, torch.nan)
    unscored = dppo(evaluate, batch, inputs=inputs)
    plain = dppo(evaluate, batch)
    assert torch.equal(unscored.grad[:, 0], plain.grad[:, 0]) and torch.equal(unscored.grad[:, 1:], found.grad[:, 1:])


def test_masks_of_sequences_and_the_entropy_quantile_act_too(evaluate: Evaluate) -> None:
    batch = random_batch()
    plain = dppo(evaluate, batch)
    entropies = torch.rand(batch.logps.shape, generator=torch.manual_seed(0), dtype=torch.float64)
    high = entropies >= entropies[batch.mask].quantile(0.5)
    limited = dppo(evaluate, batch, entropies=entropies, top_entropy_quantile=0.5)
    assert torch.equal(limited.grad, plain.grad * high)
    moved = ((batch.old_logps - batch.logps) * batch.mask).sum(1) / batch.mask.sum(1).clamp(min=1)
    keep = ~((batch.advantages < 0) & (moved > 0.2))
    assert 0 < keep.sum() < len(keep)
    masked = dppo(evaluate, batch, off_policy_mask_threshold=0.2)
    assert torch.equal(masked.grad, plain.grad * keep[:, None])


def test_the_defaults_are_the_papers(tmp_path: Path) -> None:
    """The largest divergence is that of appendix E. TRL would weigh by a second ratio to the engine."""
    options: dict[str, Any] = {"loss_type": "dppo", "use_vllm": True}
    args = tiny.arguments(trl_steady.GRPOConfig, tmp_path, **options)
    assert (args.epsilon, args.epsilon_high, args.importance_sampling_level) == (0.2, None, "token")
    assert not args.vllm_importance_sampling_correction
    assert tiny.arguments(trl_steady.GRPOConfig, tmp_path, use_vllm=True).vllm_importance_sampling_correction
    by_kl = tiny.arguments(trl_steady.GRPOConfig, tmp_path, dppo_divergence="kl", **options)
    assert (by_kl.epsilon, by_kl.epsilon_high) == (0.05, None)  # None: the same
    assert tiny.arguments(trl_steady.PPOConfig, tmp_path, num_generations=1, **options).epsilon == 0.2


def test_a_ratio_beyond_float32_is_truncated_and_not_nan(evaluate: Evaluate) -> None:
    batch = random_batch()
    logps = batch.logps.clone()
    logps[1, 0] = batch.old_logps[1, 0] + 200
    far = Batch(logps.float(), batch.old_logps.float(), batch.mask, batch.advantages.abs().float())
    for advantages in (far.advantages, -far.advantages):
        found = dppo(evaluate, far._replace(advantages=advantages), epsilon_high=math.inf)
        assert found.loss.isfinite() and found.grad.isfinite().all() and found.grad[1, 0] != 0


@pytest.mark.parametrize("loss_type", ["dppo", "m2po"])
def test_an_infinite_log_prob_of_the_engine_is_one_that_it_could_not_score(evaluate: Evaluate, loss_type: str) -> None:
    batch = random_batch(per_token=True)
    found = []
    for unscored in (torch.nan, -torch.inf):
        sampler = (batch.old_logps - 0.2).where(torch.arange(5) != 1, unscored)
        inputs = {"sampling_per_token_logps": sampler}
        options = {"loss_type": loss_type, "sampler_penalty": 0.1, "max_completion_length": 10}
        found.append(evaluate(batch, inputs=inputs, **options))
    assert torch.equal(found[0].grad, found[1].grad) and found[0].grad.isfinite().all()
    assert torch.equal(found[0].loss, found[1].loss)
    assert found[0].metrics == pytest.approx(found[1].metrics) and all(map(math.isfinite, found[0].metrics.values()))


@pytest.mark.parametrize("loss_type", ["dppo", "gmpo", "m2po"])
def test_a_token_of_probability_zero_is_finite(evaluate: Evaluate, loss_type: str) -> None:
    """As in TRL's losses, which get a ratio of 0."""
    batch = from_probabilities([0.5, 0.0], [0.5, 0.1], [1.0, 1.0])._replace(advantages=torch.ones(1).double())
    found = evaluate(batch, loss_type=loss_type, max_completion_length=10)
    assert found.loss.isfinite() and found.grad.isfinite().all() and found.grad[0, 1] == 0
