"""The forms in which logs are written: console, tables, JSON and CSV, as launchers and terminals leave them."""

import csv
import io
import json
import math
from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path
from typing import Any

import pytest
from benchmarks import diagnosis

from trl_steady.report import History, diagnose
from trl_steady.report.forms import records
from trl_steady.report.log import read_records
from trl_steady.report.record import Rounded, number

Row = Mapping[str, Any]
TRAINED = {"loss": 0.02, "grad_norm": 0.4, "learning_rate": 1e-06, "reward": 0.5, "reward_std": 0.1, "kl": 0.03}
VERL = (
    "step:{step} - actor/entropy:0.25 - actor/pg_loss:np.float64(0.04) - actor/grad_norm:0.5 - actor/lr:1e-06 - "
    "critic/score/mean:{reward} - critic/score/max:1.0 - response_length/mean:128.5 - timing_s/step:30.25"
)


def read(text: str) -> list[Mapping[str, float]]:
    return [*read_records(records(text.split("\n"))).rows]


def rewards(text: str) -> dict[int, float]:
    return {int(row["step"]): row["reward"] for row in read(text) if "reward" in row}


def printed(step: int) -> str:
    return str({**TRAINED, "reward": step / 10})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.5", 0.5), ("-1e-05", -1e-5), ("'0.25'", 0.25), ('"3"', 3.0), ("np.float64(0.5)", 0.5), ("1,024", 1024.0),
        ("tensor(0.5, device='cuda:0')", 0.5), ("inf", math.inf), ("True", None), ("dapo", None), ("1m 29s", None),
        ("", None),
    ],
)  # fmt: skip
def test_a_number_is_read_in_all_its_forms(text: str, value: float | None) -> None:
    assert number(text) == value


@pytest.mark.parametrize("text", ["nan", "None", "null", "np.float64(nan)"])
def test_what_is_logged_for_nan_is_nan(text: str) -> None:
    value = number(text)
    assert value is not None and math.isnan(value)


def test_a_zero_of_fixed_digits_may_be_a_small_number_and_pythons_own_is_0() -> None:
    assert all(isinstance(number(text), Rounded) for text in ("0.000", "-0.000", "0.0000", "0.00"))
    assert not any(isinstance(number(text), Rounded) for text in ("0.0", "0", "0.001", "0.00e+00"))


@pytest.mark.parametrize(
    "prefix",
    [
        "", "622 ", "[rank0]: ", "trainer/0 | ", "worker-1  | ", "2025-06-01 12:00:00,123 - INFO - ",
        "2025-07-31T08:28:47.911109392Z ", "[2025-06-01 12:00:00] ",
        "\x1b[36m(TaskRunner pid=1, ip=10.4.1.33)\x1b[0m ",
        "\x1b[36m(main_task pid=123)\x1b[0m \x1b[32mINFO\x1b[0m ", "[36m(TaskRunner pid=1)[0m ",
    ],
)  # fmt: skip
def test_what_launchers_write_before_a_line_changes_nothing(prefix: str) -> None:
    for line in (printed, lambda step: VERL.format(step=step, reward=step / 10)):
        text = "\n".join(prefix + line(step) for step in (1, 2, 3))
        assert rewards(text) == {1: 0.1, 2: 0.2, 3: 0.3}, line(1)
    block = "\n".join(
        prefix + line for line in ("• Loss: 0.0123", "• Avg Reward: 0.2500", "• Mean Generation Length: 8")
    )
    if prefix != "622 ":
        assert rewards(block) == {1: 0.25}


PRINTED = "(TaskRunner pid=22) " + VERL


@pytest.mark.parametrize("width", [40, 43, 54, 61, 80, 97, 133])  # with 43 and 54, the last piece is a digit or two
def test_a_record_that_a_terminal_has_cut_is_whole_again(width: int) -> None:
    lines: list[str] = []
    for step in (1, 2):
        record = PRINTED.format(step=step, reward=step / 10)
        lines += [record[place : place + width] for place in range(0, len(record), width)]
        lines.append("an answer: 42")
    rows = read("\n".join(lines))
    assert [row["reward"] for row in rows] == [0.1, 0.2]
    assert [row["step_time"] for row in rows] == [30.25, 30.25]


