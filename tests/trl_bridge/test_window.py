"""A generation window goes on in another run with the settings that it began with, or the option is named."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import trl_steady
from tests.tools import agent, resumable, tiny
from trl_steady.config.options import InRollout, marked
from trl_steady.trl_bridge.patching import patched
from trl_steady.trl_bridge.window import WINDOW_OPTIONS, WINDOW_OPTIONS_WITH, changed_settings, window_settings

# Options that shape neither a rollout nor the objective that it was made for.
NOT_OF_A_ROLLOUT = """
engines and memory: cache_implementation ds3_gather_for_generation transformers_continuous_batching_config
    vllm_model_impl vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_tensor_parallel_size vllm_server_base_url
    vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port vllm_engine_kwargs engine_check
    async_generate vllm_request_seeds
rounding only: pad_to_multiple_of trim_padding token_budget skip_zero_weight skip_old_pass
data and model: model_init_kwargs trust_remote_code shuffle_dataset num_generations_eval
read in every update: epsilon epsilon_high delta sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos
    vespo_k_neg vespo_lambda_neg router_aux_loss_coef top_entropy_quantile entropy_coef use_adaptive_entropy
    entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target off_policy_mask_threshold off_policy_mask_level
    geometric_mask_range token_veto_threshold skip_nonfinite_steps dppo_divergence m2po_budget sampler_penalty
moves of the reference, between windows: sync_ref_model ref_model_mixup_alpha ref_model_sync_steps ref_model_sync_kl
    ref_model_sync_reset_optimizer
logs: log_completions log_multimodal num_completions_to_print log_unique_prompts log_completions_hub_repo
    training_report log_line
evaluations: eval_metrics eval_generation
other names of options of a rollout: generation_batch_size use_transformers_paged vllm_importance_sampling_cap
"""
# transformers knows of no rollout, but these of its options cut or compute one
OF_TRANSFORMERS = {"per_device_train_batch_size", "gradient_accumulation_steps", "bf16", "fp16"}


def test_every_option_shapes_a_rollout_or_does_not() -> None:
    """A new option of TRL's or of ours belongs into one of the two lists."""
    inherited = {field.name for field in fields(transformers.TrainingArguments)}
    every = {field.name for field in fields(trl_steady.GRPOConfig)}
    others = [name for line in NOT_OF_A_ROLLOUT.splitlines() for name in line.split(": ")[-1].split()]
    trl_names = [*WINDOW_OPTIONS, *(name for names in WINDOW_OPTIONS_WITH.values() for name in names)]
    of_rollouts = [*(name for name in trl_names if name in every), *marked(trl_steady.GRPOConfig, InRollout)]
    assert len({*of_rollouts, *others}) == len(of_rollouts) + len(others)
    assert {*of_rollouts, *others} - OF_TRANSFORMERS == every - inherited
    assert inherited & {*of_rollouts} >= OF_TRANSFORMERS


OPTIONS: dict[str, Any] = {
    **{name: resumable.OPTIONS[name] for name in ("steps_per_generation", "num_iterations", "save_strategy")},
    "save_steps": 1,
    "max_steps": 5,
    "beta": 0.04,
    "loss_type": "dapo",
}


