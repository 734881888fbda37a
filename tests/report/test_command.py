"""`trl-steady report`: what it reads, prints and returns."""

import io
import json
import os
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trl_steady.cli import main as cli
from trl_steady.report import command, diagnose, reading
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
    assert printed.startswith(f"{dropped}: TRL log, 40 steps, 40 logs: symptoms: 2 (")
    assert "since step 1:" in printed
    assert "off_policy_mask_threshold" in printed
    assert cli.main(["report", str(dropped), "--fail-on", "warning"]) == 1
    capsys.readouterr()
    assert cli.main(["report", str(dropped), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)[str(dropped)]["findings"]
    assert "everything-dropped" in [each["name"] for each in found]
    assert {each["since"] for each in found if each["name"] == "everything-dropped"} == {1}


def test_a_watched_run_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "out", rows(3, reward=0.5))
    shown: list[int] = []
    waits = iter([2, -1, 5, 0])  # steps that the run has logged more after each wait; -1: a file is half written

    def wait(_: float) -> None:
        if (more := next(waits)) == 0:
            raise KeyboardInterrupt
        text = json.dumps({"global_step": 1, "log_history": rows((shown or [3])[-1] + more, reward=0.5)})
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
        ("", "is empty"),
        ("{", "no log of a run"),
        ("[1]", "no log of a run"),
        ("{}", "no rows under"),
        ("7", "no log of a run"),
        ('{"log_history": null}', "'log_history' is null, not a list"),
        ('{"log_history": [1, 2]}', "the rows of 'log_history' are int"),
        ('{"log_history": {"step": 1}}', "not a list of rows"),
        ('{"global_step": 20, "log_history": [{"step"', "cut off or damaged"),
        ("PK\0\0\1", "is no text"),
        ("[" * 100_000, "no log of a run"),
        ("hello\nworld\n", "no progress bar and no record"),
        ("  5%|##   | 34/720 [03:36<1:12:33,  6.35s/it]\n", "a progress bar to 34 of 720"),
        ("{'val/score': 1.0, 'epoch': 2}\n", "records with val/score, epoch"),
        ('{"nbformat": 4, "cells": [1, {"outputs": [1, {"data": null, "text": 5}]}]}', "no record of metrics"),
    ],
)
def test_what_is_no_log_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, words: str
) -> None:
    if content is not None:
        (tmp_path / "state.json").write_text(content)
    path = tmp_path if content is None else tmp_path / "state.json"
    assert cli.main(["report", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line and str(path) in line


def test_the_worst_symptom_comes_first_and_a_warning_is_not_critical(tmp_path: Path) -> None:
    cut_off = {"completions/clipped_ratio": 1.0, "reward": 0.5}
    warned = write(tmp_path / "warned", [{**row, "reward": row["step"] / 40} for row in rows(40, **cut_off)])
    findings, _ = diagnose(History.read(warned))
    assert [finding.symptom.name for finding in findings] == ["answers-cut-off"]
    assert cli.main(["report", str(warned), "--fail-on", "critical"]) == 0
    both = [{**row, "dropped/veto": float(row["step"] > 30)} for row in rows(40, **cut_off)]
    levels = [finding.symptom.level for finding in diagnose(History(both))[0]]
    assert levels == sorted(levels) and {*levels} == {"critical", "warning"}  # "critical" is before "warning"


def log_of(folder: Path, name: str, steps: range) -> Path:
    """Write a console log of a run whose reward is a hundredth of its step."""
    lines = [f"{{'loss': 0.1, 'grad_norm': 0.5, 'reward': {step / 100}, 'step': {step}}}" for step in steps]
    folder.mkdir(exist_ok=True)
    file = folder / name
    file.write_text("\n".join(lines))
    return file


def state_of(folder: Path, steps: range) -> Path:
    logged = [{"step": step, "reward": step / 100, "grad_norm": 0.5} for step in steps]
    return write(folder / f"checkpoint-{steps[-1]}", logged) / "trainer_state.json"


def test_a_pipe_is_read_to_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    content = log_of(tmp_path, "log", range(1, 21)).read_bytes()
    monkeypatch.chdir(tmp_path)
    for arguments in (["-"], ["-", "--output", "page.html"]):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content)))
        assert cli.main(["report", *arguments]) == 0
        assert capsys.readouterr().out.startswith("-: TRL log, 20 steps, 20 logs: symptoms: 0")
        assert (tmp_path / "page.html").exists() == (len(arguments) > 1) and not (tmp_path / "report.html").exists()
    assert cli.main(["report", "-", "--watch"]) == 2 and "--watch cannot" in capsys.readouterr().err


