"""Public logs that others have written, and how well the report judges them. The figures may only get better."""

import tomllib
from collections import Counter
from pathlib import Path

import pytest
from benchmarks import diagnosis
from benchmarks.diagnosis import REAL, judge_real_logs, judged_log, real_logs

from trl_steady.report import History

ROOT = Path(__file__).parents[2]
PRECISION = 1.0
"""Least share of the heads of all verdicts that are true."""
TRUE_HEADS = 24
"""Least number of heads that are true: a report that says nothing is precise too."""
CAUSES = 18
"""Least number of sick logs in which one of the right diagnoses is named."""
CAUSES_OR_EFFECTS = 18
"""Least number of sick logs in which one of them is named, or something else that is true."""
WELL_FALSE = 0
"""Most well logs with a head that is not true."""
WELL_CRITICAL = 0
"""Most well logs of which something critical was said at any look while they trained."""


def test_real_logs_are_judged_at_least_as_well_as_before() -> None:
    total = judge_real_logs()
    assert total["sick"] == 19 and total["well"] == 25
    assert total["true heads"] / total["heads"] >= PRECISION
    assert total["true heads"] >= TRUE_HEADS
    assert total["cause"] >= CAUSES and total["cause or effect"] >= CAUSES_OR_EFFECTS
    assert total["well, false"] <= WELL_FALSE and total["well, critical"] <= WELL_CRITICAL


def test_each_real_log_has_a_label() -> None:
    assert {*real_logs()} == {*REAL} and len(REAL) == 48
    assert {about["kind"] for about in REAL.values()} >= {
        "healthy",
        "broken",
        "flat",
        "cut-off",
        *diagnosis.NOT_JUDGED,
    }
    for about in REAL.values():
        is_sick = about["kind"] not in ("healthy", *diagnosis.NOT_JUDGED)
        assert bool(about["must"]) == is_sick or about["kind"] in diagnosis.NOT_JUDGED
    said = {word for about in REAL.values() for key in ("must", "may") for word in about[key].split()}
    assert said <= {*diagnosis.LEVELS}


@pytest.mark.parametrize(
    ("kind", "must", "may", "counted"),
    [
        ("broken", "reward-constant", "", {"heads": 1, "true heads": 1, "sick": 1, "cause": 1, "cause or effect": 1}),
        ("broken", "kl-rises", "reward-constant", {"heads": 1, "true heads": 1, "sick": 1, "cause or effect": 1}),
        ("broken", "kl-rises groups-all-wrong", "", {"heads": 1, "sick": 1, "cause": 1, "cause or effect": 1}),
        ("healthy", "", "", {"heads": 1, "well": 1, "well, false": 1, "well, critical": 1}),
        ("healthy", "", "reward-constant", {"heads": 1, "true heads": 1, "well": 1, "well, critical": 1}),
    ],
)
def test_heads_causes_and_false_alarms_are_counted(kind: str, must: str, may: str, counted: dict[str, int]) -> None:
    """A reward of 0 in each answer: it never changes, and so all groups are all wrong."""
    rows = [{"step": step, "reward": 0.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0} for step in range(1, 25)]
    counts, _ = judged_log({"kind": kind, "must": must, "may": may}, History(rows))
    assert counts == counted


def test_the_figures_of_the_blind_test_are_those_of_its_labels() -> None:
    labels = tomllib.loads((ROOT / "tests/data/blind_logs.toml").read_text()).values()
    said = Counter((label["verdict"], label["said"]) for label in labels)
    sick = sum(count for (verdict, _), count in said.items() if verdict == "sick")
    unread = sum(count for (_, what), count in said.items() if what == "unread")
    misread = sum(count for (_, what), count in said.items() if what == "misread")
    judged = sick - said["sick", "unread"] - said["sick", "misread"]
    page = " ".join((ROOT / "docs/report.md").read_text().split()).replace("Six of", "six of")
    words = {2: "two", 3: "three", 6: "six"}
    assert f"{words[unread]} of {said.total()} further logs could not be read, and {words[misread]} were read" in page
    assert f"in {said['sick', 'cause']} of the other {judged} sick runs, and something true in three more" in page
    assert words[said["sick", "part"]] == "three" and f"{sick} of these 45 logs were sick, and 15 well" in page
    assert f"it named {said['sick', 'cause']} of {sick} causes" in (ROOT / "README.md").read_text()
