"""The recipe with a teacher: its prompts and examples, and a small run of each arm."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.project import recipe

FOLDER = recipe.FOLDER / "teacher"
PLAN = yaml.safe_load((FOLDER / "digits.yaml").read_text())
FEW = {"max_steps": 2, "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 4}


def test_the_solution_stands_before_the_problem(recipes: Any) -> None:
    task = recipes.teacher.SolvedDigits(Path("none"))
    problem = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3)
    assert task.prompt(problem) == "<s>3141592653:"
    assert task.solved_prompt(problem) == "<s>1123345569:3141592653:"


def test_nobody_has_read_a_held_out_problem(recipes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither policy nor teacher has, nor one of the training's."""
    monkeypatch.setattr(recipes.digits, "WORKED_STEPS", 3)
    monkeypatch.setattr(recipes.digits, "TRAINING", 500)
    monkeypatch.setattr(recipes.teacher, "TEACHER_STEPS", 4)
    assert PLAN["measured"]["held_out"] == recipes.teacher.HELD_OUT
    policy, teacher = recipes.teacher.SolvedDigits(Path("none")), recipes.teacher.TeacherDigits(Path("none"))
    training, held_out = policy.split(recipes.teacher.HELD_OUT)
    asked = {policy.prompt(problem)[-11:] for problem in (*training, *held_out)}
    read = [{prompt[-11:] for prompt, _ in task.worked()} for task in (policy, teacher)]
    assert [len(each) for each in read] == [3 * 128, 4 * 128] and len(asked) == 700
    assert all(not asked & each for each in read) and not read[0] & read[1]


def test_a_batch_of_worked_examples_has_one_length(recipes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes.digits, "WORKED_STEPS", 3)
    examples = recipes.teacher.SolvedDigits(Path("none")).worked()
    lengths = [{len(prompt) for prompt, _ in examples[i : i + 128]} for i in range(0, len(examples), 128)]
    assert lengths == [{14}, {25}] * 3


@pytest.mark.slow
@pytest.mark.parametrize("name", PLAN["arms"])
def test_an_arm_runs(digits: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(digits.teacher, "TEACHER_STEPS", 2)
    arm = digits.experiment.arms({**PLAN, "options": {**PLAN["options"], **FEW}}, digits.teacher.Arm)[name]
    digits.teacher.prepare(arm, tmp_path)
    figures = digits.teacher.train(arm, 0, tmp_path, {"held_out": 4, "samples": 1, "every": 1})
    assert len(figures["accuracy"]) == 3 and len(figures["reward"]) >= 1
    assert ("teacher/kl" in figures) == (arm.teacher is not None)
    assert arm.rewards or set(figures["reward"]) == {0.0}


def test_the_table_of_answers_is_linear_between_checks(recipes: Any) -> None:
    """At its end, the baseline has 60 %. Another arm gets there in the middle of two checks, or never."""
    plan = {"baseline": "rewards", "options": {"per_device_train_batch_size": 64}}
    curves = {
        "rewards": [{"0": 0.2, "16": 0.5, "32": 0.5}, {"0": 0.4, "16": 0.5, "32": 0.7}],
        "early": [{"0": 0.3, "16": 0.5, "32": 0.7}],
        "never": [{"0": 0.3, "16": 0.5, "32": 0.59}],
    }
    runs = {arm: {seed: {"accuracy": own} for seed, own in enumerate(of_seeds)} for arm, of_seeds in curves.items()}
    rows = recipes.teacher.answers_table(plan, runs).splitlines()[2:]
    assert rows == ["| rewards | 32 | 2,048 |", "| early | 24 | 1,536 |", "| never | not reached | |"]


def test_the_recorded_runs_are_what_the_readme_says(recipes: Any) -> None:
    recorded = json.loads((FOLDER / "results/digits.json").read_text())
    assert recorded["settings"] == PLAN
    assert {name: len(own) for name, own in recorded["runs"].items()} == dict.fromkeys(PLAN["arms"], 10)
    readme = (FOLDER / "README.md").read_text()
    assert recipes.experiment.table(PLAN, recorded["runs"]) in readme
    starts = [own["accuracy"]["0"] for runs in recorded["runs"].values() for own in runs.values()]
    assert re.search(rf"gets\s+{100 * sum(starts) / len(starts):.1f} %", readme)
    found = recipes.teacher.answers_table(PLAN, recorded["runs"])
    assert "| teacher alone | not reached | |" in found
    updates = [
        int(number) for number in re.findall(r"^\| (?:rewards|self), \w+ \| (\d+) \|", found, flags=re.MULTILINE)
    ]
    assert len(updates) == 4 and f"after {min(updates)} to {max(updates)} updates" in readme