def test_a_folder_with_one_log_is_read_and_with_several_asks_for_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log_of(tmp_path, "train.log", range(1, 21))
    (tmp_path / "requirements.txt").write_text("trl\n")
    assert cli.main(["report", str(tmp_path)]) == 0
    assert f"{tmp_path}: TRL log, 20 steps, 20 logs (read from train.log): " in capsys.readouterr().out
    log_of(tmp_path, "other.log", range(1, 9))
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "has several logs: other.log, train.log" in capsys.readouterr().err


def test_a_newest_checkpoint_that_is_cut_off_is_named_and_the_one_before_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state_of(tmp_path, range(1, 11))
    newest = state_of(tmp_path, range(1, 21))
    newest.write_text(newest.read_text()[:-40])
    assert cli.main(["report", str(tmp_path), "--json"]) == 0
    assert f"{newest} is no log of a run: it is cut off" in capsys.readouterr().err
    assert History.read(tmp_path).last_step == 10
    (tmp_path / "checkpoint-10" / "trainer_state.json").write_text("{")
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "checkpoint-20" in capsys.readouterr().err


def test_a_log_beside_the_checkpoints_says_what_came_after_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state_of(tmp_path, range(1, 11))
    log = log_of(tmp_path, "train.log", range(1, 17))
    history = History.read(tmp_path)
    assert history["reward"].values.tolist() == [step / 100 for step in range(1, 17)]
    assert cli.main(["report", str(tmp_path)]) == 0
    assert "16 steps, 16 logs (the steps after 10 are from train.log): " in capsys.readouterr().out
    log.write_text("\n".join(f"step {step}/40  reward {step / 100:.2f}  KL 0.01  12 s" for step in range(1, 14)))
    assert History.read(tmp_path).last_step == 13
    log.write_text("\n".join(f"step {step}/40  reward 0.90  KL 0.01  12 s" for step in range(1, 14)))
    assert History.read(tmp_path).last_step == 10  # another run
    log_of(tmp_path, "train.log", range(1, 17))
    os.utime(log, (0, 0))  # of a run before
    assert History.read(tmp_path).last_step == 10


