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
    compared = recipes.ppo_and_grpo.differences(runs)
    interval = lambda of: f"{100 * of['difference']:+.1f} ({100 * of['low']:+.1f} to {100 * of['high']:+.1f})"
    for decoding in runs[0]["accuracy"]:
        mean = compared["mean", decoding]
        for method, of_all in (("GRPO", mean.before), ("PPO", mean.after)):
            of_method = [run["accuracy"][decoding] for run in runs if run["objective"]["method"] == method]
            cells = [f"{row['after']:.1%}, {interval(row)}" for row in of_method]
            assert f"| {method} | {decoding.split()[0]} | {' | '.join(cells)} | {of_all:.1%} |" in readme
        cells = [interval(compared[seed, decoding]._asdict()) for seed in ("0", "1", "2", "mean")]
        assert f"| PPO minus GRPO | {decoding.split()[0]} | {' | '.join(cells)} |" in readme
    before = [[f"{row['before']:.1%}" for row in run["accuracy"].values()] for run in runs[:3]]
    assert before == [["43.2%", "68.5%"], ["39.2%", "68.5%"], ["37.5%", "68.5%"]]
    assert "43.2, 39.2 and 37.5% sampled, and 68.5% greedy" in " ".join(readme.split())
