"""DeepSeekMath's loop: its settings, a small run of each arm from one start, and the comparison of the arms."""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import datasets
import pytest
from trl import TrlParser

import trl_steady
from tests.project.test_recipes import CHAT, GSM8K, moved, on_a_small_scale, small  # noqa: F401  (a fixture)
from tests.tools import tiny

FOLDER = Path(__file__).parents[2] / "recipes/deepseekmath_loop"


def parse(recipes: Any, name: str, *command: str, folder: Path = FOLDER) -> tuple[Any, Any]:
    parser = TrlParser((recipes.deepseekmath_loop.RecipeArguments, trl_steady.GRPOConfig))
    return parser.parse_args_and_config(
        ["--config", str(folder / f"{name}.yaml"), "--use_cpu", "true", "--bf16", "false", *command]
    )


def test_the_recipe_has_the_papers_loop(recipes: Any) -> None:
    recipe, args = parse(recipes, "smollm2-135m")
    assert (recipe.arm, recipe.replay_fraction, recipe.task, recipe.quantised) == ("retrained", 0.1, "max", True)
    assert (args.loss_type, args.beta, args.ref_model_mixup_alpha) == ("grpo", 0.04, 1.0) and args.sync_ref_model
    updates = recipes.run.updates_per_rollout(args)
    assert args.ref_model_sync_steps == 2 * updates and args.max_steps == 4 * args.ref_model_sync_steps
    answers = recipe.initial_prompts * args.num_generations
    assert answers == 4 * args.generation_batch_size == 256  # four rollouts, none of them cut
    assert recipe.check_every * updates == args.ref_model_sync_steps


