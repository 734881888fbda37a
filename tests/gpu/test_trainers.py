"""Whole runs in float32 on fixed rollouts: training on a GPU is that of the CPU."""

import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.features.padding_free.rollouts import UNEQUAL
from tests.gpu.places import Place, everywhere
from tests.gpu.recorder import Figures
from tests.tools import tiny
from tests.tools.headroom import within
from tests.trainers.tools import by_prompt, by_steps


@everywhere(slow=True)  # tests/trainers/test_on_gpu.py does this on a pretended GPU
@pytest.mark.parametrize(
    ("model", "options"),
    [
        pytest.param("dense", {}, id="GRPO"),
        pytest.param("dense", {"loss_type": "gspo"}, id="GSPO"),
        pytest.param("dense", {"loss_type": "gspo_token", "step_advantage": "process"}, id="GSPO-token, step rewards"),
        pytest.param("dense", {"loss_type": "gmpo", "off_policy_mask_threshold": 0.1}, id="GMPO, masked"),
        pytest.param("dense", {"sync_ref_model": True, "ref_model_sync_steps": 1}, id="a moving reference"),
        pytest.param("dense", {"skip_zero_weight": True, "beta": 0.0}, id="skipped sequences"),
        pytest.param("dense", {"token_budget": 50, "share_prompts": True}, id="shared prompts"),
        pytest.param("gpt2", {"token_budget": 50}, id="cut at the right only"),
        pytest.param(
            "moe", {"router_replay": "R2", "router_replay_reference": True, "router_aux_loss_coef": 0.0}, id="R2"
        ),
    ],
)
def test_a_run_is_that_of_the_cpu(
    place: Place, models: dict[str, Path], tmp_path: Path, model: str, options: dict[str, Any], figures: Figures
) -> None:
    def trained(place: Place, output: Path) -> Any:
        reward = (
            by_steps if "step_advantage" in options else by_prompt if "skip_zero_weight" in options else tiny.reward
        )
        settings = {"beta": 0.1, "optim": "sgd", "learning_rate": 3e-3, "num_iterations": 2, "max_steps": 4, **options}
        build = {"reward_funcs": reward, "rollout_func": UNEQUAL}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            trainer = tiny.trainer(models[model], output, **place.arguments, build=build, **settings)
            if model == "moe":  # transformers' other implementation takes another kernel on a GPU
                trainer.model.set_experts_implementation("eager")
                trainer.ref_model.set_experts_implementation("eager")
            return tiny.train(trainer)

    expected = trained(Place("cpu"), tmp_path / "cpu")
    before = tiny.parameters(tiny.trainer(models[model], tmp_path / "new"))
    ours = trained(place, tmp_path / "here")
    assert {each.device.type for each in ours.model.parameters()} == {place.name}
    true, own = tiny.parameters(expected), {name: each.cpu() for name, each in tiny.parameters(ours).items()}
    moved = sum(float((true[name] - before[name]).square().sum()) for name in true) ** 0.5
    off = sum(float((true[name] - own[name]).square().sum()) for name in true) ** 0.5
    # float32 has 24 bits, 6e-8, of weights that are a hundred times as long as the way they move; four steps in which
    # rounding grows about tenfold each
    assert moved > 0 and within(off, 1e-2 * moved)
    losses = [[row["loss"] for row in tiny.history(each) if "loss" in row] for each in (ours, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2, abs=1e-4)  # the same rounding
    figures("distance of the weights from the CPU's, of the way they moved", off / moved, "")


@everywhere()
def test_phases_are_those_of_the_device(place: Place, models: dict[str, Path], tmp_path: Path) -> None:
    """Events of CUDA are read at a log only. Their sum is at most the time that passed."""
    options = {"training_report": True, "beta": 0.1, "max_steps": 4, **place.arguments}
    trainer = tiny.trainer(models["dense"], tmp_path, build={"rollout_func": UNEQUAL}, **options)
    started = time.perf_counter()
    tiny.train(trainer)
    passed = time.perf_counter() - started
    rows = [{key: value for key, value in row.items() if key.startswith("time/")} for row in trainer.state.log_history]
    measured = [sum(row.values()) for row in rows if row]
    assert len(measured) == 4 and all(value > 0 for row in rows for value in row.values())
    assert sum(measured) <= passed
