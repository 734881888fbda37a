"""The table of recorded runs is whole, and the diagnosis says what it must; benchmarks/diagnosis.py shows it."""

import pytest
from benchmarks import diagnosis

from tests.report.runs import recorded


def test_each_run_of_the_table_has_a_log_and_its_symptoms_have_levels() -> None:
    runs = {**diagnosis.RUNS, **diagnosis.TABLE["recipes"]}
    assert len(diagnosis.TABLE["healthy"]) >= 20 and len(diagnosis.TABLE["sick"]) >= 20
    assert {*diagnosis.logs()} == {*diagnosis.RUNS} and diagnosis.LOGS.stat().st_size < 400_000
    assert {*diagnosis.TABLE["recipes"]} <= {*recorded(diagnosis.ROOT)}
    said = {word for about in runs.values() for key in ("must", "may") for word in diagnosis.names(about, key)}
    assert {name for word in said for name in word.split("|")} <= {*diagnosis.LEVELS}
    assert not [name for name, about in diagnosis.TABLE["sick"].items() if not about.get("must")]


def test_what_is_said_is_compared_with_what_must_and_may_be_said() -> None:
    about = {"must": "gradient-zero kl-rises|kl-holds", "may": "@collapse"}
    found = ["kl-holds", "answers-grow", "option-idle"]
    assert diagnosis.judged(about, found) == {
        "said": ["kl-rises|kl-holds"],
        "missed": ["gradient-zero"],
        "false": ["option-idle"],
    }


@pytest.mark.slow
def test_the_diagnosis_finds_nearly_all_faults_and_accuses_no_healthy_run() -> None:
    rates = diagnosis.evaluate()
    assert min(rates["critical"]) == 1.0 and min(rates["all"]) >= 0.95