def test_a_record_of_many_lines_is_whole_again() -> None:
    first, *others = VERL.format(step=7, reward=0.5).split(" - ")
    assert rewards("\n".join([f"(TaskRunner pid=1) {first}", *(f" - {pair}" for pair in others), "done"])) == {7: 0.5}
    text = json.dumps({**TRAINED, "step": 3}, indent=2)
    assert rewards(text) == {3: 0.5}
    cut = printed(1).replace(", 'learning", ",\n 'learning")
    assert rewards(cut) == {1: 0.1}


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_line_ends_of_all_systems_are_read(tmp_path: Path, newline: str) -> None:
    file = tmp_path / "train.log"
    file.write_bytes(newline.join(printed(step) for step in range(1, 5)).encode())
    assert History.read(file)["reward"].values.tolist() == [0.1, 0.2, 0.3, 0.4]


def bar(step: int, end: int = 40, label: str = "") -> str:
    return f"\r{label}{100 * step // end:3d}%|██   | {step}/{end} [00:19<11:21,  3.49s/it]"


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("every", [1, 5])
def test_steps_are_those_of_the_progress_bar(every: int, behind: bool) -> None:
    text = bar(0)
    for step in range(1, 21):
        row = "" if step % every else f"\n{printed(step // every)}\n"
        text += row + bar(step) if behind else bar(step) + row + bar(step)
    rows = read(text.replace("\r", "\n"))
    assert [row["step"] for row in rows] == [*range(every, 21, every)]


def test_steps_are_counted_where_all_bars_come_first() -> None:
    """The output of a job that is not a terminal waits in a buffer."""
    bars = "".join(bar(step) for step in range(41))
    log = read_records(records((bars.replace("\r", "\n") + "\n" + "\n".join(map(printed, range(1, 9)))).split("\n")))
    assert [row["step"] for row in log.rows] == [5, 10, 15, 20, 25, 30, 35, 40]
    assert log.remarks == ["each log counts as 5 steps"]


def test_bars_of_other_things_are_no_steps() -> None:
    others = [
        bar(1, 8, "Loading checkpoint shards: "), bar(512, 512, "Generating rollouts (train): "),
        bar(3, 100, "Map: "), *(bar(step, 64, "Processed prompts: ") for step in range(65)),
    ]  # fmt: skip
    text = "".join(others) + "".join(bar(step, 300, "Training Progress: ") for step in range(4)) + "\n" + printed(3)
    assert read_records(records(text.replace("\r", "\n").split("\n"))).max_steps == 300


def test_a_row_that_two_processes_print_counts_once_and_a_resumed_run_goes_on() -> None:
    assert rewards("\n".join([printed(1), printed(1), printed(2), printed(2)])) == {1: 0.1, 2: 0.2}
    again = [*range(1, 7), *range(4, 6)]
    text = "\n".join(VERL.format(step=step, reward=place / 10) for place, step in enumerate(again))
    assert rewards(text) == {1: 0.0, 2: 0.1, 3: 0.2, 4: 0.6, 5: 0.7}


def test_processes_that_log_ahead_of_each_other_lose_no_row() -> None:
    lines = [
        "SUCCESS Step 1 | Time: 9.0s | Reward: 0.1", "SUCCESS Step 2 | Time: 9.0s | Reward: 0.2",
        "SUCCESS Step 1 | Time: 9.0s | Loss: 0.5 | Entropy: 0.7", "SUCCESS Step 3 | Time: 9.0s | Reward: 0.3",
        "SUCCESS Step 2 | Time: 9.0s | Loss: 0.6 | Entropy: 0.6",
    ]  # fmt: skip
    rows = read("\n".join(lines))
    assert [(row.get("reward"), row.get("loss")) for row in rows] == [(0.1, 0.5), (0.2, 0.6), (0.3, None)]


