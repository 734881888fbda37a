"""The recipe of PPO: its presets, a small run of both methods from one start, and the comparison of runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.project import recipe
from tests.project.recipe import is_picture, moved

FOLDER = recipe.FOLDER / "ppo"


@pytest.mark.slow
def test_both_methods_run_on_a_tiny_model(
    smollm2: Any, models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = []
    for name in ("smollm2-135m-ppo", "smollm2-135m-grpo"):
        results = recipe.run(smollm2, f"ppo/{name}", tmp_path / name, max_steps=8, check_every=1)
        assert list(results["held-out greedy accuracy by step"]) == [0, 4, 8]
        assert "<svg" in (tmp_path / name / "report.html").read_text()
        assert moved(tmp_path / name / "adapter", models["dense"])
        is_ppo = results["objective"]["method"] == "PPO"
        assert is_ppo == name.endswith("-ppo") == (tmp_path / name / "adapter/value").is_dir()
        explained = smollm2.report.series(results["history"], "value/explained_variance")[0]
        assert explained == ([1, 5] if is_ppo else [])
        files.append(str(tmp_path / name / "results.json"))
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if line.startswith("step ")]
    assert len(lines) == 16 and sum("  explained " in line for line in lines) == 2
    assert sum("  explained " in line for line in printed.splitlines()) == 3  # the summary repeats the last figures
    smollm2.ppo_and_grpo.main(str(tmp_path / "both.png"), *files)
    assert is_picture(tmp_path / "both.png")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:vllm_importance_sampling_mode:UserWarning")  # without an engine here
@pytest.mark.parametrize("name", ["instructgpt", "vapo", "sao"])
def test_the_presets_run_on_a_tiny_model(smollm2: Any, models: dict[str, Path], tmp_path: Path, name: str) -> None:
    few = {"max_steps": 4, "gradient_accumulation_steps": 1, "steps_per_generation": 1, "max_completion_length": 8}
    few |= {"learning_rate": 0.01, "value_warmup_steps": 1, "warmup_steps": 0, "value_init": "policy"}
    few |= {"use_vllm": False, "num_generations": 1, "logging_steps": 1, "report_to": "none"}
    results = recipe.run(smollm2, f"ppo/{name}", tmp_path, **few)
    assert [row["step"] for row in results["history"] if "value/loss" in row] == [1, 2, 3, 4]
    assert moved(tmp_path / "adapter", models["dense"])


def test_the_recorded_runs_are_what_the_readme_says(recipes: Any) -> None:
    readme = recipe.without_spaces(FOLDER / "README.md")
    files = sorted((FOLDER / "results").glob("*-seed?.json"))
    assert [file.stem for file in files] == [f"{method}-seed{seed}" for method in ("grpo", "ppo") for seed in range(3)]
    runs = [json.loads(file.read_text()) for file in files]
    for run in runs:
        cells = [run["objective"]["method"], str(run["seed"])]
        for row in run["accuracy"].values():
            cells += [f"{row['before']:.1%}", f"{row['after']:.1%}", f"{100 * row['difference']:+.1f}"]
            cells += [f"{100 * row['low']:+.1f} to {100 * row['high']:+.1f}"]
        assert f"| {' | '.join(cells)} |" in readme
    for (seed, decoding), row in recipes.ppo_and_grpo.differences(runs).items():
        cells = [{"mean": "mean of the three"}.get(seed, seed), decoding.split()[0]]
        cells += [f"{row.before:.1%}", f"{row.after:.1%}", f"{100 * row.difference:+.1f}"]
        cells += [f"{100 * row.low:+.1f} to {100 * row.high:+.1f}"]
        assert f"| {' | '.join(cells)} |" in readme
