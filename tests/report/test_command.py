"""`trl-steady report`: what it reads, prints and returns."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trl_steady.cli import main as cli
from trl_steady.report import command, diagnose
from trl_steady.report.history import History


def rows(steps: int, **values: float) -> list[dict[str, Any]]:
    return [{"step": step, "loss": 0.1, **values} for step in range(1, steps + 1)]


def write(folder: Path, logged: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True)
    state = {"global_step": logged[-1]["step"], "log_history": logged}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    return folder


def test_the_newest_checkpoint_of_an_output_folder_is_read(tmp_path: Path) -> None:
    for last in (8, 16, 9):
        write(tmp_path / f"checkpoint-{last}", rows(last))
    assert History.read(tmp_path).last_step == 16
    assert History.read(tmp_path / "checkpoint-9").last_step == 9
    assert History.read(tmp_path / "checkpoint-8" / "trainer_state.json").last_step == 8


def test_rows_of_a_resumed_run_replace_those_that_it_logged_again() -> None:
    logged = [*rows(6, reward=1.0), *({**row, "reward": 2.0} for row in rows(8)[3:])]
    series = History(logged)["reward"]
    assert series.steps.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert series.values.tolist() == [1.0] * 3 + [2.0] * 5


def test_what_is_no_number_is_left_out() -> None:
    history = History([{"step": 1, "reward": None, "kl": float("nan"), "name": "x", "is": True}, {"reward": 1.0}])
    assert history.keys == {"reward", "kl"} and history.last_step == 1
    assert np.isnan([history["reward"].values, history["kl"].values]).all()


def test_a_log_with_symptoms_fails_on_their_level(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dropped = write(tmp_path / "dropped", rows(40, **{"dropped/off_policy": 1.0, "reward": 0.5, "grad_norm": 1.0}))
    assert cli.main(["report", str(dropped)]) == 0
    printed = capsys.readouterr().out
    assert f"{dropped}, 40 steps: " in printed and "since step 1:" in printed
    assert "off_policy_mask_threshold" in printed
    assert cli.main(["report", str(dropped), "--fail-on", "warning"]) == 1
    capsys.readouterr()
    assert cli.main(["report", str(dropped), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)[str(dropped)]["findings"]
    assert "everything-dropped" in [each["name"] for each in found]
    assert {each["since"] for each in found if each["name"] == "everything-dropped"} == {1}


def test_a_watched_run_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "out", rows(3))
    shown: list[int] = []
    waits = iter([2, -1, 5, 0])  # steps that the run has logged more after each wait; -1: a file is half written

    def wait(_: float) -> None:
        if (more := next(waits)) == 0:
            raise KeyboardInterrupt
        text = json.dumps({"global_step": 1, "log_history": rows((shown or [3])[-1] + more)})
        (folder / "trainer_state.json").write_text("{" if more < 0 else text)

    def diagnose(run: History) -> tuple[list[Any], dict[str, str]]:
        shown.append(run.last_step)
        return [], {}

    monkeypatch.setattr(command.time, "sleep", wait)
    monkeypatch.setattr(command, "diagnose", diagnose)
    assert cli.main(["report", str(folder), "--watch"]) == 130
    assert shown == [3, 5, 10]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no trainer_state.json"),
        ("{", "no log of a run"),
        ("[1]", "no log of a run"),
        ("{}", "no rows under"),
        ("7", "no log of a run"),
    ],
)
def test_what_is_no_log_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, words: str
) -> None:
    if content is not None:
        (tmp_path / "state.json").write_text(content)
    assert cli.main(["report", str(tmp_path if content is None else tmp_path / "state.json")]) == 2
    assert words in capsys.readouterr().err


def test_the_worst_symptom_comes_first_and_a_warning_is_not_critical(tmp_path: Path) -> None:
    cut_off = {"completions/clipped_ratio": 1.0, "reward": 0.5}
    warned = write(tmp_path / "warned", [{**row, "reward": row["step"] / 40} for row in rows(40, **cut_off)])
    findings, _ = diagnose(History.read(warned))
    assert [finding.symptom.name for finding in findings] == ["answers-cut-off"]
    assert cli.main(["report", str(warned), "--fail-on", "critical"]) == 0
    both = [{**row, "dropped/veto": float(row["step"] > 30)} for row in rows(40, **cut_off)]
    levels = [finding.symptom.level for finding in diagnose(History(both))[0]]
    assert levels == sorted(levels) and {*levels} == {"critical", "warning"}  # "critical" is before "warning"