@pytest.mark.parametrize(
    "text",
    [
        "wandb: Run history:\nwandb:   train/reward ▁▂▃▅█\nwandb: Run summary:\nwandb:   train/reward 0.5",
        "config: {'learning_rate': 1e-06, 'beta': 0.04, 'num_generations': 8, 'loss_type': 'dapo'}",
        'Model config Qwen2Config {\n  "attention_dropout": 0.0,\n  "hidden_size": 64\n}\n',
        "Completion: {\"reward\": 5, \"answer\": 7}",
        "step:0 - val-core/gsm8k/reward/mean@1:0.5 - val-aux/gsm8k/reward/std@3:0.0",
        "Micro Step 1/4 | Loss 0.1 | Entropy 0.2",
        "[step 10] best of last batch  reward=0.991",
        "Processed prompts: 100%|██| 64/64 [00:05<00:00, 3.1it/s, est. speed input: 10.0 toks/s]",
        "│ Prompt │ Completion │ reward │ Advantage │\n│ 2 + 2 │ 4 │ 1.00 │ 0.71 │",
        "",
    ],
)  # fmt: skip
def test_what_is_no_row_of_training_is_not_read(text: str) -> None:
    assert read(text) == []
    whole = "\n".join([printed(1), text, printed(2), printed(3)])
    assert rewards(whole) == {1: 0.1, 2: 0.2, 3: 0.3}


def test_the_summary_of_a_training_is_no_row() -> None:
    summary = "{'train_runtime': 6704, 'train_loss': 0.1, 'epoch': 1.0}"
    assert read(summary) == []
    assert rewards("\n".join([printed(1), printed(2), summary])) == {1: 0.1, 2: 0.2}


@pytest.mark.parametrize("first", ["nan", "None", "null", "inf", "1.5"])
def test_a_line_below_a_table_that_has_no_step_is_no_row(first: str) -> None:
    assert rewards(f"Step  Loss  reward\n1  0.1  0.2\n{first}  0.1  0.3\n2  0.1  0.4") == {1: 0.2, 2: 0.4}


def test_a_number_that_no_float_can_hold_is_infinite_in_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    lines = [json.dumps({"step": step, "reward": 0.5, "loss": 0.1}) for step in range(1, 5)]
    file.write_text("\n".join(lines).replace("0.1}", "9" * 400 + "}", 1))
    assert History.read(file)["loss"].values.tolist() == [math.inf, 0.1, 0.1, 0.1]


@pytest.mark.parametrize(
    ("line", "last"),
    [
        ("Step: {step}/40, Loss: 0.1, Grad norm: 0.5, Reward: 0.{step}, KL: 0.01", 40),
        ("Epoch:[1/1]({step}/40), Reward: 0.{step}, KL_ref: 0.01, Actor Loss: 0.1, Avg Response Len: 200", 40),
        ("Iter {step}: Train loss 0.1, Total rewards mean 0.{step}, KL 0.01, It/sec 0.3", 0),
        ("{step}0%|## | {step}/40 [00:12<00:30, 1.2s/it, loss=0.1, reward=0.{step}, kl=0.01]", 40),
    ],
)
def test_lists_of_names_and_values_are_read(line: str, last: int) -> None:
    """A loop that somebody has written, minimind, mlx-lm, and a bar with its metrics print them so."""
    log = read_records(records(line.format(step=step) for step in range(1, 10)))
    found = [(row["step"], row["reward"], row["kl"], row["loss"]) for row in log.rows]
    assert found == [(step, step / 10, 0.01, 0.1) for step in range(1, 10)]
    assert log.max_steps == last


def test_a_sentence_with_commas_is_no_row() -> None:
    answer = "Step 3: add 4, then 5, and 6, which makes 15, so the answer is 15"
    assert read(answer) == [] and rewards(f"{printed(1)}\n{answer}\n{printed(2)}") == {1: 0.1, 2: 0.2}


@pytest.mark.parametrize("name", ["iteration", "iter", "update"])
def test_a_step_has_other_names_in_loops_of_ones_own(tmp_path: Path, name: str) -> None:
    file = tmp_path / "log.csv"
    file.write_text(f"{name},mean_reward,loss\n" + "".join(f"{10 * step},0.5,0.1\n" for step in range(1, 9)))
    assert History.read(file)["reward"].steps.tolist() == [*range(10, 90, 10)]


