"""The KL through the trainer: equal to TRL's where TRL's is right, to the oracle where it is not."""

import pytest
import torch
from torch import Tensor

from tests.oracles import corrections as correction_oracles
from tests.oracles import losses as oracles
from tests.tools.batches import TRL_SEQUENCE_LEVEL, Batch, Evaluate, random_batch
from tests.tools.losses import NATIVE_LOSS_TYPES

BETA = 0.5
ENGINE = {"rollout_func": print}  # a source of sampler's log-probs, as far as the constructor can tell


def reference(batch: Batch) -> Tensor:
    noise = torch.randn(batch.logps.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return batch.logps + 0.4 * noise


@pytest.mark.fast_rows(2)
@pytest.mark.parametrize(
    ("loss_type", "training"), [*((loss_type, True) for loss_type in NATIVE_LOSS_TYPES), ("dapo", False)]
)
def test_our_kl_equals_trls_at_token_level(evaluate: Evaluate, loss_type: str, training: bool) -> None:
    """Ours is forced by asking for the sampler's log-probs, which are the old ones here."""
    batch = random_batch()
    inputs = {
        "ref_per_token_logps": reference(batch),
        "sampling_per_token_logps": batch.old_logps,
        "num_items_in_batch": torch.tensor(37),  # of the whole generation batch
    }
    options = {"loss_type": loss_type, "beta": BETA, "inputs": inputs, "training": training}
    options["attributes"] = {"current_gradient_accumulation_steps": 2}  # of 4 in a generation
    ours = evaluate(batch, build=ENGINE, kl_ratio_denominator="sampler", **options)
    theirs = evaluate(batch, ours=False, **options)
    assert ours.loss.item() == pytest.approx(theirs.loss.item(), rel=1e-12)
    assert torch.allclose(ours.grad, theirs.grad, rtol=1e-11, atol=1e-15)
    assert ours.metrics["kl"] == pytest.approx(theirs.metrics["kl"], rel=1e-12)
    without = evaluate(batch, ours=False, **{**options, "beta": 0.0})
    assert not torch.allclose(ours.grad, without.grad, rtol=1e-2)  # there was a KL to compare


@pytest.mark.fast_rows(2)
@pytest.mark.parametrize(
    ("loss_type", "estimator", "denominator"),
    [
        *(("gspo", estimator, denominator) for estimator in ("k1", "k2", "k3") for denominator in ("old", "sampler")),
        *(("gspo_token", "k3", "old"), ("gspo_token", "k1", "sampler")),
        *(("grpo", "k2", "old"), ("grpo", "k3", "sampler")),
    ],
)
def test_each_estimator_and_denominator_is_the_oracles(
    evaluate: Evaluate, loss_type: str, estimator: str, denominator: str
) -> None:
    """The KL alone, as a difference between with and without."""
    batch = random_batch()
    ref_logps, sampler_logps = reference(batch), batch.old_logps - 0.3
    sampler_logps[0, 0] = torch.nan  # a token that the engine could not score
    inputs = {"ref_per_token_logps": ref_logps, "sampling_per_token_logps": sampler_logps}
    options = {"loss_type": loss_type, "build": ENGINE, "inputs": inputs}
    if loss_type == "grpo":
        options["importance_sampling_level"] = "sequence"  # where TRL's is wrong
    settings = {"kl_estimator": estimator, "kl_ratio_denominator": denominator}
    ours, policy = evaluate(batch, beta=BETA, **settings, **options), evaluate(batch, **options)
    below = batch.old_logps
    if denominator == "sampler":
        below = correction_oracles.sampler_or_old(sampler_logps, batch.old_logps, batch.mask)
    term = getattr(correction_oracles, f"corrected_{estimator}")(batch.logps, below, ref_logps, batch.mask)
    assert (ours.loss - policy.loss).item() == pytest.approx(BETA * term.loss, rel=1e-11)
    assert torch.allclose(ours.grad - policy.grad, BETA * term.grad, rtol=1e-10, atol=1e-14)
    theirs = evaluate(batch, beta=BETA, **{**TRL_SEQUENCE_LEVEL, "inputs": inputs})
    assert not torch.allclose(ours.grad, theirs.grad, rtol=1e-3)


def test_uncorrected_k2_is_the_oracles(evaluate: Evaluate) -> None:
    batch = random_batch()
    ref_logps = reference(batch)
    options = {"loss_type": "gspo", "inputs": {"ref_per_token_logps": ref_logps}, "use_bias_correction_kl": False}
    ours, policy = evaluate(batch, beta=BETA, kl_estimator="k2", **options), evaluate(batch, **options)
    term = correction_oracles.plain_k2(batch.logps, ref_logps, batch.mask)
    assert (ours.loss - policy.loss).item() == pytest.approx(BETA * term.loss, rel=1e-11)
    assert torch.allclose(ours.grad - policy.grad, BETA * term.grad, rtol=1e-10, atol=1e-14)


def test_trls_uncorrected_kl_is_the_same_under_gspo_token(evaluate: Evaluate) -> None:
    """Its log-probs are shifted for TRL's loss, so the reference's must be too."""
    batch = random_batch()
    inputs = {"ref_per_token_logps": reference(batch)}
    options = {"beta": BETA, "inputs": inputs, "use_bias_correction_kl": False}
    sequence, token = (evaluate(batch, loss_type=name, **options) for name in ("gspo", "gspo_token"))
    assert token.loss.item() == pytest.approx(sequence.loss.item(), rel=1e-11)
    assert torch.allclose(token.grad, sequence.grad, rtol=1e-10, atol=1e-14)


def test_the_kl_is_outside_of_every_mask(evaluate: Evaluate) -> None:
    """All sequences dropped: what is left is the KL, counted over all of them."""
    batch = random_batch()
    ref_logps = reference(batch)
    inputs = {"ref_per_token_logps": ref_logps, "sampling_per_token_logps": batch.old_logps + 9.0}
    term = oracles.corrected_k3(batch.logps, batch.old_logps, ref_logps, batch.mask)
    for loss_type in ("gspo", "grpo"):
        options = {"loss_type": loss_type, "build": ENGINE, "geometric_mask_range": (0.9, 1.1)}
        outcome = evaluate(batch, beta=BETA, inputs=inputs, **options)
        assert outcome.metrics["dropped/geometric"] == 1
        assert outcome.loss.item() == pytest.approx(BETA * term.loss, rel=1e-12)
        assert torch.allclose(outcome.grad, BETA * term.grad, rtol=1e-11, atol=1e-15)


def test_the_ratio_of_the_kl_is_not_clipped(evaluate: Evaluate) -> None:
    """A single token with ratio e², far outside of the clip range and of `delta`."""
    old_logps = torch.full((1, 1), -3.0, dtype=torch.float64)
    batch = Batch(old_logps + 2, old_logps, torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, dtype=torch.float64))
    inputs = {"ref_per_token_logps": old_logps + 1}
    outcome = evaluate(batch, beta=1.0, inputs=inputs, loss_type="gspo", delta=2.0, kl_estimator="k3")
    assert outcome.grad.item() == pytest.approx(torch.tensor(2.0, dtype=torch.float64).exp().item())  # e² · k1, k1 = 1
