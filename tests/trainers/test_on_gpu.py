"""Whole runs on a pretended GPU: no operation mixes devices, and they train as on the CPU.

`make test-triton` runs them with TRL's Triton kernels.
"""

import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.tools import tiny
from tests.tools.devices import HAS_INTERPRETER, on_gpu
from tests.trainers.tools import by_prompt, by_steps


def trainer(folder: Path, tmp_path: Path, reward: Any, options: dict[str, Any]) -> Any:
    settings = {"beta": 0.1, "optim": "sgd", "max_steps": 2, **options, "build": {"reward_funcs": reward}}
    built = tiny.trainer(folder, tmp_path, **settings)
    if folder.name == "moe":  # transformers' other implementation asks the GPU what it can do
        built.model.set_experts_implementation("eager")
        built.ref_model.set_experts_implementation("eager")
    return built


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(
    ("model", "reward", "options"),
    [
        pytest.param(
            "dense",
            tiny.reward,
            {"keep_sampling_mask": True, "top_p": 0.8, "token_budget": 50, "share_prompts": True},
            id="kept, by tokens",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "dense",
            tiny.reward,
            {"loss_type": "gspo_token", "off_policy_mask_threshold": 0.1, "off_policy_mask_level": "token"},
            id="sequence ratio",
        ),
        pytest.param(
            "dense",
            tiny.reward,
            {"sync_ref_model": True, "ref_model_sync_steps": 1},
            id="a moving reference",
            marks=pytest.mark.slow,
        ),
        pytest.param("gpt2", tiny.reward, {"token_budget": 50}, id="cut at the right only", marks=pytest.mark.slow),
        pytest.param(
            "moe",
            tiny.reward,
            {"router_replay": "R2", "router_replay_reference": True, "num_iterations": 2, "router_aux_loss_coef": 0.0},
            id="R2",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "moe",
            tiny.reward,
            {
                **{"router_replay": "R3", "keep_sampling_mask": True, "top_p": 0.9},
                **{"token_budget": 50, "share_prompts": True, "router_aux_loss_coef": 0.0},
            },
            id="R3, kept, by tokens",
        ),
        pytest.param("dense", by_steps, {"step_advantage": "process"}, id="step rewards", marks=pytest.mark.slow),
        pytest.param(
            "dense",
            tiny.reward,
            {"method": "PPO", "num_generations": 1, "lora": True, "token_budget": 50},
            id="a critic",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "dense", by_prompt, {"beta": 0.0, "skip_zero_weight": True, "loss_type": "bnpo"}, id="skipped sequences"
        ),
    ],
)
def test_a_run_on_a_gpu_is_that_of_the_cpu(
    models: dict[str, Path], tmp_path: Path, model: str, reward: Any, options: dict[str, Any]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        expected = tiny.train(trainer(models[model], tmp_path / "cpu", reward, options))
        ours = trainer(models[model], tmp_path / "gpu", reward, options)
        with on_gpu(ours) as gpu:
            tiny.train(ours)
            weights = {key: value.cpu() for key, value in tiny.parameters(ours).items()}
    assert bool(gpu.kernel_arguments) == HAS_INTERPRETER  # TRL's; all others are the CPU's
    # some loops take other parts on a GPU
    assert tiny.history(ours) == [pytest.approx(row, rel=1e-4, abs=1e-5) for row in tiny.history(expected)]
    for key, value in tiny.parameters(expected).items():
        assert weights[key].flatten().tolist() == pytest.approx(value.flatten().tolist(), rel=1e-4, abs=1e-5)
