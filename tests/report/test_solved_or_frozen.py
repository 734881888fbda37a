"""Runs that train on solved problems, and runs whose weights stay. Somebody who did not know the report made two."""

from pathlib import Path
from typing import Any

import pytest

from trl_steady.report import History, diagnose

LOGS = Path(__file__).parents[1] / "data" / "sick"


def heads(given: History) -> list[str]:
    """Return the names of what a run shows, causes only."""
    return [finding.symptom.name for finding in diagnose(given)[0] if finding.passed is None and not finding.cause]


def test_a_run_on_solved_problems_is_told_so() -> None:
    """Its data stand in order and are not shuffled: it sees easy sums only, and held-out accuracy stays at 20 %."""
    run = History.read(LOGS / "easy-problems-only.jsonl")
    (finding,) = diagnose(run)[0]
    assert finding.symptom.name == "groups-all-right" and "0.84 on average" in finding.evidence
    assert "harder problems" in finding.advice


def solved(wasted: float, start: float, end: float, rows: int = 60) -> list[dict[str, Any]]:
    """Return a log whose reward goes from `start` to `end`."""
    log: list[dict[str, Any]] = []
    for step in range(1, rows + 1):
        reward = start + (end - start) * step / rows
        reward += 0.005 * (-1) ** step
        log.append({"step": step, "reward": reward, "frac_reward_zero_std": wasted, "grad_norm": 1.0})
    return log


@pytest.mark.parametrize(
    ("rows", "settings", "is_found"),
    [
        (solved(0.8, 0.95, 0.96), {}, True),
        (solved(0.7, 0.95, 0.96), {}, False),  # three in ten groups teach
        (solved(0.8, 0.7, 0.98), {}, False),  # it has learnt this
        (solved(0.8, 0.98, 0.8), {}, False),  # it has lost it
        (solved(0.8, 0.95, 0.96, rows=9), {}, False),
        (solved(0.8, 0.95, 0.96), {"num_generations": 1}, False),  # a group of PPO can be one answer
        (solved(0.8, 1.9, 1.91), {}, False),  # the best reward is not known
        (solved(float("nan"), 0.95, 0.96), {}, False),
        # the format is right, and the answer is not: the best sum is 2
        (
            [{**row, "rewards/form/mean": 0.95, "rewards/right/mean": 0.01} for row in solved(0.8, 0.95, 0.96)],
            {},
            False,
        ),
    ],
)
def test_solved_problems_are_named_if_they_are_solved_all_along(
    rows: list[dict[str, Any]], settings: dict[str, Any], is_found: bool
) -> None:
    assert ("groups-all-right" in heads(History(rows, {"settings": settings}))) is is_found


def test_a_run_whose_weights_stay_is_asked_for_its_optimizer() -> None:
    """The optimizer was made before PEFT wrapped the model, so that it holds frozen weights only."""
    file = LOGS / "optimizer-of-frozen-weights.jsonl"
    (finding,) = diagnose(History.read(file))[0]
    assert finding.symptom.name == "reward-flat"
    assert "does the optimizer hold" in finding.advice


@pytest.mark.parametrize(
    ("change", "settings"),
    [({"kl": 1e-6}, {}), ({"grad_norm": 0.0}, {}), ({"kl": None}, {}), ({}, {"beta": 0})],  # Unsloth logs 0 then
)
def test_other_flat_runs_are_not_asked_for_it(change: dict[str, float | None], settings: dict[str, Any]) -> None:
    run = History.read(LOGS / "optimizer-of-frozen-weights.jsonl")
    rows = [
        {"step": int(step), **{key: run[key].values[place] for key in run.keys}, **change}
        for place, step in enumerate(run["reward"].steps)
    ]
    findings = diagnose(History(rows, {"settings": settings}))[0]
    assert findings and not any("does the optimizer hold" in finding.advice for finding in findings)
