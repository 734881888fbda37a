"""The verdict on a run: too few rollouts, what is critical at once, and what has passed."""

import math

import pytest

from tests.report.runs import healthy, history
from trl_steady.report import History, diagnose
from trl_steady.report.symptoms import look, verdict

LITTLE = [{"step": step, "reward": 0.25 * step, "reward_std": 0.1, "grad_norm": 1.0} for step in (1, 2)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, "2 rollouts: too few to judge"),
        ({"reward": 0.0, "reward_std": 0.0, "grad_norm": 0.0}, "the reward never changes"),
        ({"reward": None}, "there is no reward"),
        ({"grad_norm": 0.0}, "the gradient is 0"),
        ({"grad_norm": math.nan}, "not a number"),
    ],
)
def test_a_run_of_two_rollouts_is_never_called_healthy(change: dict[str, float | None], said: str) -> None:
    findings = diagnose(History([{**row, **change} for row in LITTLE]))[0]
    first = verdict(findings).splitlines()[min(len(change), 1)]
    assert said in first and ("critical" in first) == bool(change)
    # a run that goes on may still learn
    assert look(History([LITTLE[0]], is_over=False))[0].keys() <= {"too-few-rollouts"}


def test_a_total_that_stays_while_its_groups_differ_is_no_constant_reward() -> None:
    """A reward by rank within the group has one mean."""
    assert not look(History([{**row, "reward": 0.5, "step": i} for i, row in enumerate(LITTLE * 20)]))[0]


def test_a_symptom_that_passed_is_told_with_its_end_and_is_no_headline() -> None:
    rows = healthy(0)
    for row in rows:
        if 100 < row["step"] <= 160 and "reward" in row:
            row |= {"reward": math.nan, "rewards/reward_model/mean": math.nan}
    (found,) = diagnose(history(rows))[0]
    assert found.symptom.name == "reward-missing" and found.since == 101 and found.passed is not None
    # five good rollouts outweigh fifteen bad ones, and a look is at most 5 % late
    assert 160 < found.passed <= 180 * 1.06 and f"passed at step {found.passed}: there is no reward" in verdict(
        [found]
    )
    assert verdict([found]).startswith("symptoms: 0") and look(history(rows))[0] == {}


@pytest.mark.parametrize(
    ("evaluation", "is_shown"),
    [
        ({}, False),
        ({"eval_reward": 0.5}, True),
        ({"eval_accuracy": 0.5}, True),
        ({"held-out greedy accuracy": 0.5}, True),
    ],
)
def test_a_log_without_an_evaluation_is_said_to_have_none(evaluation: dict[str, float], is_shown: bool) -> None:
    """A training reward that rises may be exploited, and only an evaluation shows it."""
    rows = [{**row, **evaluation, "step": step} for step, row in enumerate(LITTLE * 6, start=1)]
    first = verdict(diagnose(History(rows))[0]).splitlines()[0]
    assert ("held-out (needs eval_strategy)" in first) is not is_shown