def test_logs_of_the_processes_of_a_run_are_joined_if_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, orchestrator = tmp_path / "trainer.log", tmp_path / "orchestrator.log"
    trainer.write_text("\n".join(f"Step {step} | 9.0s | Loss 0.1 | Entropy 0.5" for step in range(1, 9)))
    orchestrator.write_text("\n".join(f"Step {step} | 9.0s | Reward 0.{step}" for step in range(1, 8)))
    assert cli.main(["report", str(trainer), str(orchestrator)]) == 0
    two = capsys.readouterr().out
    assert "trainer.log: prime-rl log, 8 steps" in two and "orchestrator.log: prime-rl log, 7 steps" in two
    assert cli.main(["report", "--join", str(trainer), str(orchestrator)]) == 0
    assert f"{trainer} + {orchestrator}: prime-rl log, 8 steps, 8 logs: " in capsys.readouterr().out
    joined = History.joined([trainer, orchestrator])
    assert joined["reward"].steps.tolist() == [*range(1, 8)] and joined["entropy"].steps.tolist() == [*range(1, 9)]
    other = tmp_path / "other.log"
    other.write_text(orchestrator.read_text())
    assert cli.main(["report", "--join", str(orchestrator), str(other)]) == 2
    assert "both have a reward" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ("loss grad_norm learning_rate mean_token_accuracy num_tokens entropy", "This is a log of SFT: it has loss"),
        ("loss eval_loss", "This is a log of SFT: it has loss, eval_loss and no reward"),
        ("loss rewards/chosen rewards/rejected rewards/margins logps/chosen", "This is a log of DPO: it has rewards/"),
        ("reward_mean kl_divergence loss", "There is no metric named reward, so this is no log of GRPO"),
    ],
)
def test_a_log_of_another_training_is_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], keys: str, words: str
) -> None:
    folder = write(tmp_path / "out", [{"step": step, **dict.fromkeys(keys.split(), 0.5)} for step in range(1, 41)])
    assert cli.main(["report", str(folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{folder}: {words}" in line


def test_a_run_that_has_logged_no_metric_yet_is_none_of_another_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "out", [{"step": 5, "train_runtime": 1.0, "train_loss": 0.1, "epoch": 1.0}])
    (folder / "trainer_state.json").write_text(
        json.dumps({"log_history": [{"step": 5, "train_runtime": 1.0, "epoch": 1.0}]})
    )
    assert cli.main(["report", str(folder)]) == 0
    assert "0 logs of the reward: too few" in capsys.readouterr().out


def test_the_first_line_says_what_was_looked_for_and_what_the_log_does_not_show(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.log"
    line = "step:{0} - actor/pg_loss:0.1 - actor/grad_norm:0.5 - actor/lr:1e-06 - critic/score/mean:0.{0} - x:1"
    file.write_text("\n".join(line.format(step) for step in range(1, 10)) + "\nTraining: 3%|  | 9/300 [0:01<0:02]")
    os.utime(file, (0, 0))
    assert cli.main(["report", str(file)]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(f"{file}: verl log, 9 of 300 steps, 9 logs: symptoms: ")
    assert (
        "groups (not logged by verl)" in first
        and "policy (needs actor_rollout_ref.actor.calculate_entropy=True)" in first
    )
    assert "KL (" in first and "reward (" not in first and "gradient (" not in first


def test_a_log_that_is_still_written_is_no_run_that_is_over(tmp_path: Path) -> None:
    file = log_of(tmp_path, "train.log", range(1, 5))
    assert History.read(file).is_over  # how long it will be is not known
    file.write_text(file.read_text() + "\n 10%|#   | 4/40 [00:01<00:09,  1.00s/it]")
    assert not History.read(file).is_over
    os.utime(file, (0, 0))
    assert History.read(file).is_over


def test_a_checkpoint_of_a_run_that_goes_on_is_no_run_that_is_over(tmp_path: Path) -> None:
    """Four rewards of 0 are no reward function that never varies, in a state, or in a log beside it."""
    rows = [{"step": step, "reward": 0.0, "loss": 0.0, "reward_std": 0.0} for step in range(1, 5)]
    state = tmp_path / "checkpoint-4" / "trainer_state.json"
    state.parent.mkdir()
    state.write_text(json.dumps({"log_history": rows, "max_steps": 1000, "global_step": 4}))
    for _ in range(2):
        run = History.read(tmp_path)
        assert not run.is_over and "critical" not in {each.symptom.level for each in diagnose(run)[0]}
        later = [*rows, {**rows[0], "step": 5}]
        lines = [f"{ {**row, 'completions/mean_length': 9.0} }" for row in later]
        (tmp_path / "train.log").write_text("\n".join([*lines, " 1%|  | 5/1000 [0:01<0:02]"]))
    assert run.last_step == 5
    for file in (state, tmp_path / "train.log"):
        os.utime(file, (0, 0))
    assert History.read(tmp_path).is_over
    state.write_text(json.dumps({"log_history": rows, "max_steps": 6, "global_step": 6}))  # not each step is logged
    assert History.read(state).is_over


@pytest.mark.parametrize(
    ("save_steps", "seconds", "minutes", "is_over"),
    [
        (20, 60.0, 35, False),  # the next checkpoint comes after 20 minutes
        (20, 60.0, 45, True),
        (500, 60.0, 75, False),  # saved each epoch, as it seems
        (500, 60.0, 85, True),
        (20, 6.0, 9, False),
        (20, 6.0, 11, True),
        (20, None, 11, True),
        (None, 60.0, 11, True),
        (20, float("nan"), 11, True),
    ],
)
def test_a_run_may_go_on_until_its_next_checkpoint_is_overdue(
    save_steps: int | None, seconds: float | None, minutes: int, is_over: bool, tmp_path: Path
) -> None:
    rows = [{"step": step, "reward": 0.5, "loss": 0.0, "step_time": seconds} for step in range(1, 41)]
    state = tmp_path / "checkpoint-40" / "trainer_state.json"
    state.parent.mkdir()
    of_run = {"max_steps": 1000, "global_step": 40, "save_steps": save_steps}
    state.write_text(json.dumps({"log_history": rows, **of_run}))
    written = time.time() - 60 * minutes
    os.utime(state, (written, written))
    assert History.read(tmp_path).is_over is is_over


def test_a_log_may_go_on_until_its_next_row_is_overdue(tmp_path: Path) -> None:
    """Rows stand ten steps apart, and a step takes 90 seconds."""
    rows = [{"step": step, "reward": 0.5, "loss": 0.0, "step_time": 90.0} for step in range(10, 200, 10)]
    file = tmp_path / "train.log"
    file.write_text("\n".join([*map(str, rows), " 19%|#  | 190/1000 [4:45:00<1:00]"]))
    for minutes, is_over in ((25, False), (35, True)):
        written = time.time() - 60 * minutes
        os.utime(file, (written, written))
        assert History.read(file).is_over is is_over


def test_bytes_of_other_encodings_are_read(tmp_path: Path) -> None:
    text = log_of(tmp_path, "log", range(1, 9)).read_text()
    for content in (
        b"\xff\xfe" + text.encode("utf-16-le"),
        text.encode() + b"\n\xff\xfe\x80",
        b"\xef\xbb\xbf" + text.encode(),
    ):
        (tmp_path / "log").write_bytes(content)
        assert History.read(tmp_path / "log").last_step == 8


def test_a_page_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = log_of(tmp_path, "train.log", range(1, 9))
    assert cli.main(["report", str(file), "--output", str(tmp_path / "no" / "page.html")]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot be written" in line and "--output" in line


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(
    ("row", "run"),
    [
        ({"step": None, "reward": 1.0}, {}),
        ({"step": "9", "reward": "x"}, {}),
        ({"step": 10**30, "reward": 1.0}, {}),
        ({"step": 9, "loss": 10**400}, {}),
        ({}, {"settings": None, "notes": 5}),
        ({}, {"settings": [1], "versions": 5, "answers": 5}),
        ({}, [1]),
    ],
)
def test_a_damaged_row_or_run_is_left_out(tmp_path: Path, row: dict[str, Any], run: Any) -> None:
    folder = write(tmp_path / "out", rows(8, reward=0.5))
    state = {"max_steps": 9, "log_history": [*rows(8, reward=0.5), row]}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    (folder / "steady.json").write_text(json.dumps(run))
    assert cli.main(["report", str(folder)]) == 0
    assert len(History.read(folder)["reward"].steps) == 8


LOGGED = {
    "trl": [f"{{'loss': 0.1, 'reward': 0.{i}, 'grad_norm': 1.0, 'epoch': 0.{i}}}" for i in range(1, 9)],
    "verl": [f"step:{i} - actor/grad_norm:1.0 - critic/score/mean:0.{i}" for i in range(1, 9)],
}


@pytest.mark.parametrize("framework", LOGGED)
def test_a_console_log_may_begin_with_a_line_of_json(tmp_path: Path, framework: str) -> None:
    """Such as the settings, which many scripts print first."""
    (tmp_path / "train.log").write_text("\n".join([json.dumps({"lr": 1e-6, "steps": 8}), *LOGGED[framework]]))
    found = History.read(tmp_path / "train.log")["reward"]
    assert found.values.tolist() == pytest.approx([i / 10 for i in range(1, 9)], rel=1e-12)


def test_json_lines_of_which_the_last_is_cut_off_are_read(tmp_path: Path) -> None:
    lines = [json.dumps({"step": i, "reward": 0.5}) for i in range(1, 9)]
    (tmp_path / "log.jsonl").write_text("\n".join(lines)[:-5])
    assert len(History.read(tmp_path / "log.jsonl")["reward"].values) == 7


def test_a_checkpoint_that_is_deleted_meanwhile_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run rotates its checkpoints between the look at its folder and the reading."""
    old, new = (write(tmp_path / f"checkpoint-{step}", rows(step, reward=0.5)) for step in (4, 8))
    states = reading._states
    listed = [*states(tmp_path)]
    shutil.rmtree(new)
    monkeypatch.setattr(reading, "_states", lambda _: listed)
    assert History.read(tmp_path).last_step == 4
    shutil.rmtree(old)
    with pytest.raises(ValueError, match="no checkpoint with one, and no log"):
        History.read(tmp_path)


def test_each_log_of_a_folder_has_its_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "ab":
        lines = [json.dumps(row) for row in rows(8, reward=0.5)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    assert cli.main(["report", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]) == 0
    pages = [tmp_path / "report.html", tmp_path / "report-b.html"]
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if line.endswith(".html")] == list(map(str, pages))
    assert ["a.jsonl" in page.read_text() for page in pages] == [True, False]
