"""The table of recorded runs is whole, and the diagnosis says what it must; benchmarks/diagnosis.py shows it."""

import json
import lzma
from pathlib import Path
from typing import Any

import pytest
from benchmarks import diagnosis

from tests.report.runs import recorded
from tests.tools import tiny


def test_each_run_of_the_table_has_a_log_and_its_symptoms_have_levels() -> None:
    runs = {**diagnosis.RUNS, **diagnosis.TABLE["recipes"]}
    assert len(diagnosis.TABLE["healthy"]) >= 20 and len(diagnosis.TABLE["sick"]) >= 20
    assert {*diagnosis.logs()} == {*diagnosis.RUNS} and diagnosis.LOGS.stat().st_size < 400_000
    assert {*diagnosis.TABLE["recipes"]} <= {*recorded(diagnosis.ROOT)}
    said = {word for about in runs.values() for key in ("must", "may") for word in diagnosis.names(about, key)}
    for about in runs.values():
        assert about.get("becomes", "lost") == "lost"
        assert {*about.get("seldom", {})} <= {"5", "10"}
        for visible in about.get("seldom", {}).values():
            said |= {*visible.split()}
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


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("ours", [False, True], ids=["trl", "trl-steady"])
def test_a_thinned_log_is_that_of_a_run_that_logs_rarely(models: dict[str, Path], tmp_path: Path, ours: bool) -> None:
    options: dict[str, Any] = {"max_steps": 8, "steps_per_generation": 2, "beta": 0.04, "lr_scheduler_type": "linear"}
    options |= {"eval_strategy": "steps", "eval_steps": 2, "build": {"eval_dataset": tiny.dataset(4)}}
    if ours:
        options |= {"loss_type": "gspo", "sync_ref_model": True, "ref_model_sync_steps": 2}
    often, rarely = (
        tiny.history(
            tiny.train(tiny.trainer(models["dense"], tmp_path / str(every), ours=ours, logging_steps=every, **options))
        )
        for every in (1, 3)
    )
    thin = diagnosis.thinned(often, 3)
    assert [row["step"] for row in thin if "loss" in row] == [3, 6]  # steps 7 and 8 are not logged
    assert len(thin) == len(rarely) == 2 + 4 + 1  # logs, evaluations, the summary
    for found, expected in zip(thin, rarely, strict=True):
        unlike = ("total_flos", "_q", "kl/k", "ratio/sequence_mean")  # the last three are pooled over all tokens
        kept = {key: value for key, value in expected.items() if not any(part in key for part in unlike)}
        # both are means of the same numbers, rounded to float32 before or after
        assert {key: found[key] for key in kept} == pytest.approx(kept, rel=1e-5, abs=1e-7)


def test_a_thinned_log_leaves_out_what_is_not_a_number_if_a_number_is_there() -> None:
    rows = [{"step": step, "loss": 0.0, "reward": float("nan"), "kl": 1.0} for step in range(1, 5)]
    rows[1]["reward"] = 0.5
    thin = diagnosis.thinned(rows, 2)
    assert [row["reward"] for row in thin] == [0.5, None]


@pytest.mark.parametrize(("end", "must"), [(0.3, "reward-falls"), (0.9, "")])
def test_what_a_run_did_not_become_need_not_be_said(
    end: float, must: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both lose their reward in the middle. One has it again at the end."""
    levels = [0.8] * 10 + [0.1] * 20 + [end] * 10
    rows = [{"step": step, "loss": 0.0, "reward": level} for step, level in enumerate(levels, start=1)]
    file = tmp_path / "runs.jsonl.xz"
    file.write_bytes(lzma.compress(json.dumps({"name": "run", "rows": rows, "run": {}}).encode()))
    about = {"must": "reward-falls|kl-rises", "becomes": "lost", "seldom": {"5": "reward-falls"}}
    monkeypatch.setattr(diagnosis, "RUNS", {"run": about})
    ((_, run),) = diagnosis.table_runs(file, 5)
    assert run.about["must"] == must
    assert diagnosis.names(run.about, "may") == ["reward-falls", "kl-rises"]


@pytest.mark.parametrize(
    ("cut", "alike", "right", "facts"),
    [
        (0.6, 0.5, 0.5, ["answers-cut-off"]),
        (0.4, 0.95, 0.95, ["groups-all-right"]),
        (0.4, 0.95, 0.5, []),
        (0.4, 0.8, 0.95, []),
    ],
)
def test_what_the_means_of_a_log_show_is_true_of_it(cut: float, alike: float, right: float, facts: list[str]) -> None:
    """Only the last sixth counts. Rows of an evaluation, and values that are not known, are left out."""
    end = {"completions/clipped_ratio": cut, "frac_reward_zero_std": alike, "reward": right}
    rows = [dict.fromkeys(end, 0.3)] * 50 + [end] * 5 + [{"eval_loss": 1.0}, dict.fromkeys(end), *[end] * 5]
    assert diagnosis.plain_facts(rows) == facts


def test_a_copy_too_short_to_judge_is_left_out_and_what_it_hides_need_not_be_said() -> None:
    rows = [{"step": step, "loss": 0.0} for step in range(1, 61)]
    about = {"must": "kl-rises|kl-holds gradient-zero", "may": "answers-grow", "seldom": {"10": "gradient-zero"}}
    run = diagnosis.Run(about, rows, {})
    assert [*diagnosis.logged_every(11, "run", run)] == []  # 5 logs
    ((_, every_5),) = diagnosis.logged_every(5, "run", run)
    assert every_5.about == about and len(every_5.rows) == 12
    ((_, every_10),) = diagnosis.logged_every(10, "run", run)
    assert every_10.about["must"] == "gradient-zero" and len(every_10.rows) == 6
    assert every_10.about["may"].split() == ["answers-grow", "kl-rises", "kl-holds", "gradient-zero"]


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 5, 10])
def test_the_diagnosis_finds_nearly_all_faults_and_accuses_no_healthy_run(every: int) -> None:
    rates = diagnosis.evaluate(every=every)
    assert min(rates["all"]) >= 0.95
    assert every > 1 or min(rates["critical"]) == 1.0
