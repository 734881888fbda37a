"""The recipe of PPO: its presets, a small run of both methods from one start, and the comparison of runs."""

import json
from typing import Any

from tests.project import recipe

FOLDER = recipe.FOLDER / "ppo"


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
            cells = [f"{row['after']:.1%}" for row in of_method]
            assert f"| {method}, {decoding.split()[0]} | {' | '.join(cells)} | {of_all:.1%} |" in readme
        cells = [interval(compared[seed, decoding]._asdict()) for seed in ("0", "1", "2", "mean")]
        assert f"| PPO minus GRPO, {decoding.split()[0]} | {' | '.join(cells)} |" in readme
    before = [[f"{row['before']:.1%}" for row in run["accuracy"].values()] for run in runs[:3]]
    assert before == [["43.2%", "68.5%"], ["39.2%", "68.5%"], ["37.5%", "68.5%"]]
    assert "43.2, 39.2 and 37.5% sampled, and 68.5% greedy" in " ".join(readme.split())
