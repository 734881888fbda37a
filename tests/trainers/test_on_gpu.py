"""Whole runs on a pretended GPU: no operation mixes devices, and they train as on the CPU.

`make test-triton` runs them with TRL's Triton kernels.
"""

import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.tools import tiny
from tests.tools.cases import cases
from tests.tools.devices import HAS_INTERPRETER, on_gpu
from tests.trainers.tools import by_prompt, by_steps

# each with the model, what is rewarded, and the options
RUNS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "kept, by tokens": (
        "dense",
        tiny.reward,
        {"keep_sampling_mask": True, "top_p": 0.8, "token_budget": 50, "share_prompts": True},
    ),
    "sequence ratio": (
        "dense",
        tiny.reward,
        {"loss_type": "gspo_token", "off_policy_mask_threshold": 0.1, "off_policy_mask_level": "token"},
    ),
    "a moving reference": ("dense", tiny.reward, {"sync_ref_model": True, "ref_model_sync_steps": 1}),
    "cut at the right only": ("gpt2", tiny.reward, {"token_budget": 50}),
    "R2": (
        "moe",
        tiny.reward,
        {"router_replay": "R2", "router_replay_reference": True, "num_iterations": 2, "router_aux_loss_coef": 0.0},
    ),
    "R3, kept, by tokens": (
        "moe",
        tiny.reward,
        {
            **{"router_replay": "R3", "keep_sampling_mask": True, "top_p": 0.9},
            **{"token_budget": 50, "share_prompts": True, "router_aux_loss_coef": 0.0},
        },
    ),
    "step rewards": ("dense", by_steps, {"step_advantage": "process"}),
    "a critic": ("dense", tiny.reward, {"method": "PPO", "num_generations": 1, "lora": True, "token_budget": 50}),
    "skipped sequences": ("dense", by_prompt, {"beta": 0.0, "skip_zero_weight": True, "loss_type": "bnpo"}),
}


def trainer(models: dict[str, Path], tmp_path: Path, name: str) -> Any:
    model, reward, options = RUNS[name]
    settings = {"beta": 0.1, "optim": "sgd", "max_steps": 2, **options, "build": {"reward_funcs": reward}}
    built = tiny.trainer(models[model], tmp_path, **settings)
    if model == "moe":  # transformers' other implementation asks the GPU what it can do
        built.model.set_experts_implementation("eager")
        built.ref_model.set_experts_implementation("eager")
    return built


@pytest.mark.parametrize("name", cases(RUNS, ("sequence ratio", "R3, kept, by tokens", "skipped sequences")))
def test_a_run_on_a_gpu_is_that_of_the_cpu(models: dict[str, Path], tmp_path: Path, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        expected = tiny.train(trainer(models, tmp_path / "cpu", name))
        ours = trainer(models, tmp_path / "gpu", name)
        with on_gpu(ours) as gpu:
            tiny.train(ours)
            weights = {key: value.cpu() for key, value in tiny.parameters(ours).items()}
    assert bool(gpu.kernel_arguments) == HAS_INTERPRETER  # TRL's; all others are the CPU's
    # some loops take other parts on a GPU
    assert tiny.history(ours) == [pytest.approx(row, rel=1e-4, abs=1e-5) for row in tiny.history(expected)]
    for key, value in tiny.parameters(expected).items():
        assert weights[key].flatten().tolist() == pytest.approx(value.flatten().tolist(), rel=1e-4, abs=1e-5)
