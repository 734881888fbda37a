"""The report reads and names what it missed in a blind test on 45 public logs. Rows have the shapes of those logs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trl_steady.report import History, diagnose

Row = dict[str, Any]


def named(given: History) -> dict[str, str]:
    """Return the symptoms of a run, each with its advice."""
    findings = diagnose(given)[0]
    return {finding.symptom.name: finding.advice for finding in findings if finding.passed is None}


def test_a_script_that_counts_its_steps_and_separates_metrics_by_bars_is_read(tmp_path: Path) -> None:
    lines = ["[math100] 800 examples, 40 unique problems", "[math100]   -> ckpt s25"]
    lines += [f"[math100] {step:3}/100 | loss={-0.1 * step:.4f} | reward={step / 100:.3f}" for step in range(1, 41)]
    file = tmp_path / "train.log"
    file.write_text("\n".join(lines))
    run = History.read(file)
    assert run.last_step == 40 and run.settings["max_steps"] == 100
    assert [*run["reward"].values[:3]] == [0.01, 0.02, 0.03] and [*run["loss"].values[:2]] == [-0.1, -0.2]


@pytest.mark.parametrize(
    "line",
    [
        "Files 3/100 | done",
        "  3/100 | a table of text | more",
        "3/100 | x=1",
        "[eval] 1/4 | acc=0.3 | reward=0.9 | n=20",
        "Evaluating 8/8 | loss: 0.1 | reward: 0.9 | n: 20",
        "sample 2/4 | len=20 | reward=0.9 | time=3",
        "answer 2/4 | len=20 | reward=0.9 | time=3",
        "Epoch 1/3 | loss=0.1 | reward=0.9",
    ],
)
def test_other_counts_are_no_records(line: str, tmp_path: Path) -> None:
    file = tmp_path / "train.log"
    rows: list[str] = []
    for step in range(1, 31):
        rows += [f"Step {step}/30 | Loss 0.1 | Reward 0.5 | KL 0.01", line]
    file.write_text("\n".join(rows))
    run = History.read(file)
    assert run.last_step == 30 and [*run["reward"].values] == [0.5] * 30


def test_one_name_of_a_framework_in_a_script_of_ones_own_is_no_log_of_it(tmp_path: Path) -> None:
    """OpenRLHF has `group_reward_std`, but no `mean_reward`."""
    row = {"mean_reward": 0.5, "group_reward_std": 0.3, "loss": 0.1, "frac_reward_zero_std": 0.25, "reward_std": 0.4}
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps({"step": step, **row}) + "\n" for step in range(1, 31)))
    run = History.read(file)
    assert run.framework == "TRL" and [*run["reward"].values[:2]] == [0.5, 0.5]


def test_reward_functions_of_an_export_without_slashes_are_read(tmp_path: Path) -> None:
    names = "step,reward,reward_std,completions_mean_length,completions_clipped_ratio,clip_ratio_low_mean,kl,"
    names += "rewards_format_reward_func_mean,rewards_format_reward_func_std,rewards_length_func_mean"
    random = np.random.default_rng(0)
    rows = [
        f"{step},{value:.4f},0.3,376.6,0.25,0.0,0.001,0.0,0.0,{value:.4f}"
        for step, value in enumerate(random.normal(-0.6, 0.2, 60), start=1)
    ]
    file = tmp_path / "metrics.csv"
    file.write_text("\n".join([names, *rows]))
    run = History.read(file)
    assert {"rewards/format_reward_func/mean", "rewards/format_reward_func/std"} <= run.keys
    assert "rewards/length_func/mean" in run.keys and "reward-part-constant" in named(run)


def spread(zeros: float, **others: float) -> list[Row]:
    """Return a log of old TRL in which this share of the rollouts has no spread in its groups."""
    random = np.random.default_rng(1)
    log: list[Row] = []
    for step in range(1, 61):
        has_none = (step % 10) < 10 * zeros
        reward = random.choice([0.0, 1.0]) if has_none else 0.5
        log.append({"step": step, "reward": reward, "reward_std": 0.0 if has_none else 0.5, "loss": 0.1, **others})
    return log


@pytest.mark.parametrize(
    ("rows", "is_found"),
    [
        (spread(0.9), True),
        (spread(0.7), False),
        (spread(0.9)[:15], False),
        (spread(0.9)[:40] + spread(0.0)[40:], False),  # they differ again
        (spread(0.9, frac_reward_zero_std=0.2), False),  # which counts groups, and not rollouts
        (spread(0.9, **{"value/explained_variance": 0.5}), False),  # a group of PPO can be one answer
        ([{**row, "reward_std": 0.0} for row in spread(0.9)], False),  # nor does a loop of one's own log a spread
        ([{**row, "reward": 0.9 + 0.1 * (row["reward"] > 0)} for row in spread(0.9)], False),  # they are all right
    ],
)
def test_groups_are_alike_if_old_logs_have_no_spread(rows: list[Row], is_found: bool) -> None:
    assert ("groups-alike" in named(History(rows))) is is_found


def rare(zeros: float, steps: int = 100) -> list[Row]:
    """Return a log whose reward is 0 in this share of the steps, and 0.25 in the others."""
    random = np.random.default_rng(2)
    return [
        {"step": step, "reward": 0.0 if random.random() < zeros else 0.25, "loss": 0.0} for step in range(1, steps)
    ]


@pytest.mark.parametrize(
    ("rows", "is_found"),
    [
        (rare(0.9), True),
        ([*rare(0.9), {"step": 100, "reward": 1.0, "loss": 0.0}], True),  # a lucky rollout
        (rare(0.6), False),
        (rare(0.95, 70) + [{**row, "step": row["step"] + 70} for row in rare(0.5, 31)], False),  # it begins to learn
        (rare(1.0, 90) + [{**row, "step": row["step"] + 90} for row in rare(0.0, 12)], False),  # so does this
        (
            [{**row, "step": row["step"] - 18, "reward": 0.5} for row in rare(0.9, 18)] + rare(1.0),
            False,
        ),  # it was better
    ],
)
def test_rewards_that_are_nearly_always_0_are_named(rows: list[Row], is_found: bool) -> None:
    assert ("groups-all-wrong" in named(History(rows))) is is_found


def shrinking(reward: tuple[float, float], length: tuple[float, float], steps: int = 60) -> list[Row]:
    """Return a log whose reward and length of answers go from one value to another."""
    random = np.random.default_rng(3)
    log: list[Row] = []
    for step in range(1, steps + 1):
        done = step / steps
        log.append(
            {
                "step": step,
                "reward": reward[0] + (reward[1] - reward[0]) * done**3 + random.normal(0, 0.02),
                "reward_std": 0.2,
                "completions/mean_length": length[0] * (length[1] / length[0]) ** done,
            }
        )
    return log


@pytest.mark.parametrize("reward", [(0.6, 0.05), (0.6, 0.5)], ids=["lost", "slowly"])
@pytest.mark.parametrize(("length", "shrinks"), [((350.0, 20.0), True), ((350.0, 200.0), False)])
def test_a_reward_that_falls_while_answers_shrink_is_asked_whether_it_pays_for_that(
    reward: tuple[float, float], length: tuple[float, float], shrinks: bool
) -> None:
    found = named(History(shrinking(reward, length)))
    assert found.keys() & {"reward-falls", "reward-flat"}
    assert any("pay for short ones" in advice for advice in found.values()) is shrinks
