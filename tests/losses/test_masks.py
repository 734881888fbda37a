"""The masks through the trainer: which sequences they drop, and that dropping is all they do."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import trl_steady
from tests.oracles import corrections as correction_oracles
from tests.oracles import losses as oracles
from tests.tools import tiny
from tests.tools.batches import Batch, Evaluate, random_batch
from tests.tools.losses import NATIVE_LOSS_TYPES

ENGINE = {"rollout_func": print}  # a source of sampler's log-probs, as far as the constructor can tell
DELTA = 0.5


def one(advantage: float | list[float], statistic: float) -> Batch:
    """Two answers of two tokens; the first has a mean log(old / policy) of `statistic`."""
    old_logps = torch.full((2, 2), -1.0, dtype=torch.float64)
    logps = old_logps - torch.tensor([[statistic + 0.25, statistic - 0.25], [0.0, 0.0]], dtype=torch.float64)
    advantages = torch.tensor([[*advantage], [1.0, 1.0]] if isinstance(advantage, list) else [advantage, 1.0])
    return Batch(logps, old_logps, torch.ones(2, 2, dtype=torch.bool), advantages.double())


@pytest.mark.parametrize(("level", "loss_type"), [("sequence", "gspo"), ("token", "gspo_token")])
@pytest.mark.parametrize(  # below, at and above delta, exact in binary
    ("advantage", "statistic"), [(-1.0, -0.75), (-1.0, 0.5), (-1.0, 0.75), (0.0, 0.75), (1.0, 0.75)]
)
def test_only_far_sequences_with_a_negative_advantage_are_dropped(
    evaluate: Evaluate, advantage: float, statistic: float, level: str, loss_type: str
) -> None:
    batch = one(advantage, statistic)
    options = {"loss_type": loss_type, "epsilon": 0.9, "epsilon_high": 9.0}
    masked = evaluate(batch, off_policy_mask_threshold=DELTA, off_policy_mask_level=level, **options)
    free = evaluate(batch, **options)
    drops = advantage < 0 and statistic > DELTA
    assert (masked.grad[0] == 0).all() == (drops or advantage == 0)
    assert torch.equal(masked.grad[0], torch.zeros(2).double() if drops else free.grad[0])
    assert torch.equal(masked.grad[1], free.grad[1])  # divided by two answers as ever
    assert masked.metrics["dropped/off_policy"] == 0.5 * drops


def sampled(batch: Batch) -> Tensor:
    """An engine that disagrees with the trainer, by sequence and by token, and leaves one token unscored."""
    generator = torch.Generator().manual_seed(4)
    spread = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    sampler_logps = batch.old_logps + 0.4 * spread(len(batch.mask), 1) + 0.2 * spread(*batch.mask.shape)
    sampler_logps[1, 0] = torch.nan
    return sampler_logps


MASKS: dict[str, dict[str, Any]] = {
    "off_policy by sequence": {"off_policy_mask_threshold": 0.1},
    "off_policy by token": {"off_policy_mask_threshold": 0.1, "off_policy_mask_level": "token"},
    "geometric": {"geometric_mask_range": (0.8, 1.25)},
    "veto": {"token_veto_threshold": 0.75},
}


def oracle_keep(name: str, batch: Batch, sampler_logps: Tensor) -> Tensor:
    if name == "geometric":
        return correction_oracles.geometric(batch.old_logps, sampler_logps, batch.mask, 0.8, 1.25)
    if name == "veto":
        return correction_oracles.veto(batch.old_logps, sampler_logps, batch.mask, 0.75)
    by = correction_oracles.off_policy_token if "token" in name else correction_oracles.off_policy_sequence
    return by(batch.advantages, batch.logps, sampler_logps, batch.mask, 0.1)


@pytest.mark.parametrize(
    ("loss_type", "name"),
    [*(("gspo_token", name) for name in MASKS), *(("gspo", name) for name in MASKS), ("grpo", "off_policy by token")],
)
def test_loss_and_gradient_are_the_oracles(evaluate: Evaluate, loss_type: str, name: str) -> None:
    per_token = loss_type != "gspo"
    batch = random_batch(12, 6, per_token=per_token)
    sampler_logps = sampled(batch)
    inputs = {"sampling_per_token_logps": sampler_logps}
    # wide clips, which would silence what the mask drops
    wide = {"epsilon": 0.9, "epsilon_high": 5.0}
    outcome = evaluate(batch, loss_type=loss_type, build=ENGINE, inputs=inputs, **MASKS[name], **wide)
    keep = oracle_keep(name, batch, sampler_logps)
    assert 0 < keep[batch.mask].mean() < 1
    of_loss = {"grpo": oracles.grpo_token, "gspo": oracles.gspo, "gspo_token": oracles.gspo_token}[loss_type]
    rows = keep if per_token else correction_oracles.rows(keep, batch.mask)
    oracle = of_loss(*batch, keep=rows, eps_low=0.9, eps_high=5.0)
    assert outcome.loss.item() == pytest.approx(oracle.loss, rel=1e-12)
    assert torch.allclose(outcome.grad, oracle.grad, rtol=1e-11, atol=1e-15)
    counted = keep[batch.mask] if name.endswith("token") else correction_oracles.rows(keep, batch.mask)[:-1]
    dropped = outcome.metrics[f"dropped/{name.split()[0]}"]
    if per_token or not name.endswith("token"):  # at one advantage a sequence, levels are the same
        assert dropped == pytest.approx(1 - counted.mean().item())


def test_masks_multiply(evaluate: Evaluate) -> None:
    batch = random_batch(12, 6)
    sampler_logps = sampled(batch)
    options = {"loss_type": "gspo", "build": ENGINE, "inputs": {"sampling_per_token_logps": sampler_logps}}
    options |= {"epsilon": 0.9, "epsilon_high": 5.0}
    free = evaluate(batch, **options)
    chosen = ("off_policy by sequence", "geometric", "veto")
    together = evaluate(batch, **options, **{k: v for name in chosen for k, v in MASKS[name].items()})
    keep = math.prod(oracle_keep(name, batch, sampler_logps) for name in chosen)
    assert torch.allclose(together.grad, free.grad * keep, rtol=1e-12, atol=1e-15)
    assert len({float(oracle_keep(name, batch, sampler_logps).sum()) for name in chosen}) == 3


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("loss_type", ["gspo_token", "vespo", "dr_grpo"])
def test_an_infinite_threshold_is_off_bit_for_bit(models: dict[str, Path], tmp_path: Path, loss_type: str) -> None:
    """And with it on, TRL's losses run through ours: TRL's parameters and metrics, and only more of the latter."""
    options = {"loss_type": loss_type, "beta": 0.04, "gradient_accumulation_steps": 2, "num_iterations": 2}
    native = loss_type in NATIVE_LOSS_TYPES
    off = tiny.train(tiny.trainer(models["moe"], tmp_path, ours=not native, padded=True, **options))
    on = tiny.train(tiny.trainer(models["moe"], tmp_path, padded=True, off_policy_mask_threshold=math.inf, **options))
    expected, after = tiny.parameters(off), tiny.parameters(on)
    assert all(torch.equal(after[name], expected[name]) for name in expected)
    for row, ours in zip(tiny.history(off), tiny.history(on), strict=True):
        assert {name: ours[name] for name in row} == row
        assert all(ours[name] == 0 for name in ours if name.startswith("dropped"))


@pytest.mark.parametrize(
    ("attribute", "value"),
    [("importance_sampling_level", "sequence"), ("loss_type", "bnpo"), ("off_policy_mask_threshold", 0.0)],
)
def test_what_a_callback_sets_on_the_trainer_is_honoured(evaluate: Evaluate, attribute: str, value: Any) -> None:
    """TRL reads these from the trainer, so that they can be annealed."""
    batch = random_batch(12, 6)
    options = {"loss_type": "grpo", "off_policy_mask_threshold": math.inf, "epsilon": 0.9}
    options["inputs"] = {"sampling_per_token_logps": sampled(batch)}
    ours, theirs = (evaluate(batch, ours=ours, attributes={attribute: value}, **options) for ours in (True, False))
    assert torch.equal(ours.loss, theirs.loss) and torch.equal(ours.grad, theirs.grad)
    assert not torch.equal(ours.grad, evaluate(batch, **options).grad)


def test_a_subclass_that_masks_in_its_own_way_is_asked(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def drop_all(advantages: Tensor, off_policy_threshold: float, **_: Any) -> Tensor:
        asked.append(off_policy_threshold)
        return torch.zeros(len(advantages), 1)

    subclass = type("Own", (trl_steady.GRPOTrainer,), {"get_off_policy_mask": staticmethod(drop_all)})
    monkeypatch.setattr(trl_steady, "GRPOTrainer", subclass)
    options = {"loss_type": "grpo", "off_policy_mask_threshold": 0.3, "off_policy_mask_level": "token"}
    trained = tiny.train(tiny.trainer(models["dense"], tmp_path, **options))
    assert asked and set(asked) == {0.3}
    assert all(row["grad_norm"] == 0 for row in tiny.history(trained) if "grad_norm" in row)
