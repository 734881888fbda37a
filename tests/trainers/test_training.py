"""Whole training runs with everything else of TRL switched on: `gspo` must be TRL's sequence level, bit for bit."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import trl

import trl_steady.trainers.grpo
from tests.tools import tiny
from tests.tools.cases import cases
from tests.trainers.tools import rollout

# The clip range of a test model that moves far in six steps; TRL's sequence level is given the same.
CLIP = {"epsilon": 5e-3, "epsilon_high": 8e-3}

OPTIONS: dict[str, dict[str, Any]] = {
    "four updates per rollout": {},
    "accumulation, truncated completions masked, batch-scaled rewards": {
        **{"gradient_accumulation_steps": 2, "steps_per_generation": 8, "scale_rewards": "batch"},
        **{"mask_truncated_completions": True, "max_completion_length": 3},
    },
    "iterations, two-sided clip": {"num_iterations": 3, "steps_per_generation": 1, "delta": 1.02},
    "generation batch larger than a window, padding to a multiple, temperature": {
        **{"gradient_accumulation_steps": 3, "steps_per_generation": 4, "pad_to_multiple_of": 8, "temperature": 0.7}
    },
    "entropy quantile and bonus": {"top_entropy_quantile": 0.5, "entropy_coef": 0.05},
    "adaptive entropy": {"use_adaptive_entropy": True, "entropy_target": 5.0, "gradient_accumulation_steps": 2},
    # beyond -log(1 - epsilon) the lower clip has silenced already what the mask drops
    "off-policy mask, several rewards": {
        **{"off_policy_mask_threshold": 1e-3, "epsilon": 0.5, "reward_weights": [1.0, 0.5]},
        "build": {"reward_funcs": [tiny.reward, lambda completions, **_: [float(len(c)) for c in completions]]},
        "multi_objective_aggregation": "normalize_then_sum",
    },
    "uncorrected KL, reentrant checkpointing, LoRA": {
        **{"beta": 0.04, "use_bias_correction_kl": False, "lora": True},
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "aux loss, fp32 head": {"model": "moe", "router_aux_loss_coef": 0.1, "cast_lm_head_to_fp32": True},
    "evaluation, no gradient checkpointing": {
        **{"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4},
        **{"build": {"eval_dataset": tiny.dataset(4)}, "gradient_checkpointing": False},
    },
    "bf16 autocast": {"bf16": True},
}


FAST = ("four updates", "generation batch", "off-policy mask", "uncorrected KL", "evaluation")
SHARED = ("accumulation", "off-policy mask", "aux loss")


def run(models: dict[str, Path], tmp_path: Path, options: dict[str, Any], **others: Any) -> Any:
    options = {**CLIP, **options, **others}
    return tiny.train(tiny.trainer(models[options.pop("model", "dense")], tmp_path, **options))


OURS = ("ratio/sequence", "off_policy_", "dropped/", "kl/", "mismatch/")


def without_ours(history: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{k: v for k, v in row.items() if not k.removeprefix("eval_").startswith(OURS)} for row in history]


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("name", cases(OPTIONS, [name for name in OPTIONS if name.startswith(FAST)]))
def test_gspo_trains_as_trls_sequence_level_does(models: dict[str, Path], tmp_path: Path, name: str) -> None:
    theirs = run(models, tmp_path, OPTIONS[name], ours=False, loss_type="grpo", importance_sampling_level="sequence")
    ours = run(models, tmp_path, OPTIONS[name], padded=True, loss_type="gspo")
    assert without_ours(tiny.history(ours)) == tiny.history(theirs)
    expected, after = tiny.parameters(theirs), tiny.parameters(ours)
    assert all(torch.equal(after[parameter], expected[parameter]) for parameter in expected)
    ratios = [row["ratio/sequence_max"] for row in tiny.history(ours) if "ratio/sequence_max" in row]
    assert len(ratios) >= 6 and max(ratios) > 1  # off-policy, or nothing was tested


# not the entropy quantile: gspo_token gives each token its own share of a factor of single tokens
@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("name", [name for name in OPTIONS if name.split(",")[0] in SHARED])
def test_gspo_token_trains_as_gspo_does(models: dict[str, Path], tmp_path: Path, name: str) -> None:
    gspo = run(models, tmp_path, OPTIONS[name], loss_type="gspo", optim="sgd", max_steps=3)
    token = run(models, tmp_path, OPTIONS[name], loss_type="gspo_token", optim="sgd", max_steps=3)
    expected, after = tiny.parameters(gspo), tiny.parameters(token)
    for parameter in expected:
        assert torch.allclose(after[parameter], expected[parameter], rtol=1e-4, atol=1e-6), parameter


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(("loss_type", "lora"), [("gspo", True), ("gspo_token", False)])
def test_the_corrected_kl_differs_from_trls_and_scales_with_accumulation(
    models: dict[str, Path], tmp_path: Path, loss_type: str, lora: bool
) -> None:
    """One optimizer step over 8 sequences as 1 x 8 and as 2 x 4 micro-batches of equal weight: same gradient."""
    options = {"beta": 0.5, "num_iterations": 2, "max_steps": 2, "lora": lora, "optim": "sgd", "num_generations": 8}
    whole = {"per_device_train_batch_size": 8, "steps_per_generation": 1}
    halves = {"per_device_train_batch_size": 4, "steps_per_generation": 2, "gradient_accumulation_steps": 2}
    one = run(models, tmp_path, options, loss_type=loss_type, **whole)
    two = run(models, tmp_path, options, loss_type=loss_type, **halves)
    expected, after = tiny.parameters(one), tiny.parameters(two)
    for parameter in expected:
        assert torch.allclose(after[parameter], expected[parameter], rtol=1e-4, atol=1e-6), parameter
    theirs = run(
        models, tmp_path, options, ours=False, loss_type="grpo", importance_sampling_level="sequence", **whole
    )
    moved = tiny.parameters(theirs)
    assert any(not torch.allclose(moved[name], expected[name], rtol=1e-4, atol=1e-6) for name in expected)
    assert all(row["kl"] >= 0 for row in tiny.history(one) if "kl" in row)


def test_environment_tokens_and_an_engines_log_probs(models: dict[str, Path], tmp_path: Path) -> None:
    options = {"build": {"rollout_func": rollout}, "off_policy_mask_threshold": 2.0, "optim": "sgd"}
    theirs = run(models, tmp_path, options, ours=False, loss_type="grpo", importance_sampling_level="sequence")
    ours = run(models, tmp_path, options, loss_type="gspo_token")
    expected, after = tiny.parameters(theirs), tiny.parameters(ours)
    for parameter in expected:
        assert torch.allclose(after[parameter], expected[parameter], rtol=1e-4, atol=1e-6), parameter
    unmasked = run(models, tmp_path, {**options, "off_policy_mask_threshold": 1e3}, loss_type="gspo_token")
    moved = tiny.parameters(unmasked)
    assert any(not torch.equal(moved[name], after[name]) for name in after)  # the engine's log-probs did decide


def test_a_run_whose_answers_are_all_cut_off_and_masked_ends(models: dict[str, Path], tmp_path: Path) -> None:
    """No log has a share of dropped sequences then."""

    def cut_off(prompts: list[str], trainer: Any) -> dict[str, Any]:
        """Answers without an end."""
        prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        return {"prompt_ids": prompt_ids, "completion_ids": [[60, 61, 62]] * len(prompts), "logprobs": None}

    options = {"mask_truncated_completions": True, "off_policy_mask_threshold": 0.1, "max_steps": 2}
    trained = tiny.train(tiny.trainer(models["dense"], tmp_path, build={"rollout_func": cut_off}, **options))
    assert [row["dropped/off_policy"] for row in tiny.history(trained)[:-1]] == [None, None]
    trained.save_model(str(tmp_path / "end"))
    assert (tmp_path / "end" / "model.safetensors").is_file()


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("loss_type", ["dr_grpo", "cispo"])
def test_with_an_engines_log_probs_trls_losses_are_trls_and_more_is_logged(
    models: dict[str, Path], tmp_path: Path, loss_type: str
) -> None:
    options = {"build": {"rollout_func": rollout}, "loss_type": loss_type, "beta": 0.04}
    theirs, ours = (run(models, tmp_path, options, ours=ours, padded=True) for ours in (False, True))
    assert without_ours(tiny.history(ours)) == tiny.history(theirs)
    expected, after = tiny.parameters(theirs), tiny.parameters(ours)
    assert all(torch.equal(after[name], expected[name]) for name in expected)
    assert all({"mismatch/kl", "off_policy_q50", "kl/k1"} <= row.keys() for row in tiny.history(ours)[:-1])


@pytest.mark.parametrize("method", ["GRPO", "RLOO", "PPO"])
def test_a_trainer_without_args_makes_our_config(
    method: str, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = getattr(trl_steady, f"{method}Trainer")

    @dataclass
    class OnCPU(kind.CONFIG):
        use_cpu: bool = True
        bf16: bool | None = False

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(kind, "CONFIG", OnCPU)
    trainer = kind(str(models["dense"]), tiny.reward, train_dataset=tiny.dataset(), processing_class=tiny.tokenizer())
    assert isinstance(trainer.args, OnCPU)
    assert trainer.args.output_dir == f"dense-{method}"  # as TRL names it


def test_a_subclass_that_scores_for_itself_is_applied_once(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def halved(self: Any, *args: Any, **kwargs: Any) -> Any:
        logps, entropies, aux_loss = original(self, *args, **kwargs)
        return logps / 2, entropies, aux_loss

    original = trl.GRPOTrainer._get_per_token_logps_and_entropies
    options = {"optim": "sgd", "max_steps": 3}
    after = {}
    for package, loss in (
        (trl, {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
        (trl_steady, {"loss_type": "gspo_token"}),
    ):
        subclass = type("Halved", (package.GRPOTrainer,), {"_get_per_token_logps_and_entropies": halved})
        monkeypatch.setattr(package, "GRPOTrainer", subclass)
        after[package] = tiny.parameters(run(models, tmp_path, options, ours=package is trl_steady, **loss))
        monkeypatch.undo()
    for name, expected in after[trl].items():
        assert torch.allclose(after[trl_steady][name], expected, rtol=1e-4, atol=1e-6), name
