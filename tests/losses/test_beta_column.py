"""`beta_column`: the KL of each sequence has the strength that its row of the data set gives."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

import trl_steady
from tests.oracles import corrections as oracles
from tests.tools import tiny
from tests.tools.batches import Evaluate, random_batch
from tests.tools.losses import NATIVE_LOSS_TYPES
from tests.trainers.tools import by_prompt
from trl_steady.trl_bridge.rollout import generate_outside_training

BETA = 0.5
FACTORS = torch.tensor([3.0, 0.0, 3.0, 0.0, 3.0, 0.0])  # whose mean is not 1
INF, NAN = float("inf"), float("nan")


def dataset(factors: list[Any]) -> Dataset:
    return tiny.dataset(len(factors)).add_column("strength", factors)


BY_ROW: dict[str, Any] = {"beta_column": "strength", "build": {"train_dataset": dataset([1] * 16)}}


def kl_inputs(batch: Any, factors: torch.Tensor | None = None) -> dict[str, Any]:
    noise = torch.randn(batch.logps.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return {"ref_per_token_logps": batch.logps + 0.4 * noise} | ({} if factors is None else {"beta_factors": factors})


@pytest.mark.fast_rows(2)
@pytest.mark.parametrize(
    ("loss_type", "estimator", "corrected"),
    [
        *(("gspo", "k1", True), ("gspo", "k2", False), ("gspo_token", "k3", True), ("gmpo", "k3", True)),
        *((loss_type, "k3", True) for loss_type in NATIVE_LOSS_TYPES),
        ("grpo", "k2", False),
    ],
)
def test_the_gradient_is_two_runs_combined_by_hand(
    evaluate: Evaluate, loss_type: str, estimator: str, corrected: bool
) -> None:
    """One without a KL, and one with three times the KL, which is TRL's own where TRL has it."""
    batch = random_batch()
    options = {"loss_type": loss_type, "kl_estimator": estimator, "use_bias_correction_kl": corrected}
    by_row = evaluate(batch, beta=BETA, inputs=kl_inputs(batch, FACTORS), **BY_ROW, **options)
    without = evaluate(batch, loss_type=loss_type, inputs=kl_inputs(batch))
    three = evaluate(batch, beta=3 * BETA, inputs=kl_inputs(batch), **options)
    by_hand = torch.where(FACTORS[:, None] == 0, without.grad, three.grad)
    assert torch.allclose(by_row.grad, by_hand, rtol=1e-10, atol=1e-14)
    assert not torch.allclose(without.grad[FACTORS != 0], three.grad[FACTORS != 0], rtol=1e-2)
    assert by_row.metrics["kl"] == pytest.approx(three.metrics["kl"], rel=1e-12)  # of all tokens alike


def test_any_factors_are_the_oracles(evaluate: Evaluate) -> None:
    batch, factors = random_batch(), [0.25, 4.0, 0.0, 1.0, 1.5, 2.0]
    inputs, options = kl_inputs(batch, torch.tensor(factors)), {"loss_type": "gspo", "kl_estimator": "k2"}
    ours = evaluate(batch, beta=BETA, inputs=inputs, **BY_ROW, **options)
    policy = evaluate(batch, inputs=inputs, loss_type="gspo")
    values = batch.logps, batch.old_logps, inputs["ref_per_token_logps"], batch.mask
    term = oracles.by_row(oracles.corrected_k2, factors, *values)
    assert (ours.loss - policy.loss).item() == pytest.approx(BETA * term.loss, rel=1e-10)
    assert torch.allclose(ours.grad - policy.grad, BETA * term.grad, rtol=1e-10, atol=1e-14)


def test_a_factor_of_one_is_no_option_bit_for_bit(models: dict[str, Path], tmp_path: Path) -> None:
    options = {"loss_type": "grpo", "kl_estimator": "k2", "beta": 0.04, **BY_ROW}
    runs = [
        tiny.train(tiny.trainer(models["dense"], tmp_path, **{**options, "beta_column": column}))
        for column in (None, "strength")
    ]
    assert tiny.history(runs[0]) == tiny.history(runs[1])
    first, second = map(tiny.parameters, runs)
    assert all(torch.equal(value, second[name]) for name, value in first.items())


RUNS: dict[str, dict[str, Any]] = {
    "shuffled": {},
    "regrouped": {"token_budget": 40, "gradient_accumulation_steps": 2},
    "other rows": {"dynamic_sampling": True, "reward_funcs": by_prompt},
    "PPO": {"method": "PPO", "num_generations": 1, "kl_coef": 0.0},
}


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("name", RUNS)
def test_each_sequence_has_the_factor_of_its_row(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Also in an evaluation, and after a rollout on rows without factors, which no loss reads."""
    options = {**RUNS[name]}
    rows = dataset([i / 4 for i in range(16)])
    build = {"train_dataset": rows, "eval_dataset": rows.select(range(4))}
    build |= {"reward_funcs": options.pop("reward_funcs", tiny.reward)}
    options |= {"beta": 0.04, "beta_column": "strength", "build": build, "max_steps": 4, "eval_strategy": "steps"}
    trainer = tiny.trainer(models["dense"], tmp_path, eval_steps=2, per_device_eval_batch_size=4, **options)
    generate_outside_training(trainer, [{"prompt": "1+1="}] * 16)
    expected, seen = dict(zip(rows["prompt"], rows["strength"], strict=True)), []
    compute = trainer._compute_loss

    def check(model: Any, inputs: dict[str, Any], *arguments: Any, **keywords: Any) -> Any:
        prompts = tiny.tokenizer().batch_decode(inputs["prompt_ids"], skip_special_tokens=True)
        assert inputs["beta_factors"].tolist() == [expected[prompt] for prompt in prompts]
        seen.extend(prompts)
        return compute(model, inputs, *arguments, **keywords)

    monkeypatch.setattr(trainer, "_compute_loss", check)
    trainer.train()
    assert len({*seen}) > 4


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("value", ["strong", -0.5, NAN, INF, None])
def test_a_value_that_is_no_strength_is_named(models: dict[str, Path], tmp_path: Path, value: Any) -> None:
    values = [str(value)] * 16 if isinstance(value, str) else [1.0] * 12 + [value] * 4
    build = {"train_dataset": dataset(values)}
    trainer = tiny.trainer(models["dense"], tmp_path, beta=0.04, beta_column="strength", build=build)
    message = rf"^beta_column='strength': a row of the data set has {value!r} there\. Give each row a finite number"
    with pytest.raises(ValueError, match=message):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_missing_column_is_named_when_the_trainer_is_built(models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no column 'strength', but prompt\. Set beta_column to one"):
        tiny.trainer(models["dense"], tmp_path, beta=0.04, beta_column="strength")


def test_rloo_has_no_such_option(tmp_path: Path) -> None:
    """Its KL is in TRL's reward."""
    with pytest.raises(TypeError, match="RLOOConfig has no option beta_column"):
        trl_steady.RLOOConfig(str(tmp_path), beta_column="strength")