@pytest.mark.usefixtures("small")
def test_each_arm_runs_on_a_tiny_model(
    recipes: Any, models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, files = {}, []
    for arm in recipes.arms.ARMS:
        few = {"max_steps": 6, "steps_per_generation": 2, "ref_model_sync_steps": 2, "initial_prompts": 8}
        few |= {"reward_learning_rate": 0.01, "learning_rate": 0.01, "check_every": 1}
        command = on_a_small_scale(tmp_path / arm, arm=arm, **few)
        found[arm] = recipes.deepseekmath_loop.main(*parse(recipes, "smollm2-135m", *command))
        assert [refresh["step"] for refresh in found[arm]["refreshes"]] == [2, 4]
        assert list(found[arm]["held-out greedy accuracy by step"]) == [0, 2, 4, 6]
        assert (tmp_path / arm / "training.png").read_bytes().startswith(b"\x89PNG")
        assert moved(tmp_path / arm / "adapter", models["dense"])
        assert (tmp_path / arm / "adapter/reward").is_dir() == (arm != "rule")
        assert json.loads((tmp_path / arm / "results.json").read_text())["objective"]["arm"] == arm
        files.append(str(tmp_path / arm / "results.json"))
    printed = capsys.readouterr().out
    assert printed.count("Training the initial reward model") == printed.count("-- reward model after update 0") == 3
    assert printed.count("-- reward model after update ") == 1 + 3 + 3 and printed.count("  score ") == 3 * 3

    trained = {arm: [row["step"] for row in results["reward_refreshes"]] for arm, results in found.items()}
    assert trained == {"rule": [], "frozen": [0], "retrained": [0, 2, 4], "without_replay": [0, 2, 4]}
    replayed = {arm: [row["replayed"] > 0 for row in results["reward_refreshes"]] for arm, results in found.items()}
    assert replayed["retrained"] == [False, True, True] and not any(replayed["without_replay"])
    # the arms make the same first rollout, and three of them begin with the same reward model
    recipes.arms.refuse_other_starts(list(found.values()))
    steps, rights = zip(*(recipes.arms.truths(results) for results in found.values()), strict=True)
    assert list(steps) == 4 * [[1, 3, 5]] and len({own[0] for own in rights}) == 1
    scores = {arm: recipes.arms.scores(results)[1] for arm, results in found.items()}
    assert scores.pop("rule") == [] and len({own[0] for own in scores.values()}) == 1
    assert len({own[1] for own in scores.values()}) == 3  # after the first training
    assert recipes.arms.knowledge(found["retrained"])[0] == [2, 4] and not recipes.arms.knowledge(found["frozen"])[0]

    recipes.arms.main(str(tmp_path / "arms.png"), *files)
    assert (tmp_path / "arms.png").read_bytes().startswith(b"\x89PNG")
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 2 + 4 * 2 * 2 and rows[2].startswith("| frozen | rule | 0 | ")


@pytest.mark.usefixtures("small")
def test_a_reward_model_from_a_folder_is_not_trained_at_first(recipes: Any, tmp_path: Path) -> None:
    few = {"max_steps": 2, "steps_per_generation": 1, "ref_model_sync_steps": 1, "initial_prompts": 2}
    first = on_a_small_scale(tmp_path / "first", arm="frozen", reward_learning_rate=0.01, **few)
    made = recipes.deepseekmath_loop.main(*parse(recipes, "smollm2-135m", *first))
    assert [row["step"] for row in made["reward_refreshes"]] == [0]
    few |= {"arm": "frozen", "reward_model": tmp_path / "first/adapter/reward"}
    found = recipes.deepseekmath_loop.main(
        *parse(recipes, "smollm2-135m", *on_a_small_scale(tmp_path / "second", **few))
    )
    assert found["reward_refreshes"] == [] and len(found["refreshes"]) == 1
    for of in (recipes.arms.truths, recipes.arms.scores):  # it is the same, and so is the run
        assert of(found) == of(made)


@pytest.mark.filterwarnings("ignore:vllm_max_model_length:UserWarning")  # without an engine here
def test_the_7b_config_runs_with_a_reward_model(
    recipes: Any, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command of the README, on a tiny model, tiny data and one process."""
    folder = tmp_path / "chatty"
    shutil.copytree(models["dense"], folder)
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)

    def by_length(completions: list[Any], solution: list[str], **_: Any) -> list[float]:
        return [float(len(completion[0]["content"]) % 2) for completion in completions]

    monkeypatch.setattr(recipes.gsm8k, "load_dataset", lambda *_, split: datasets.Dataset.from_list(GSM8K))
    monkeypatch.setattr(recipes.gsm8k, "accuracy_reward", by_length)
    few = on_a_small_scale(
        tmp_path / "out",
        **{"model_name": folder, "model_init_kwargs": '{"dtype": "float32"}', "lora_r": 4, "learning_rate": 0.01},
        **{"num_generations": 4, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1},
        **{"steps_per_generation": 2, "max_steps": 4, "ref_model_sync_steps": 2, "max_completion_length": 8},
        **{"eval_strategy": "no", "eval_on_start": False, "use_vllm": False, "initial_prompts": 4},
        **{"reward_learning_rate": 0.01},
    )
    by_letter = functools.partial(trl_steady.RewardAdapter, splitter=trl_steady.rewards.by_regex("[a-z]"))
    for objective in ("pointwise", "steps"):
        if objective == "steps":  # a random model writes no blank lines
            monkeypatch.setattr(recipes.deepseekmath_loop, "RewardAdapter", by_letter)
        command = [*few, "--reward_objective", objective]
        results = recipes.deepseekmath_loop.main(
            *parse(recipes, "deepseekmath-7b", *command, folder=FOLDER.parent / "iterative_grpo")
        )
        assert [row["step"] for row in results["reward_refreshes"]] == [0, 2]
        assert recipes.arms.truths(results)[0] == recipes.arms.scores(results)[0] == [1, 3]
        assert moved(tmp_path / "out/adapter", models["dense"])


def run(arm: str, seed: int, greedy: str, start: float = 0.5) -> dict[str, Any]:
    return {
        "seed": seed,
        "objective": {"arm": arm},
        "recipe": {"samples": 2},
        "right answers to each held-out problem": {"sampled": {"after": "0212"}, "greedy": {"after": greedy}},
        "history": [{"step": 1, "reward": 0.1, "reward_model/new/held_out/accuracy": start}],
    }


def test_the_arms_are_compared_problem_by_problem(recipes: Any) -> None:
    runs = [run("frozen", 0, "0100"), run("retrained", 0, "1101"), run("retrained", 1, "1111"), run("rule", 1, "0000")]
    found = recipes.arms.differences(runs)
    pairs = [("rule", "retrained", "1"), ("rule", "retrained", "mean"), ("frozen", "retrained", "0")]
    pairs.append(("frozen", "retrained", "mean"))
    assert list(found) == [(*pair, decoding) for pair in pairs for decoding in ("greedy", "sampled")]
    assert found["frozen", "retrained", "0", "greedy"][:3] == (0.25, 0.75, 0.5)
    assert found["rule", "retrained", "mean", "greedy"] == (0, 1, 1, 1, 1)
    assert "| retrained | frozen | 0 | greedy | 25.0% | 75.0% | +50.0% |" in recipes.arms.table(found)


def test_arms_that_begin_with_different_reward_models_are_refused(recipes: Any) -> None:
    same = [run("frozen", 0, "0"), run("retrained", 0, "0"), run("retrained", 1, "0", 0.7), run("rule", 0, "0", 0.9)]
    recipes.arms.refuse_other_starts(same)
    with pytest.raises(ValueError, match="the arms frozen and without_replay of seed 0 began with different"):
        recipes.arms.refuse_other_starts([*same, run("without_replay", 0, "0", 0.6)])


def test_the_recorded_runs_are_what_the_readme_says(recipes: Any) -> None:
    readme = (FOLDER / "README.md").read_text().replace(" %", "%")
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
        assert f"| `{arm}` | {' | '.join(f'{share:.1%}' for own in shares for share in own)} |" in readme
    assert "43.2%, 39.2% and 37.5% sampled, and 68.5% greedy" in readme
    found = recipes.arms.differences(list(recorded.values()))
    for other in ("frozen", "without_replay", "rule"):
        for way in ways:
            rows = [found[(other, "retrained", seed, way)] for seed in ("0", "1", "2", "mean")]
            cells = [f"{100 * d.difference:+.1f} ({100 * d.low:+.1f} to {100 * d.high:+.1f})" for d in rows]
            assert f"| `retrained` | `{other}` | {way.split()[0]} | {' | '.join(cells)} |" in readme
    _, args = parse(recipes, "smollm2-135m")
    for (arm, seed), own in recorded.items():
        before = [f"{own['accuracy'][way]['before']:.1%}" for way in ways]
        assert before == [("43.2%", "39.2%", "37.5%")[seed], "68.5%"]
        settings = own["objective"]
        assert settings["arm"] == arm and own["seed"] == seed
        names = recipes.deepseekmath_loop.OBJECTIVE
        assert {name: settings[name] for name in names} == {name: getattr(args, name) for name in names}


def test_the_picture_of_the_arms_has_its_legend_beside_the_lines(
    recipes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(recipes.report.plt, "close", figures.append)
    recipes.arms.main(str(tmp_path / "arms.png"), *map(str, sorted(FOLDER.glob("results/*.json"))))
    (figure,) = figures
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        f"{arm.replace('_', ' ')} (mean of 3)" for arm in recipes.arms.ARMS
    ]
    place = legend.get_window_extent()
    assert place.x0 > 0 and place.x1 < figure.bbox.width
    assert all(axis.get_legend() is None and axis.get_window_extent().y0 > place.y1 for axis in figure.axes)