@pytest.fixture(scope="module")
def run(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints at 3, inside a window, at 4, at the end of it, and at 5."""
    folder = tmp_path_factory.mktemp("run")
    tiny.train(build(models["dense"], folder))
    return folder


def build(model: Path, output: Path, **options: Any) -> Any:
    return tiny.trainer(model, output, lora=True, **{**OPTIONS, **options})


OTHERS: dict[str, Any] = {
    "num_generations": 2,
    "steps_per_generation": 4,
    "num_iterations": 4,
    "max_completion_length": 6,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "generation_kwargs": {"no_repeat_ngram_size": 3},
    "chat_template_kwargs": {"enable_thinking": False},
    "use_transformers_continuous_batching": True,
    "scale_rewards": "none",
    "reward_weights": [2.0],
    "multi_objective_aggregation": "normalize_then_sum",
    "step_advantage": "process",
    "max_tool_calling_iterations": 2,
    "disable_dropout": True,
    "adapter_dtype": "float32",
    "loss_type": "grpo",
    "mask_truncated_completions": True,
    "beta": 0.0,
    "use_bias_correction_kl": False,
    "kl_estimator": "k2",
    "beta_column": "prompt",
    "dynamic_sampling": True,
    "teacher": "reference",
}
OTHERS_OF_TEACHER = {"teacher": "a model", "teacher_coef": 0.1, "teacher_mode": "add", "teacher_prompt": "prompt"}


def test_each_option_that_shapes_a_rollout_is_a_setting(models: dict[str, Path], tmp_path: Path) -> None:
    trainer = build(models["dense"], tmp_path)
    before = window_settings(trainer)
    for option, value in OTHERS.items():
        with patched(trainer.args, {option: value}):
            assert changed_settings(before, window_settings(trainer)) == [option]
    with patched(trainer.args, {"teacher": "reference"}):
        with_teacher = window_settings(trainer)
        for option, value in OTHERS_OF_TEACHER.items():
            with patched(trainer.args, {option: value}):
                assert changed_settings(with_teacher, window_settings(trainer)) == [option]
    with patched(trainer, {"environment_factories": {None: agent.Calculator}}):
        assert changed_settings(before, window_settings(trainer)) == ["environment_factory"]


@pytest.mark.filterwarnings("ignore:sampling leaves tokens out")
def test_at_the_end_of_a_window_every_option_may_differ(models: dict[str, Path], tmp_path: Path, run: Path) -> None:
    """As in TRL."""
    options = {name: value for name, value in OTHERS.items() if not name.startswith("use_transformers")}
    options["num_iterations"] = 1  # the other value would leave the last step inside a longer window
    other = build(models["dense"], tmp_path, **options)
    other.train(resume_from_checkpoint=str(run / "checkpoint-4"))
    assert other.state.global_step == 5


def test_options_and_reward_functions_are_named_one_a_line(models: dict[str, Path], tmp_path: Path, run: Path) -> None:
    def other_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(len(ids)) for ids in completion_ids]

    build_with = {"reward_funcs": [other_reward]}
    other = build(models["dense"], tmp_path, temperature=0.7, num_generations=2, build=build_with)
    with pytest.raises(ValueError) as refused:
        other.train(resume_from_checkpoint=str(run / "checkpoint-3"))
    first, *lines, last = str(refused.value).splitlines()
    assert "checkpoint-3 was taken inside a generation window that began with" in first
    assert sorted(line.strip() for line in lines) == [
        "num_generations=4; this run has num_generations=2",
        "reward_funcs=['reward']; this run has reward_funcs=['other_reward']",
        "temperature=1.0; this run has temperature=0.7",
    ]
    assert "from a checkpoint at the end of a window" in last and other.state.global_step == 3


def test_what_does_not_shape_a_rollout_may_differ(models: dict[str, Path], tmp_path: Path, run: Path) -> None:
    options: dict[str, Any] = {
        **{"learning_rate": 1e-3, "epsilon": 0.1, "beta": 0.1},  # read in every update
        **{"vllm_mode": "server", "share_prompts": True},  # which do nothing to this rollout
        **{"scale_rewards": True, "reward_weights": [1.0]},  # the same in other words
    }
    other = build(models["dense"], tmp_path, **options)
    other.train(resume_from_checkpoint=str(run / "checkpoint-3"))
    assert other.state.global_step == 5


def test_equal_values_are_equal_in_any_order_and_type(models: dict[str, Path], tmp_path: Path) -> None:
    trainer = build(models["dense"], tmp_path)

    def settings(value: Any) -> dict[str, Any]:
        with patched(trainer.args, {"generation_kwargs": {"value": value}}):
            return window_settings(trainer)

    for value, equal, other in (
        ({1: 2, "a": 3}, {"a": 3, 1: 2}, {1: 2, "a": 4}),
        ((1, np.float32(0.5)), [1, 0.5], [1, 0.25]),
        ({(1, 2): -10.0, (3,): 1.0}, {(3,): 1.0, (1, 2): -10.0}, {(1, 2): -10.0}),
        (torch.tensor([1, 2]), np.array([1, 2]), torch.tensor([2, 1])),
    ):
        assert changed_settings(settings(value), settings(equal)) == []
        assert changed_settings(settings(value), settings(other)) == ["generation_kwargs"]