def test_the_bar_of_a_notebook_stays_beside_its_table(tmp_path: Path) -> None:
    bar = "<div><progress value='4' max='300'></progress> [  4/300 01:02 &lt; 1:16:00, 0.06 it/s, Epoch 0.02/1]</div>"
    for less in ("&lt;", "<"):  # as it is saved
        names = "<tr><th>Step</th><th>Training Loss</th><th>reward</th></tr>"
        rows = "".join(f"<tr><td>{step}</td><td>0.1</td><td>0.5</td></tr>" for step in range(1, 5))
        html = f"{bar.replace('&lt;', less)}<table>{names}{rows}</table>"
        cell = {"outputs": [{"data": {"text/html": html}}]}
        file = tmp_path / "run.ipynb"
        file.write_text(json.dumps({"nbformat": 4, "cells": [cell]}))
        run = History.read(file)
        assert run.last_step == 4 and run.settings["max_steps"] == 300


def test_k1_of_a_loop_of_ones_own_is_no_kl() -> None:
    lines = [f"Step {step} | Loss: 0.1 | Reward: 0.5 | KL: {-0.01 * step}" for step in range(1, 9)]
    log = read_records(records(lines))
    assert "kl" not in log.rows[0] and "kl is negative, so it is k1, and is not read" in log.remarks


