"""DeepSeekMath's loop: its settings, a small run of each arm from one start, and the comparison of the arms."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.project import recipe
from tests.project.recipe import is_picture, moved, parse

FOLDER = recipe.FOLDER / "deepseekmath_loop"
NAME = "deepseekmath_loop/smollm2-135m"


@pytest.mark.slow
def test_each_arm_runs_on_a_tiny_model(smollm2: Any, models: dict[str, Path], tmp_path: Path) -> None:
    found, files = {}, []
    for arm in smollm2.arms.ARMS:
        few = {"max_steps": 6, "steps_per_generation": 2, "ref_model_sync_steps": 2, "initial_prompts": 8}
        few |= {"reward_learning_rate": 0.01, "learning_rate": 0.01, "check_every": 1}
        found[arm] = recipe.run(smollm2, NAME, tmp_path / arm, arm=arm, **few)
        assert [refresh["step"] for refresh in found[arm]["refreshes"]] == [2, 4]
        assert list(found[arm]["held-out greedy accuracy by step"]) == [0, 2, 4, 6]
        assert "<svg" in (tmp_path / arm / "report.html").read_text()
        assert moved(tmp_path / arm / "adapter", models["dense"])
        assert (tmp_path / arm / "adapter/reward").is_dir() == (arm != "rule")
        assert json.loads((tmp_path / arm / "results.json").read_text())["objective"]["arm"] == arm
        files.append(str(tmp_path / arm / "results.json"))
    trained = {arm: [row["step"] for row in results["reward_refreshes"]] for arm, results in found.items()}
    assert trained == {"rule": [], "frozen": [0], "retrained": [0, 2, 4], "without_replay": [0, 2, 4]}
    replayed = {arm: [row["replayed"] > 0 for row in results["reward_refreshes"]] for arm, results in found.items()}
    assert replayed["retrained"] == [False, True, True] and not any(replayed["without_replay"])
    # the arms make the same first rollout, and three of them begin with the same reward model
    smollm2.arms.refuse_other_starts(list(found.values()))
    steps, rights = zip(*(smollm2.arms.truths(results) for results in found.values()), strict=True)
    assert list(steps) == 4 * [[1, 3, 5]] and len({own[0] for own in rights}) == 1
    scores = {arm: smollm2.arms.scores(results)[1] for arm, results in found.items()}
    assert scores.pop("rule") == [] and len({own[0] for own in scores.values()}) == 1
    assert len({own[1] for own in scores.values()}) == 3  # after the first training

    smollm2.arms.main(str(tmp_path / "arms.png"), *files)
    assert is_picture(tmp_path / "arms.png")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:vllm_max_model_length:UserWarning")  # without an engine here
def test_the_7b_config_runs_with_a_reward_model(recipes: Any, gsm8k: Path, tmp_path: Path) -> None:
    """The command of the README, on a tiny model, tiny data and one process."""
    few = recipe.FROM_HUB | {"model_name": gsm8k, "lora_r": 4, "learning_rate": 0.01, "reward_learning_rate": 0.01}
    few |= {"steps_per_generation": 2, "max_steps": 4, "ref_model_sync_steps": 2, "initial_prompts": 4}
    few |= {"eval_strategy": "no", "eval_on_start": False}
    few |= {"held_out": 10, "samples": 2, "output_dir": tmp_path / "out"}
    kinds = recipe.dataclasses(recipes, NAME)
    results = recipes.deepseekmath_loop.main(*parse(recipes, "iterative_grpo/deepseekmath-7b", kinds, **few))
    assert [row["step"] for row in results["reward_refreshes"]] == [0, 2]
    assert recipes.arms.truths(results)[0] == recipes.arms.scores(results)[0] == [1, 3]
    assert moved(tmp_path / "out/adapter", gsm8k)


def test_the_recorded_runs_are_what_the_readme_says(recipes: Any) -> None:
    readme = recipe.without_spaces(FOLDER / "README.md")
    recorded = {
        (arm, seed): json.loads((FOLDER / f"results/{arm}-seed{seed}.json").read_text())
        for arm in recipes.arms.ARMS
        for seed in range(3)
    }
    assert len(list((FOLDER / "results").glob("*.json"))) == len(recorded)
    ways = ("sampled at temperature 1, 2 each", "greedy")
    for arm in recipes.arms.ARMS:
        shares = [[recorded[arm, seed]["accuracy"][way]["after"] for way in ways] for seed in range(3)]
        shares.append([sum(own) / 3 for own in zip(*shares, strict=True)])
        assert f"| `{arm}` | {' | '.join(f'{sampled:.1%}, {greedy:.1%}' for sampled, greedy in shares)} |" in readme
    assert "43.2%, 39.2% and 37.5% sampled, and 68.5% greedy" in readme
    found = recipes.arms.differences(list(recorded.values()))
    for other in ("frozen", "without_replay"):
        for way in ways:
            rows = [found[(other, "retrained", seed, way)] for seed in ("0", "1", "2", "mean")]
            cells = [f"{100 * d.difference:+.1f} ({100 * d.low:+.1f} to {100 * d.high:+.1f})" for d in rows]
            assert f"| `{other}` | {way.split()[0]} | {' | '.join(cells)} |" in readme
    _, args = parse(recipes, NAME)
    for (arm, seed), own in recorded.items():
        before = [f"{own['accuracy'][way]['before']:.1%}" for way in ways]
        assert before == [("43.2%", "39.2%", "37.5%")[seed], "68.5%"]
        settings = own["objective"]
        assert settings["arm"] == arm and own["seed"] == seed
        names = recipes.deepseekmath_loop.OBJECTIVE
        assert {name: settings[name] for name in names} == {name: getattr(args, name) for name in names}
