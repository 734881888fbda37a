"""Logs with more than one training: SFT before GRPO, runs that were appended, several runs in a chart."""

import json
import os
from pathlib import Path

import pytest

from trl_steady.cli import main as cli
from trl_steady.report import History, diagnose
from trl_steady.report.command import report

SUMMARY = "{'train_runtime': 9.0, 'train_loss': 1.5, 'epoch': 1.0}"


def bar(step: int, end: int) -> str:
    return f"{100 * step // end}%|##  | {step}/{end} [00:01<00:02, 1.0s/it]"


def supervised(steps: int) -> list[str]:
    """Return the console of TRL's SFT. Its entropy is that of the texts, and high."""
    lines: list[str] = []
    for step in range(1, steps + 1):
        row = {"loss": 1.5, "grad_norm": 1.1, "entropy": 1.8 - 0.001 * step, "mean_token_accuracy": 0.6}
        lines += [bar(step, steps), str(row)]
    return lines


def sampled(steps: range, end: int, rise: float = 0.003) -> list[str]:
    """Return the console of a GRPO run that learns, with an entropy that is low and steady."""
    lines: list[str] = []
    for step in steps:
        wobble = 0.02 * (step * 7 % 5)
        row = {"loss": 0.01, "grad_norm": 0.3, "reward": 0.4 + rise * step + wobble, "reward_std": 0.3}
        lines += [
            bar(step, end),
            str({**row, "entropy": 0.12 + wobble / 10, "completions/mean_length": 200.0 + step % 7}),
        ]
    return lines


def history(tmp_path: Path, *lines: str) -> History:
    file = tmp_path / "train.log"
    file.write_text("\n".join(lines))
    return History.read(file)


@pytest.mark.parametrize("before", [60, 300])
def test_sft_before_grpo_is_left_out(tmp_path: Path, before: int) -> None:
    run = history(tmp_path, *supervised(before), SUMMARY, *sampled(range(1, 101), 100))
    assert run["reward"].steps.tolist() == [*range(1, 101)] and "mean_token_accuracy" not in run.keys
    assert run["entropy"].values.max() < 0.2 and not diagnose(run)[0]
    assert f"logs of other runs in this file are left out ({before})" in run.remarks


def test_sft_behind_grpo_is_left_out(tmp_path: Path) -> None:
    run = history(tmp_path, *sampled(range(1, 101), 100), SUMMARY, *supervised(300))
    assert run.last_step == 100 and run.is_over and not diagnose(run)[0]
    assert not run.other_task


def test_of_two_runs_in_a_file_the_last_is_judged(tmp_path: Path) -> None:
    falls = sampled(range(1, 61), 60, rise=-0.006)
    run = history(tmp_path, *falls, SUMMARY, *sampled(range(1, 31), 100))
    assert run.last_step == 30 and not diagnose(run)[0]
    assert run.settings["max_steps"] == 100 and "(60)" in " ".join(run.remarks)


def test_a_resume_behind_the_end_of_a_run_is_the_same_run(tmp_path: Path) -> None:
    evaluation = "{'eval_loss': 0.1, 'eval_reward': 0.5}"
    earlier = [*sampled(range(1, 61), 60), SUMMARY, evaluation]
    run = history(tmp_path, *earlier, bar(0, 100), *sampled(range(61, 101), 100), SUMMARY)
    assert run["reward"].steps.tolist() == [*range(1, 101)]
    assert not any("other runs" in remark for remark in run.remarks)


def test_a_stage_without_a_summary_is_told_by_its_steps(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, "loss": 1.0, "mean_token_accuracy": 0.5}) for step in range(1, 101)]
    lines += [json.dumps({"step": step, "loss": 0.01, "reward": 0.4 + 0.003 * step}) for step in range(1, 61)]
    run = history(tmp_path, *lines)
    assert run.last_step == 60 and "mean_token_accuracy" not in run.keys
    assert run.remarks == ["logs of other runs in this file are left out (100)"]


def test_a_metric_of_a_run_before_does_not_stay(tmp_path: Path) -> None:
    """A cell of a notebook that ran again has no summary between its two runs, and the second one has no KL."""
    names, row = "Step  Training Loss  reward  kl", "{}  0.1  0.5  {}"
    first = [names, *(row.format(step, 5.0) for step in range(1, 61))]
    second = [names, *(row.format(step, "0.000000") for step in range(1, 41))]
    run = history(tmp_path, *first, *second)
    assert run.last_step == 40 and "kl" not in run.keys


def test_a_file_that_was_just_written_may_be_of_a_run_that_goes_on(tmp_path: Path) -> None:
    lines = sampled(range(1, 31), 100)
    assert "the file is new, so the run may go on" in history(tmp_path, *lines).remarks
    assert history(tmp_path, *lines, SUMMARY).is_over
    os.utime(tmp_path / "train.log", (0, 0))
    assert not any("new" in remark for remark in History.read(tmp_path / "train.log").remarks)


def test_rows_that_stand_newest_first_are_turned_round(tmp_path: Path) -> None:
    file = tmp_path / "history.csv"
    file.write_text("step,reward,loss\n" + "".join(f"{step},{step / 100},0.1\n" for step in range(60, 0, -1)))
    reward = History.read(file)["reward"]
    assert reward.steps.tolist() == [*range(1, 61)] and reward.values[0] == 0.01


def test_a_chart_of_several_runs_says_which_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "chart.csv"
    header = '"Step","happy-1 - train/reward","happy-1 - train/reward__MIN","sad-2 - train/reward"\n'
    file.write_text(header + "".join(f"{step},{step / 60},0,{1 - step / 60}\n" for step in range(1, 60)))
    assert cli.main(["report", str(file), "--json"]) == 0
    assert "the first of its 2 runs is read: happy-1" in capsys.readouterr().out
    assert History.read(file)["reward"].values[-1] > 0.9


def test_a_joined_run_has_a_page_in_the_folder_of_its_first_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, rewards = tmp_path / "a" / "trainer.log", tmp_path / "b" / "rewards.log"
    for file, metric in ((trainer, "Loss 0.1 | Entropy 0.5"), (rewards, "Reward 0.5")):
        file.parent.mkdir()
        file.write_text("\n".join(f"Step {step} | 9.0s | {metric}" for step in range(1, 9)))
    arguments = [str(trainer), str(rewards), "--join"]
    assert cli.main(["report", *arguments]) == 0
    assert (tmp_path / "a" / "report.html").is_file()
    assert cli.main(["report", *arguments, "--output", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").is_file()
    assert cli.main(["report", *arguments, "--output", str(tmp_path)]) == 0  # a folder
    assert (tmp_path / "report.html").is_file() and not capsys.readouterr().err


def test_rotated_logs_have_a_page_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / f"train.log.{number}" for number in range(3)]
    for file in files:
        file.write_text("\n".join(sampled(range(1, 9), 8)))
    assert cli.main(["report", *map(str, files)]) == 0
    pages = [line for line in capsys.readouterr().out.splitlines() if line.endswith(".html")]
    assert len(set(pages)) == 3 and all(Path(page).is_file() for page in pages)


def test_a_reader_that_stops_early_costs_no_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `trl-steady report run.log | head -1` does."""
    file = tmp_path / "train.log"
    file.write_text("\n".join(sampled(range(1, 9), 8)))
    read, written = os.pipe()
    with open(written, "w") as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        os.close(read)
        assert report([str(file)], lambda message: pytest.fail(message)) == 0
    assert (tmp_path / "report.html").is_file()
