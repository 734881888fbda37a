"""Each recipe of small models trains for one rollout, saves what it trained, and its pictures are drawn."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.project import recipe
from tests.project.recipe import is_picture, moved
from tests.tools.cases import cases

# options, a metric that only this recipe's method logs, and the script that draws its recorded runs
RUNS: dict[str, tuple[dict[str, Any], str, str]] = {
    "moe/qwen3-moe-digits": ({"router_replay": "R3", "num_generations": 4}, "routing/changed", "variants"),
    "gspo/smollm2-135m-comparison": ({}, "ratio/sequence_mean", ""),
    "v32/smollm2-135m-v32": ({"off_policy_mask_threshold": "0"}, "dropped/off_policy", "panels"),
    "process_rewards/smollm2-135m-process": ({}, "steps/mean_count", "compare"),
    "ppo/smollm2-135m-ppo": ({}, "value/explained_variance", "ppo_and_grpo"),
    "deepseekmath_loop/smollm2-135m": (
        {"initial_prompts": 8, "steps_per_generation": 2, "ref_model_sync_steps": 2, "reward_learning_rate": 0.01},
        "reward_model/new/fresh/loss",
        "arms",
    ),
    "sampling_mask/digits-top-p": (
        {"keep_sampling_mask": True, "num_generations": 4, "lora_r": 4},
        "sampling_mask/kept_mass",
        "beside",
    ),
}


@pytest.mark.parametrize("name", cases(RUNS, fast=1))
@pytest.mark.filterwarnings("ignore:Glyph")  # a random model writes control characters
@pytest.mark.filterwarnings("ignore:sampling leaves tokens out:UserWarning")
def test_a_recipe_trains_saves_and_draws(
    request: pytest.FixtureRequest,
    models: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    options, metric, script = RUNS[name]
    own_task = name.startswith(("moe/", "sampling_mask/"))
    recipes = request.getfixturevalue("digits" if own_task else "smollm2")
    start, output = tmp_path / "start", tmp_path / "out"
    if own_task or name.startswith("process_rewards/"):
        options = {**options, "start": start}
    results = recipe.run(recipes, name, output, max_steps=4, learning_rate=0.01, check_every=1, **options)
    printed = capsys.readouterr().out
    assert "\nstep 4/4 " in printed and "accuracy on held-out problems" in printed
    assert any(metric in row for row in results["history"])
    written = json.loads((output / "results.json").read_text())
    assert written["accuracy"] == results["accuracy"] and len(written["history"]) == len(results["history"])
    assert "<svg" in (output / "report.html").read_text()
    if (output / "adapter").is_dir():
        assert moved(output / "adapter", start if start.is_dir() else models["dense"])
    else:
        assert (output / "model").is_dir()
    if script:
        pattern = "[am]*.json" if script == "beside" else "*-seed?.json"
        recorded = sorted((recipe.FOLDER / name.split("/")[0] / "results").glob(pattern))
        files = [f"V3.2={output}/results.json"] if script == "panels" else [*map(str, recorded)]
        getattr(recipes, script).main(str(tmp_path / "all.png"), *files)
        assert is_picture(tmp_path / "all.png")
