"""The task of the recipe process_rewards: which lines are right, what they earn, and that problems are kept apart."""

from pathlib import Path
from typing import Any

import pytest

import trl_steady

SUM = (17, 25, 28, 14)  # 42, 70, 84
RIGHT = "17+25=42\n42+28=70\n70+14=84"
LINES = {
    "right": (RIGHT, [True, True, True]),
    "a wrong sum, and the next line goes on from it": ("17+25=41\n41+28=69\n69+14=83", [False, True, True]),
    "a wrong sum, and the next line does not": ("17+25=41\n42+28=70\n70+14=84", [False, False, True]),
    "a wrong last sum": ("17+25=42\n42+28=70\n70+14=85", [True, True, False]),
    "a wrong number": ("17+25=42\n42+14=56\n56+28=84", [True, False, False]),
    "an extra line": (RIGHT + "\n84+10=94", [True, True, False, False]),
    "the first line three times": ("17+25=42\n17+25=42\n17+25=42", [True, False, False]),
    "a line left out": ("17+25=42\n70+14=84", [True, False]),
    "text at the end": (RIGHT + " done", [True, True, False]),
    "a blank line": ("17+25=42\n\n42+28=70\n70+14=84", [True, False, False]),
    "a zero before a sum": ("17+25=042\n042+28=70\n70+14=84", [False, True, True]),
    "cut in the last line": (RIGHT[:-1], [True, True, False]),
    "none": ("", []),
}


@pytest.mark.parametrize(("text", "right"), LINES.values(), ids=LINES)
def test_each_line_of_a_sum_is_verified(recipes: Any, text: str, right: list[bool]) -> None:
    assert recipes.sums.right_lines(SUM, text) == right
    whole = text == RIGHT
    task = recipes.sums.Sums("steps", Path())
    for end in ("", recipes.sums.END, recipes.sums.END * 3):
        assert task.is_right(SUM, text + end) is whole
    assert recipes.sums.outcome_reward(SUM, text) == whole
    steps = recipes.sums.step_rewards(SUM, text)
    assert list(steps.values) == [share / 3 for share in right]
    assert list(steps.ends)[-1:] == ([len(text)] if text else [])
    assert steps.total == 1 if whole else steps.total <= 2 / 3  # nothing earns as much as the right answer


def test_the_two_rewards_differ_in_what_is_rewarded_only(recipes: Any) -> None:
    logged: list[tuple[str, float]] = []

    def reward(rewards: str) -> list[Any]:
        task = recipes.sums.Sums(rewards, Path())
        return task.reward([RIGHT, LINES["a wrong last sum"][0]], [list(SUM)] * 2, lambda *row: logged.append(row))

    steps, outcomes = reward("steps"), reward("outcome")
    assert outcomes == [1.0, 0.0]
    assert steps[0].total == 1.0 and steps[1].total == pytest.approx(2 / 3)
    assert isinstance(steps[0], trl_steady.StepRewards)
    assert logged == [("right", 0.5), ("right_lines", pytest.approx(5 / 6))] * 2


def test_no_held_out_sum_has_the_numbers_of_another_problem(recipes: Any) -> None:
    task = recipes.sums.Sums("steps", Path())
    train, test = task.split(200)
    worked = recipes.sums.draw(recipes.sums.WORKED)
    numbers = [tuple(sorted(problem)) for problem in (*worked, *train, *test)]
    assert (len(worked), len(train), len(test)) == (160, 2000, 200) and len(set(numbers)) == len(numbers)
    assert any(problem != tuple(sorted(problem)) for problem in test) and task.split(200) == (train, test)
    # right_answers puts prompts side by side without padding
    assert {len(task.prompt(problem)) for problem in (*train, *test)} == {len(task.prompt(SUM))}
