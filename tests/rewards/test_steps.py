"""What a reward function may return, and ways to make one that returns it."""

import asyncio
import functools
import inspect
import math
import re
from typing import Any

import numpy as np
import pytest
import torch

from trl_steady import StepRewards, rewards


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (([1.0], [1, 2]), r"1 values and 2 ends"),
        (([1.0, math.nan], [1, 2]), r"values=\(1\.0, nan\)\. Give finite"),
        (([math.inf], [1]), r"values=\(inf,\).* return None"),
        (([1.0, 1.0], [2, 2]), r"ends=\(2, 2\)\. Give exclusive ends that increase"),
        (([1.0], [0]), r"ends=\(0,\)"),
    ],
)
@pytest.mark.parametrize("make", [StepRewards, StepRewards.at_tokens])
def test_steps_that_are_none_are_refused_where_they_are_made(make: Any, given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(*given)
    with pytest.raises(ValueError, match=r"unit=.words.*StepRewards\.at_tokens"):
        StepRewards([1.0], [1], unit="words")


def test_numbers_may_be_numpys_or_torchs() -> None:
    steps = StepRewards(torch.tensor([0.5, 1.0]), np.array([3, 7]))  # type: ignore[arg-type]
    assert steps == StepRewards([0.5, 1.0], [3, 7]) and steps.total == 1.5
    assert StepRewards([], []).total == 0.0
    assert StepRewards.per_turn([0.1] * 10).total == 1.0  # not 0.9999999999999999


LINES = rewards.by_regex(r"\n")
SPLIT = [  # a separator closes the last step
    (LINES, "a\nb\nc", ["a\n", "b\n", "c"], False),
    (LINES, "a\nb\n", ["a\n", "b\n"], True),
    (LINES, "a\n  ", ["a\n"], True),
    (LINES, "\na", ["\na"], False),
    (LINES, "\n\na\n\n\nb", ["\n\na\n", "\n\nb"], False),  # a blank piece goes to the step after it
    (LINES, "", [], False),
    (LINES, " \n \n", [], False),
    (rewards.by_regex(re.compile("end", re.IGNORECASE)), "aEND b", ["aEND", " b"], False),
    (rewards.by_regex("x*"), "ab", ["a", "b"], True),  # matches of nothing cut, and do not make steps of nothing
    (rewards.by_blank_line(), "a\n \t\n\n\nb\n\n", ["a\n \t\n", "\n\nb\n\n"], True),
]


@pytest.mark.parametrize(("splitter", "text", "expected", "closed"), SPLIT)
def test_splitters(splitter: Any, text: str, expected: list[str], closed: bool) -> None:
    steps = splitter(text)
    assert list(steps.texts) == expected
    assert steps == splitter([{"role": "assistant", "content": text}])
    rewarded = steps.rewards([1.0] * len(expected))
    assert rewarded.closed is steps.closed is closed
    starts = (0, *rewarded.ends)
    assert [text[a:b] for a, b in zip(starts, rewarded.ends, strict=False)] == expected


CONVERSATION = [
    {"role": "assistant", "content": "Let me look.", "tool_calls": [{}]},
    {"role": "tool", "name": "look", "content": "4"},
    {"role": "assistant", "content": [{"type": "text", "text": "It is 4."}]},
]


def test_turns_are_steps() -> None:
    steps = rewards.by_turn()(CONVERSATION)
    assert list(steps.texts) == ["Let me look.", "It is 4."]
    assert steps.rewards([0.0, 1.0]) == StepRewards.per_turn([0.0, 1.0])
    with pytest.raises(ValueError, match=r"conversation of 3 messages.*Use by_turn"):
        rewards.by_blank_line()(CONVERSATION)


def test_a_scorer_sees_all_steps_at_once_and_what_trl_gives() -> None:
    seen: dict[str, Any] = {}

    def judge(**given: Any) -> list[list[float]]:
        seen.update(given)
        return [[float(len(step)) for step in row] for row in given["steps"]]

    reward = rewards.scored_steps(judge, rewards.by_regex(r"\n"))
    given = {"prompts": ["p", "q"], "completions": ["a\nbb", ""], "answer": [1, 2]}
    assert reward(**given) == [StepRewards([2.0, 2.0], [2, 4]), StepRewards([], [])]
    assert seen == {**given, "steps": [["a\n", "bb"], []]}
    assert reward.__name__ == "judge"  # under which TRL logs it
    # a column of the same name, as data of process reward models have it
    judged = reward(prompts=["p"], completions=["a\nbb"], steps=[["gold"]])
    assert judged == [StepRewards([2.0, 2.0], [2, 4])] and seen["steps"] == [["a\n", "bb"]]


def test_a_scorer_may_be_async_and_may_be_silent() -> None:
    class Judge:
        async def __call__(self, steps: list[list[str]], **_: Any) -> list[list[float] | None]:
            return [None if len(row) > 1 else [0.5] * len(row) for row in steps]

    async def judge(steps: list[list[str]], **_: Any) -> list[list[float] | None]:
        return await Judge()(steps)

    partials = ((functools.partial(judge), "judge"), (functools.partial(functools.partial(Judge())), "Judge"))
    for scorer, name in ((judge, "judge"), (Judge(), "Judge"), *partials):
        reward: Any = rewards.scored_steps(scorer, rewards.by_regex(r"\n"))
        result = asyncio.run(reward(prompts=["p", "q"], completions=["a\nb", "a"]))
        assert result == [None, StepRewards([0.5], [1])]
        assert reward.__name__ == name and inspect.iscoroutinefunction(reward)


@pytest.mark.parametrize("scores", [[[1.0, 1.0]], [[1.0, 1.0], [1.0, 1.0]]])
def test_scores_that_do_not_fit_are_refused(scores: list[list[float]]) -> None:
    reward = rewards.scored_steps(lambda **_: scores, rewards.by_regex(r"\n"), name="judge")
    with pytest.raises(ValueError, match=r"shorter|2 values and 1 ends"):
        reward(prompts=["p", "q"], completions=["a\nb", "c"])
