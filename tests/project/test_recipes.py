"""The task of two numbers is what it says, and the scripts that train SmolLM2 run on a tiny model."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.project import recipe
from tests.project.recipe import is_picture, moved

ROOT = Path(__file__).parents[2]


def test_training_and_held_out_problems_are_disjoint_also_turned_round(recipes: Any) -> None:
    train, test = recipes.task.split(200)
    assert len(test) == len(set(test)) == 200 and len(train) == len(set(train)) == 2 * (90 * 89 // 2 - 3 - 200)
    both_ways = {pair for problem in test for pair in (problem, problem[::-1])}
    assert not both_ways & set(train) and not both_ways & set(recipes.task.EXAMPLES)
    assert recipes.task.split(200) == (train, test)
    assert 60 < sum(a > b for a, b in test) < 140  # either number holds the answer


def test_an_answer_is_the_first_line(recipes: Any) -> None:
    right, wrong = (" 45\n", "45", " 45\nmax(1, 2)", " 45 "), (" 4\n5", " 455\n", "")
    assert all(recipes.task.is_right((12, 45), text) for text in right)
    assert not any(recipes.task.is_right((12, 45), text) for text in wrong)


def test_the_interval_is_that_of_paired_problems(recipes: Any) -> None:
    before = np.tile([[1.0, 0.0]], (100, 1))
    after = np.concatenate([np.ones((50, 2)), np.tile([[1.0, 0.0]], (50, 1))])
    found = recipes.report.difference(before, after)
    # each problem gains 1/2 or 0 with equal odds: mean 1/4, standard error 1/4 / sqrt(100)
    assert found.before == 0.5 and found.after == 0.75 and found.difference == 0.25
    assert found.low == pytest.approx(0.25 - 1.96 * 0.025, abs=5e-3)
    assert found.high == pytest.approx(0.25 + 1.96 * 0.025, abs=5e-3)


def test_the_iterative_script_refreshes_on_a_tiny_model(
    smollm2: Any, models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = {"max_steps": 6, "steps_per_generation": 2, "ref_model_sync_steps": 2}
    results = recipe.run(smollm2, "iterative_grpo/smollm2-135m", tmp_path, **few)
    assert [(refresh["step"], refresh["rule"]) for refresh in results["refreshes"]] == [(2, "steps"), (4, "steps")]
    kl = dict(zip(*smollm2.report.series(results["history"], "kl"), strict=True))
    assert kl[1] == kl[3] == kl[5] == 0 and min(kl[2], kl[4], kl[6]) > 0
    printed = capsys.readouterr().out
    assert printed.count("\nstep ") == 6 and printed.count("-- refresh ") == 2
    assert printed.index("-- refresh 1 after update 2 (steps)") < printed.index("\nstep 3/6  reward ")
    assert json.loads((tmp_path / "results.json").read_text())["refreshes"] == results["refreshes"]
    assert "<svg" in (tmp_path / "report.html").read_text() and moved(tmp_path / "adapter", models["dense"])
    smollm2.pictures.main(str(tmp_path / "moving.png"), f"moving={tmp_path / 'results.json'}")
    assert is_picture(tmp_path / "moving.png")


def test_the_recorded_runs_of_step_rewards_are_what_the_readme_says(recipes: Any) -> None:
    folder = recipe.FOLDER / "process_rewards"
    readme = recipe.without_spaces(folder / "README.md")
    runs = [json.loads(file.read_text()) for file in (folder / "results").glob("*.json")]
    for run in runs:
        sampled, greedy = run["accuracy"].values()
        gains = [f"{100 * way['low']:+.1f} to {100 * way['high']:+.1f}" for way in (sampled, greedy)]
        cells = [f"{way['after']:.1%} ({gain})" for way, gain in zip((sampled, greedy), gains, strict=True)]
        label = recipes.compare.arm(run).replace("process", "`process`")
        assert f"| {label}, {run['seed']} | {' | '.join(cells)} |" in readme
    found = recipes.compare.differences(runs)
    for decoding in {decoding for _, decoding in found}:
        rows = [found[seed, decoding] for seed in ("0", "1", "2", "mean")]
        cells = [f"{100 * d.difference:+.1f} ({100 * d.low:+.1f} to {100 * d.high:+.1f})" for d in rows]
        assert f"| {decoding.split()[0]} | {' | '.join(cells)} |" in readme


def test_maths_answers_are_verified_as_trl_does(recipes: Any) -> None:
    example = recipes.gsm8k.example(recipe.GSM8K[0])
    assert [message["role"] for message in example["prompt"]] == ["user"]
    assert "\\boxed{}" in example["prompt"][0]["content"]
    texts = {"So it is \\boxed{1000}.": 1.0, "\\boxed{1,000}": 1.0, "\\boxed{1001}": 0.0, "1000": 0.0}
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    solutions = [example["solution"]] * len(texts)
    assert recipes.gsm8k.accuracy_reward(completions, solutions) == list(texts.values())


@pytest.mark.slow
def test_smollm2_loads_quantised_and_trains_through_every_layer(recipes: Any, tmp_path: Path) -> None:
    model, tokenizer = recipes.smollm2.load(tmp_path)
    assert sum(p.dtype == torch.uint8 for p in model.parameters()) == 7 * 30
    embeddings = torch.randn(1, 4, model.config.hidden_size).requires_grad_()
    model.train()(inputs_embeds=embeddings).logits.sum().backward()
    assert embeddings.grad is not None and embeddings.grad.abs().max() > 0
    assert tokenizer.decode(tokenizer("max(10, 20) =")["input_ids"]) == "max(10, 20) ="


def test_a_recipes_output_has_no_deprecations_of_its_libraries() -> None:
    """A stranger cannot act on them, and they would bury the recipe's own lines."""
    code = "import warnings, common; warnings.warn('old', FutureWarning); warnings.warn('mine')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT / "recipes",
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        check=True,
        capture_output=True,
        text=True,
    )
    assert "mine" in done.stderr and "old" not in done.stderr
