"""The recipe with a tool: what its turns earn, a small run of each arm, and what was recorded."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.project import recipe
from trl_steady import GRPOConfig

FOLDER = recipe.FOLDER / "tools"
PLAN = yaml.safe_load((FOLDER / "drawers.yaml").read_text())


def answer(number: object) -> dict[str, Any]:
    return {"role": "assistant", "content": str(number)}


def found(number: object) -> dict[str, Any]:
    return {"role": "tool", "name": "open", "content": str(number)}


def test_a_turn_is_right_given_what_the_tool_said_before(recipes: Any) -> None:
    call, right_turns = recipes.drawers.call, recipes.drawers.right_turns
    begin = [call(11), found(6), call(10), found(2)]  # 3 + 8, 6 + 4
    whole = [*begin, call(9), found(5), answer(7)]
    cases: dict[str, tuple[list[dict[str, Any]], list[bool]]] = {
        "right": (whole, [True] * 4),
        "wrong first call": ([call(12), found(6), *whole[2:]], [False, True, True, True]),
        "wrong answer": ([*whole[:-1], answer(8)], [True, True, True, False]),
        "the right number too early": ([answer(7)], [False]),
        "an answer in place of a call": ([*begin, answer(9)], [True, True, False]),
        "words beside the answer": ([*whole[:-1], answer("7!")], [True, True, True, False]),
        "words beside a call": ([{**call(11), "content": "so"}, *whole[1:]], [False, True, True, True]),
        "a fifth turn": ([*whole[:-1], call(7), found(1), answer(7)], [True, True, True, False, False]),
        "two calls at once": (
            [{**call(11), "tool_calls": call(11)["tool_calls"] * 2}, found(6), found(6), *whole[2:]],
            [False, True, True, True],
        ),
    }
    for name, (completion, expected) in cases.items():
        assert right_turns("38472", completion) == expected, name
        earned = recipes.drawers.turn_rewards("38472", completion)
        assert earned.values == tuple(right / 4 for right in expected) and earned.unit == "turns"
        assert recipes.drawers.outcome_reward("38472", completion) == (name == "right")


def test_worked_examples_are_right_and_no_question_is_in_two_sets(recipes: Any) -> None:
    drawers = recipes.drawers
    train, held_out, worked = drawers.split(200)
    assert len({*train, *held_out, *worked}) == len(train) + 200 + len(worked)
    for question in held_out[:20]:
        assert drawers.outcome_reward(question, drawers.worked(question)) == 1
        chest = drawers.Drawers()
        chest.reset(question=question)
        first = drawers.worked(question)[1]["content"]
        assert str(chest.open(int(question[0]) + int(question[1]))) == first
    flawed = [drawers.outcome_reward(question, drawers.worked(question, 0.2)) for question in held_out]
    assert 0.2 < sum(flawed) / 200 < 0.8


@pytest.mark.slow
def test_an_arm_with_rewards_of_turns_runs(recipes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes.drawers, "WORKED_STEPS", 120)  # enough for calls
    monkeypatch.setattr(recipes.drawers, "FLAWED_STEPS", 20)
    monkeypatch.setattr(recipes.drawers, "LEARNING_RATE", 5e-3)
    few = {"max_steps": 2, "per_device_train_batch_size": 8, "eval_steps": 2, "per_device_eval_batch_size": 4}
    options = {**PLAN["options"], **PLAN["arms"]["turns"]["options"], **few}
    figures = recipes.tools.train(recipes.tools.Arm(options, "turns"), 0, tmp_path, {"held_out": 4})
    assert len(figures["accuracy"]) == 2 and len(figures["right"]) == 1
    assert figures["tools/call_frequency"][0] > 0


def test_grpo_cannot_train_on_one_completion_of_a_prompt(tmp_path: Path) -> None:
    """As the README says."""
    with pytest.raises(ValueError, match="at least 2 generations"):
        GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, num_generations=1)


def test_the_recorded_runs_are_what_the_readme_says(recipes: Any) -> None:
    recorded = json.loads((FOLDER / "results/drawers.json").read_text())
    assert recorded["settings"] == PLAN
    assert {name: len(own) for name, own in recorded["runs"].items()} == dict.fromkeys(PLAN["arms"], 8)
    readme = (FOLDER / "README.md").read_text()
    assert recipes.experiment.table(PLAN, recorded["runs"]) in readme
    starts = [own["accuracy"]["0"] for runs in recorded["runs"].values() for own in runs.values()]
    assert re.search(rf"rise\s+from\s+{100 * sum(starts) / len(starts):.1f} %", readme)
