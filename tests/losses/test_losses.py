"""gspo and gspo_token through TRL's own loss, against TRL's sequence level and the oracle in `oracles/losses.py`."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.oracles import losses as oracles
from tests.tools.batches import HIGH, LOW, TRL_SEQUENCE_LEVEL, Batch, Evaluate, Outcome, random_batch
from trl_steady.core.types import MicroBatch
from trl_steady.losses import gspo_token

# B == T and T == 1 among them
CASES = [((6, 5), None), ((6, 5), 1.4), ((5, 5), 1.4), ((6, 1), None), ((1, 1), 1.4), ((2, 7), None)]


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(("shape", "delta"), CASES)
def test_gspo_is_trls_sequence_level_and_the_oracles(evaluate: Evaluate, shape: tuple[int, int], delta: float) -> None:
    def clip_metrics(outcome: Outcome) -> dict[str, float]:
        return {k: v for k, v in outcome.metrics.items() if k.startswith("clip_ratio")}

    batch = random_batch(*shape)
    ours, theirs = evaluate(batch, loss_type="gspo", delta=delta), evaluate(batch, delta=delta, **TRL_SEQUENCE_LEVEL)
    assert torch.equal(ours.loss, theirs.loss)
    assert torch.equal(ours.grad, theirs.grad)
    assert clip_metrics(ours) == pytest.approx(clip_metrics(theirs), nan_ok=True) and len(clip_metrics(ours)) == 5
    oracle = oracles.gspo(*batch, eps_low=LOW, eps_high=HIGH, delta=delta)
    assert ours.loss.item() == pytest.approx(oracle.loss, rel=1e-12, abs=1e-15)
    assert torch.allclose(ours.grad, oracle.grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(("shape", "delta"), CASES)
def test_gspo_token_with_advantages_per_token_is_the_oracles(
    evaluate: Evaluate, shape: tuple[int, int], delta: float
) -> None:
    batch = random_batch(*shape, per_token=True)
    ours = evaluate(batch, loss_type="gspo_token", delta=delta)
    oracle = oracles.gspo_token(*batch, eps_low=LOW, eps_high=HIGH, delta=delta)
    assert ours.loss.item() == pytest.approx(oracle.loss, rel=1e-12, abs=1e-15)
    assert torch.allclose(ours.grad, oracle.grad, rtol=1e-12, atol=1e-15)
    if shape[1] > 1:  # at T = 1 TRL counts rows, the empty one too
        shares = oracles.gspo_token_clip_shares(*batch, eps_low=LOW, eps_high=HIGH)
        names = ("low_mean", "high_mean", "region_mean")
        assert [ours.metrics[f"clip_ratio/{name}"] for name in names] == pytest.approx(shares)
    # a test of clipping that never clips shows nothing
    if shape == (6, 5) and delta is None:
        assert (ours.grad[batch.mask] == 0).any() and (ours.grad[batch.mask] != 0).any()
        plain_grpo = oracles.grpo_token(*batch, eps_low=LOW, eps_high=HIGH)
        assert not torch.allclose(ours.grad, plain_grpo.grad, rtol=1e-3)


def test_the_ratio_that_trl_forms_under_gspo_token_is_bit_equal_to_the_sequences_in_float32() -> None:
    generator = torch.Generator().manual_seed(1)
    logps = -20 * torch.rand(64, 33, generator=generator)
    old_logps = logps + 1e-3 * torch.randn(64, 33, generator=generator)
    batch = MicroBatch(torch.ones(64, 33) > 0, logps, logps, None, torch.ones(64), old_logps)
    rewritten, log_s = gspo_token(batch), batch.sequence_log_ratio
    assert torch.equal(rewritten.logps - rewritten.old_logps, log_s.expand(64, 33))
    # negative control: the same on paper, with log π left in place
    assert not torch.equal(logps - (logps - log_s), log_s.expand(64, 33))


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(
    ("shape", "loss_type", "garbage"),
    [
        ((6, 5), "gspo", torch.nan),
        ((6, 5), "gspo_token", torch.inf),
        ((6, 1), "gspo_token", 1e4),
        ((6, 5), "gmpo", torch.nan),
        ((6, 5), "dppo", torch.inf),
    ],
)
def test_garbage_under_the_mask_changes_nothing(
    evaluate: Evaluate, shape: tuple[int, int], loss_type: str, garbage: float
) -> None:
    """Everything that comes per token: log-probs of all four policies, advantages, engine weights, entropies."""
    batch = random_batch(*shape, per_token=loss_type in ("gspo_token", "dppo"))
    ref_logps, sampler_logps = batch.old_logps - 0.1, batch.old_logps + 0.1

    def outcome(spoil: Callable[[Tensor], Tensor]) -> Outcome:
        spoiled = Batch(
            *(spoil(value) if value.shape == shape and value.is_floating_point() else value for value in batch)
        )
        inputs = {
            "ref_per_token_logps": spoil(ref_logps),
            "sampling_per_token_logps": spoil(sampler_logps),
            "importance_sampling_ratio": spoil(torch.full(shape, 0.9, dtype=torch.float64)),
        }
        return evaluate(
            spoiled,
            loss_type=loss_type,
            inputs=inputs,
            entropies=spoil(torch.linspace(0.1, 2, shape[0] * shape[1]).view(shape).double()),
            beta=0.1,
            sampler_penalty=0.1,
            off_policy_mask_threshold=0.05,
            top_entropy_quantile=0.9,
            entropy_coef=0.01,
            attributes={"use_vllm": True},
        )

    clean, dirty = outcome(lambda x: x), outcome(lambda x: x.masked_fill(~batch.mask, garbage))
    assert torch.equal(dirty.loss, clean.loss) and clean.loss.isfinite()
    assert torch.equal(dirty.grad, clean.grad) and clean.grad.isfinite().all()
    assert dirty.metrics == pytest.approx(clean.metrics, nan_ok=True)
    assert (clean.grad[~batch.mask] == 0).all()


@pytest.mark.parametrize(("loss_type", "weights"), [("gspo", (6, 5)), ("gspo_token", (6, 1)), ("gspo_token", (6, 5))])
def test_engine_weights_multiply_the_policy_term(evaluate: Evaluate, loss_type: str, weights: tuple[int, int]) -> None:
    batch = random_batch()
    ratio = torch.rand(weights, generator=torch.Generator().manual_seed(5)).double()
    options = {"inputs": {"importance_sampling_ratio": ratio}, "attributes": {"use_vllm": True}}
    ours, theirs = evaluate(batch, loss_type=loss_type, **options), evaluate(batch, **options, **TRL_SEQUENCE_LEVEL)
    assert ours.loss.item() == pytest.approx(theirs.loss.item(), rel=1e-12)
    if loss_type == "gspo" or weights == (6, 1):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-12, atol=1e-15)
    else:  # each token its own weight, as each token has its own advantage
        plain = oracles.gspo_token(*batch, eps_low=LOW, eps_high=HIGH)
        assert torch.allclose(ours.grad, plain.grad * ratio, rtol=1e-12, atol=1e-15)


def test_entropy_quantile_keeps_the_gradient_of_high_entropy_tokens_under_gspo_token(evaluate: Evaluate) -> None:
    batch = random_batch()
    entropies = torch.rand(batch.mask.shape, generator=torch.Generator().manual_seed(6)).double()
    ours = evaluate(batch, loss_type="gspo_token", entropies=entropies, top_entropy_quantile=0.5)
    kept = (entropies >= torch.quantile(entropies[batch.mask].float(), 0.5)) & batch.mask
    plain = oracles.gspo_token(*batch, eps_low=LOW, eps_high=HIGH)
    assert torch.allclose(ours.grad, plain.grad * kept, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("loss_type", ["gspo", "gmpo"])
def test_advantages_of_tokens_are_refused_under_ratios_of_sequences(evaluate: Evaluate, loss_type: str) -> None:
    with pytest.raises(ValueError, match=rf"\(5, 5\).*{loss_type}.*gspo_token"):
        evaluate(random_batch(5, 5, per_token=True), loss_type=loss_type)


def test_metrics_of_the_sequence_ratio(evaluate: Evaluate) -> None:
    batch = random_batch()
    outcome = evaluate(batch, loss_type="gspo")
    ratios = [((a - b)[m].mean()).exp().item() for a, b, m in zip(*batch[:3], strict=True) if m.any()]
    assert outcome.metrics["ratio/sequence_min"] == pytest.approx(min(ratios))
    assert outcome.metrics["ratio/sequence_mean"] == pytest.approx(sum(ratios) / len(ratios))
    assert outcome.metrics["ratio/sequence_max"] == pytest.approx(max(ratios))