def test_json_lines_of_one_step_are_a_run_that_has_begun(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text(json.dumps({"step": 1, "reward": 0.5, "loss": 0.1}) + "\n")
    assert History.read(file)["reward"].values.tolist() == [0.5]


def test_of_two_names_of_a_metric_a_rounded_zero_does_not_replace_a_number(tmp_path: Path) -> None:
    file = tmp_path / "log.csv"
    for columns, row, kept in (
        ("loss,train/loss", "0.000,0.000", None),
        ("loss,train/loss", "0.002,0.000", 0.002),
        ("loss,train/loss", "0.000,0.002", 0.002),
    ):
        file.write_text(f"step,{columns},reward\n" + "".join(f"{step},{row},0.5\n" for step in range(1, 9)))
        run = History.read(file)
        assert (run["loss"].values.tolist() if "loss" in run.keys else None) == (kept and [kept] * 8)


def test_long_words_and_rows_of_spaces_are_read_at_once() -> None:
    """Both took time that grows with the square of the length or worse: minutes."""
    word, spaces = "x" * 200_000, " " * 200_000
    [pairs] = records([f"step:1 - {word} - critic/score/mean:0.5"])
    [cells] = records([f"Step 1 | a{spaces}b | Reward{spaces}0.5"])
    assert pairs.values == {"critic/score/mean": 0.5} and cells.values["Reward"] == 0.5


def test_an_answer_with_a_dictionary_is_no_row() -> None:
    answer = "│ {'reward': 3, 'loss': 2} │ 0.5 │\nfunction f() {\n"
    assert rewards("\n".join([printed(1), answer + printed(2), printed(3)])) == {1: 0.1, 2: 0.2, 3: 0.3}


@pytest.mark.parametrize(
    "line",
    [
        "12:00:00 SUCCESS Step {} | 1h44m | Reward {} | Trainable 2/4 (50.0%) | Truncation 25.0%",
        "SUCCESS Step {} | Time: 73.77s | Reward: {} | Seq. Length: 345.6 tokens/sample | Truncation: 25.0%",
        "orchestrator | step {} | Time:3.2s | Avg. Reward: {} | Truncation: 25%",
        "['16:43:41 SUCCESS Step {} | Time: 7.47s | Reward: {} | Truncation: 25.0%', '16:43:41 INFO x']",
    ],
)
def test_cells_are_read_with_and_without_colons(line: str) -> None:
    rows = read("\n".join(line.format(step, step / 10) for step in (1, 2)))
    assert [(row["step"], row["reward"], row["completions/clipped_ratio"]) for row in rows] == [
        (1, 0.1, 0.25),
        (2, 0.2, 0.25),
    ]
    assert rows[0]["step_time"] in (6240.0, 73.77, 3.2, 7.47)


def test_a_loop_of_ones_own_is_read_by_trls_names() -> None:
    assert rewards("step 10 | loss 0.5 | reward=0.25 | kl 0.01\nstep 20 | loss 0.4 | reward=0.5 | kl 0.02") == {
        10: 0.25,
        20: 0.5,
    }


def test_metrics_inside_a_row_of_json_lines_have_their_own_names(tmp_path: Path) -> None:
    """verl's file logger writes such rows."""
    row = {"critic/score/mean": 0.5, "actor/pg_loss": 0.1, "timing_s": {"gen": 2.0}}
    (tmp_path / "log").write_text("\n".join(json.dumps({"step": step, "data": row}) for step in (1, 2)))
    history = History.read(tmp_path / "log")
    assert history.framework == "verl" and history["reward"].steps.tolist() == [1, 2]
    assert history["time/generation"].values.tolist() == [2.0, 2.0]


def test_a_csv_of_several_runs_is_read_for_the_first(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("Step,a - train/reward,a - train/reward__MIN,b - train/reward\n1,0.1,0,\n2,,0,0.9\n")
    history = History.read(tmp_path / "log")
    assert history["reward"].values.tolist() == [0.1] and history.keys == {"reward"}


def test_a_log_that_is_cut_at_both_ends_keeps_what_it_has() -> None:
    first = printed(1)[20:]
    last = printed(4)[: printed(4).index("0.1, 'kl")]  # of the last number, the end may be lost
    rows = read("\n".join([first, printed(2), printed(3), last]))
    assert [row["reward"] for row in rows] == [0.1, 0.2, 0.3, 0.4]
    assert "loss" not in rows[0] and "kl" not in rows[-1]


def test_the_start_of_a_record_is_no_row_and_a_number_that_was_cut_is_not_believed() -> None:
    assert [*rewards(printed(1) + "\n{'loss': 0.0, 'grad_norm': 0.0, 'learning_rate'")] == [1]
    cut = str({"reward": 0.2, "reward_std": 0.1, "grad_norm": 2e-05}).removesuffix("e-05}")
    assert "grad_norm" not in read(printed(1) + "\n" + cut)[-1]


@pytest.mark.parametrize(("logs", "end", "every"), [(93, 1875, 20), (3, 10, 3), (5, 50, 10)])
def test_logs_of_a_run_that_has_ended_share_its_steps(logs: int, end: int, every: int) -> None:
    """A run of 1875 steps that logs each 20 has 93 logs. Python has held them back until the bar was at its end."""
    bars = "".join(bar(step, end) for step in range(end + 1)).replace("\r", "\n")
    lines = [bars, *map(printed, range(1, logs + 1)), "{'train_runtime': 6704, 'train_loss': 0.1}"]
    log = read_records(records("\n".join(lines).split("\n")))
    assert [row["step"] for row in log.rows] == [every * (number + 1) for number in range(logs)] and log.has_ended


def test_one_log_has_the_step_of_the_bar() -> None:
    lines = [bar(10, 14), printed(1), bar(14, 14), "{'train_runtime': 6704, 'train_loss': 0.1}"]
    assert [row["step"] for row in read("\n".join(lines).replace("\r", "\n"))] == [10]


def test_bars_without_a_picture_are_bars() -> None:
    text = "\n".join(f"{step:3d}% {step}/100 [02:39<49:30, 31.26s/it]\n{printed(step)}" for step in (5, 10, 15))
    assert [row["step"] for row in read(text)] == [5, 10, 15]


def test_the_table_of_a_notebook_is_read_behind_its_bar(tmp_path: Path) -> None:
    rows = "".join(f"<tr><td>{step}</td><td>0.0</td><td>{step / 10}</td></tr>" for step in (1, 2))
    html = (
        f"[2/2 1:11:48, Epoch 1/2]\n<table><tr><th>Step</th><th>Training Loss</th><th>reward</th></tr>{rows}</table>"
    )
    output = {"data": {"text/html": [html]}, "output_type": "display_data"}
    (tmp_path / "run.ipynb").write_text(json.dumps({"nbformat": 4, "cells": [{"outputs": [output]}]}))
    assert History.read(tmp_path / "run.ipynb")["reward"].values.tolist() == [0.1, 0.2]


def test_json_lines_are_read_although_the_last_has_the_whole_log(tmp_path: Path) -> None:
    """ms-swift ends its file so. Half of a trainer_state.json is still refused."""
    row = {**TRAINED, "global_step/max_steps": "1/1"}
    file = tmp_path / "logging.jsonl"
    file.write_text(f"{json.dumps(row)}\n{json.dumps({'train_runtime': 1.0, 'log_history': [row]})}\n")
    assert History.read(file)["reward"].values.tolist() == [0.5]
    file.write_text(json.dumps({"log_history": [row]}, indent=1)[:-20])
    with pytest.raises(ValueError, match="cut off or damaged"):
        History.read(file)


@pytest.mark.parametrize("ended", [False, True])
def test_a_log_that_tells_its_end_is_over_however_new_the_file(tmp_path: Path, ended: bool) -> None:
    end = "\n{'train_runtime': 6704, 'train_loss': 0.1}" if ended else ""
    (tmp_path / "log").write_text(bar(10, 14).strip() + f"\n{printed(1)}{end}\n")
    assert History.read(tmp_path / "log").is_over is ended


def test_names_whose_slashes_an_export_has_replaced_are_those_of_verl(tmp_path: Path) -> None:
    names = [
        "actor_entropy",
        "actor_pg_loss",
        "actor_grad_norm",
        "actor_lr",
        "critic_score_mean",
        "response_length_mean",
    ]
    (tmp_path / "log").write_text(",".join(["step", *names]) + "\n1,0.3,0.01,0.4,1e-06,0.25,300\n")
    history = History.read(tmp_path / "log")
    assert history.framework == "verl" and history["reward"].values.tolist() == [0.25]
    (tmp_path / "log").write_text(
        "Global step 1: {'actor_lr': 1e-06, 'actor_grad_norm': 0.5, 'reward': 0.5, 'kl': 0.1}"
    )
    assert History.read(tmp_path / "log").framework == "OpenRLHF"


def test_a_row_that_lacks_the_best_name_is_read_by_the_next() -> None:
    rows = [
        "{'actor_grad_norm': 0.5, 'reward': 0.9, 'rollout/reward_mean': 0.25}",
        "{'actor_grad_norm': 0.5, 'reward': 0.5}",
    ]
    assert rewards("\n".join(f"Global step {step}: {row}" for step, row in enumerate(rows, 1))) == {1: 0.25, 2: 0.5}


def test_a_line_of_slimes_trainer_is_slimes() -> None:
    line = "step 1: {'train/loss': 0.1, 'train/pg_loss': 0.1, 'train/kl_loss': 0.62, 'train/lr-pg_0': 1e-06}"
    assert read_records(records([line])).framework.title == "slime"


def test_a_loop_of_ones_own_can_call_its_reward_a_mean() -> None:
    line = "GRPO step {0}/500 | loss: 0.1 | mean_reward: 0.{0} | KL: 0.01 | clip_frac: 0.125 | lr: 0.000001"
    rows = read("\n".join(line.format(step) for step in (1, 2)))
    assert [(row["reward"], row["kl"], row["clip_ratio/region_mean"]) for row in rows] == [
        (0.1, 0.01, 0.125),
        (0.2, 0.01, 0.125),
    ]
    of_a_reward_model = "{'loss': 0.5, 'min_reward': 0.1, 'max_reward': 0.9, 'mean_reward': 0.5, 'margin': 0.2}"
    assert "reward" not in {name for row in read(of_a_reward_model) for name in row}


# One run in many forms.


def run() -> tuple[list[dict[str, float]], set[tuple[str, int]]]:
    """Return the rows of a recorded run that collapses, of the metrics that plain TRL logs, and what is said of it."""
    log = diagnosis.logs()["trl rate 0.3, noise"]
    kept = ("reward", "reward_std", "frac_reward_zero_std", "kl", "loss", "grad_norm", "entropy", "learning_rate")
    lengths = ("completions/mean_length", "completions/clipped_ratio", "clip_ratio/region_mean")
    rows: list[dict[str, float]] = []
    for row in log["rows"]:
        if "reward" in row:
            rows.append({key: row[key] for key in ("step", *kept, *lengths) if row.get(key) is not None})
    return rows, said(History(rows))


def said(history: History) -> set[tuple[str, int]]:
    findings, _ = diagnose(history)
    return {(finding.symptom.name, finding.since) for finding in findings}


def as_console(rows: list[dict[str, float]]) -> str:
    text = "***** Running training *****\n" + bar(0, len(rows))
    for row in rows:
        values = {key: value for key, value in row.items() if key != "step"}
        text += bar(int(row["step"]), len(rows)) + "\r" + " " * 30 + f"\r\n{values}\n"
    return text


def as_strings(rows: list[dict[str, float]]) -> str:
    lines: list[str] = []
    for row in rows:
        lines.append(str({key: repr(value) for key, value in row.items()}))
    return "\n".join(lines)


def as_json_lines(rows: list[dict[str, float]]) -> str:
    return "\n".join(map(json.dumps, rows))


def as_list(rows: list[dict[str, float]]) -> str:
    return json.dumps(rows, indent=1)


def as_wandb_history(rows: list[dict[str, float]]) -> str:
    """Return columns by the number of the row, as pandas writes the history of W&B."""
    columns: dict[str, dict[str, float]] = {"_step": {}}
    for place, row in enumerate(rows):
        columns["_step"][str(place)] = 7 * place
        for key, value in row.items():
            name = "train/global_step" if key == "step" else f"train/{key}"
            columns.setdefault(name, {})[str(place)] = value
    return json.dumps(columns)


def as_wandb_csv(rows: list[dict[str, float]]) -> str:
    text = io.StringIO()
    keys = [key for key in rows[-1] if key != "step"]
    columns = [f"my run - train/{key}" for key in keys]
    writer = csv.writer(text)
    writer.writerow(["Step", *columns, *(f"{column}__MIN" for column in columns)])
    for row in rows:
        values = [row.get(key, "") for key in keys]
        writer.writerow([row["step"], *values, *(0 for _ in values)])
    return text.getvalue()


def as_table(rows: list[dict[str, float]], between: str = "\t") -> str:
    keys = [key for key in rows[-1] if key != "step"]
    names = [{"loss": "Training Loss"}.get(key, key.replace("/", " / ")) for key in keys]
    lines = ["[60/60 31:31:27, Epoch 2/2]", between.join(["Step", *names])]
    for row in rows:
        lines.append(between.join([str(row["step"]), *(repr(row.get(key, "")) for key in keys)]))
    return "\n".join(lines)


def as_pipes(rows: list[dict[str, float]]) -> str:
    lines = [f"| {line} |" for line in as_table(rows, " | ").split("\n")[1:]]
    lines.insert(1, "|---" * lines[0].count("|"))
    return "\n".join(lines)


def as_notebook(rows: list[dict[str, float]]) -> str:
    cells = [line.split("\t") for line in as_table(rows).split("\n")[1:]]
    html = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>\n" for row in cells)
    output = {"data": {"text/html": [f"<table border='1'>{html}</table>"]}, "output_type": "display_data"}
    return json.dumps(
        {"nbformat": 4, "cells": [{"cell_type": "code", "outputs": [output]}, {"cell_type": "markdown"}]}
    )


FORMS: tuple[Callable[[list[dict[str, float]]], str], ...] = (
    as_console, as_strings, as_json_lines, as_list, as_wandb_history, as_wandb_csv, as_table, as_pipes, as_notebook,
)  # fmt: skip


@pytest.mark.fast_rows(2)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_one_run_has_one_verdict_in_each_form(tmp_path: Path, form: Callable[[list[dict[str, float]]], str]) -> None:
    rows, expected = run()
    assert expected
    file = tmp_path / "log"
    file.write_text(form(rows), encoding="utf-8")
    history = History.read(file)
    assert said(history) == expected
    for key in ("reward", "entropy", "grad_norm", "completions/mean_length"):
        assert history[key].steps.tolist() == [row["step"] for row in rows if key in row]
        assert history[key].values.tolist() == [row[key] for row in rows if key in row]
