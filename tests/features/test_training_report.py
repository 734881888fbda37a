"""`training_report` and `log_line` in real runs: what they print, what they write, and what they measure."""

import io
import json
import math
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainerCallback
from trl.generation.vllm_generation import VLLMGeneration

from tests.features.step_rewards import tools as stepwise
from tests.report.runs import DEAD
from tests.tools import engines, resumable, tiny
from tests.tools.cases import cases
from tests.tools.engines import Build
from trl_steady.core.metrics import Clock
from trl_steady.features import training_report
from trl_steady.features.training_report import TrainingReport, log_line
from trl_steady.report import History, diagnose
from trl_steady.report.symptoms import look

mixture, engine, in_process = engines.mixture, engines.engine, engines.in_process
REPORTED: dict[str, Any] = {"training_report": True, "log_line": True}
PHASES = {"time/generation", "time/rewards", "time/scoring", "time/rollout", "time/update"}


@pytest.fixture(scope="module")
def run(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    """A run of two rollouts with a checkpoint after the first, and what it printed."""
    folder = tmp_path_factory.mktemp("reported")
    written: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_report.tqdm, "write", written.append)
        trainer = tiny.trainer(
            models["dense"], folder, **REPORTED, max_steps=8, save_strategy="steps", save_steps=4, beta=0.04
        )
        seen: list[dict[str, Any]] = []
        keep = trainer._generate_and_score_completions
        trainer._generate_and_score_completions = lambda inputs: seen.append(keep(inputs)) or seen[-1]
        trainer.train()
    trainer.seen = seen
    return trainer, "\n".join(written)


def test_each_log_is_one_line_and_the_end_is_the_verdict(run: tuple[Any, str]) -> None:
    _, written = run
    steps = re.findall(r"^step (\d)/8  reward \S+  KL \S+  cut off \d+%  clipped \d+%", written, re.M)
    assert steps == ["1", "5"]  # TRL logs the reward in the first step of a rollout
    assert len(re.findall(r"^step ", written, re.M)) == 8
    last, verdict, page = written.splitlines()[-3:]
    assert last.startswith("step 8/8  ") and verdict.startswith("trl-steady: 2 rollouts: too few to judge")
    assert page == f"trl-steady: the report is in {Path(run[0].args.output_dir) / 'report.html'}"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0423, "0.042 s"), (9.4, "9.4 s"), (12.4, "12 s"), (180, "180 s"), (252, "4 min 12 s"), (3780, "1 h 03 min")],
)
def test_times_are_readable(seconds: float, text: str) -> None:
    assert training_report.duration(seconds) == text


def test_the_page_and_the_log_are_in_the_output_folder(run: tuple[Any, str]) -> None:
    trainer, _ = run
    folder = Path(trainer.args.output_dir)
    assert "Time of a step" in (folder / "report.html").read_text()
    history = History.read(folder)
    assert history.last_step == 8 and history.settings["max_steps"] == 8 and "trl" in history.run["versions"]


def test_phases_add_up_to_the_time_of_a_step(run: tuple[Any, str]) -> None:
    trainer, _ = run
    rows = [row for row in trainer.state.log_history if "time/update" in row]
    assert len(rows) == 8 and rows[0].keys() >= PHASES and "time/sync" not in rows[0]
    assert "time/generation" not in rows[1] and all(row[key] > 0 for row in rows for key in row if "time/" in key)
    for row in rows:  # TRL's step_time leaves out the optimizer's step
        assert sum(value for key, value in row.items() if key.startswith("time/")) >= 0.9 * row["step_time"]


def test_the_share_of_padding_is_that_of_the_rollouts(run: tuple[Any, str]) -> None:
    trainer, _ = run
    logged = [row["padding/share"] for row in trainer.state.log_history if "padding/share" in row]
    masks = [torch.cat([s["prompt_mask"], s["completion_mask"]], dim=1) for s in trainer.seen]
    assert logged == pytest.approx([1 - mask.float().mean().item() for mask in masks], abs=1e-6)


def test_the_answers_of_the_last_rollout_before_a_save_are_kept(run: tuple[Any, str]) -> None:
    trainer, _ = run
    folder = Path(trainer.args.output_dir)
    first, second = (json.loads((folder / f"checkpoint-{n}/steady.json").read_text())["answers"] for n in (4, 8))
    assert [rollout["step"] for rollout in second] == [0, 4] and first == second[:1]
    sampled = zip(trainer.seen[0]["completion_ids"], trainer.seen[0]["completion_mask"].bool(), strict=True)
    rewards = {
        trainer.processing_class.decode(ids[mask]): tiny.reward([ids[mask].tolist()])[0] for ids, mask in sampled
    }
    best = first[0]["groups"][0]["answers"]
    assert [answer["place"] for answer in best] == ["best", "median", "worst"]
    assert best[0]["reward"] > best[2]["reward"] and best[0]["tokens"] is None
    assert all(answer["reward"] == rewards[answer["text"]] for answer in best)


def test_a_resumed_run_goes_on_with_its_answers_and_trains_the_same(
    run: tuple[Any, str], models: dict[str, Path], tmp_path: Path
) -> None:
    trainer, _ = run
    options = {"max_steps": 8, "save_strategy": "steps", "save_steps": 4, "beta": 0.04}
    resumed = tiny.trainer(models["dense"], tmp_path, **REPORTED, **options)
    resumed.train(resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-4")
    answers = resumed.feature(TrainingReport)._answers
    assert [rollout["step"] for rollout in answers] == [0, 4]
    assert resumable.differences(tiny.parameters(trainer), tiny.parameters(resumed)) == []
    plain = tiny.train(tiny.trainer(models["dense"], tmp_path / "plain", **options))
    assert resumable.differences(tiny.parameters(trainer), tiny.parameters(plain)) == []
    assert "report.html" not in {path.name for path in (tmp_path / "plain").iterdir()}


@pytest.mark.slow
def test_a_second_training_tells_its_symptoms_again_and_keeps_no_rollout(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    monkeypatch.setattr(training_report.tqdm, "write", written.append)
    options, _ = DEAD["constant reward"]
    trainer = tiny.trainer(models["dense"], tmp_path, training_report=True, max_steps=44, **options)
    trainer.train()
    kept = trainer.feature(TrainingReport)
    assert [rollout["step"] for rollout in kept._answers] == [40]
    first = [line for line in written if "the reward" in line and line.startswith("trl-steady: critical")]
    trainer.train()
    again = [line for line in written if "the reward" in line and line.startswith("trl-steady: critical")]
    assert len(first) == 1 and again == 2 * first
    assert [rollout["step"] for rollout in kept._answers] == [40]


def test_tokens_have_their_advantages(models: dict[str, Path], tmp_path: Path) -> None:
    build = {"reward_funcs": stepwise.lines, "rollout_func": stepwise.rollout}
    tiny.train(tiny.trainer(models["dense"], tmp_path, **REPORTED, loss_type="gspo_token", build=build))
    (rollout, *_) = History.read(tmp_path).run["answers"]
    answer = rollout["groups"][0]["answers"][0]
    assert len(answer["tokens"]) and "".join(text for text, _ in answer["tokens"]) == answer["text"]
    assert "title='advantage" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("name", cases(DEAD, ("constant reward",)))
def test_a_dead_run_is_named_in_the_run_once_and_at_its_end(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    options, expected = DEAD[name]
    written: list[str] = []
    alerts: list[dict[str, Any]] = []
    monkeypatch.setattr(training_report.tqdm, "write", written.append)
    trackio: Any = ModuleType("trackio")
    trackio.alert, trackio.AlertLevel = lambda **alert: alerts.append(alert), SimpleNamespace(WARN=1, ERROR=2)
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    monkeypatch.setattr("trl.extras.profiling.is_trackio_available", lambda: False)  # TRL would log its profile there
    trainer = tiny.trainer(models["dense"], tmp_path, training_report=True, max_steps=48, **options)
    trainer.args.report_to = ["trackio"]
    trainer.train()
    *lines, verdict, _ = written
    told = [line.removeprefix("trl-steady: ") for line in lines]
    assert len(told) == len({line.split(" (since")[0] for line in told}) == len(alerts)
    found = [finding for finding in diagnose(History.read(tmp_path))[0] if finding.symptom.name in expected]
    assert min(finding.since for finding in found) <= 24  # the first half
    for finding in found:
        symptom = finding.symptom
        (line,) = [line for line in told if symptom.what in line]
        assert finding.advice in line or (finding.cause and line.startswith("so also: "))
        assert symptom.what in verdict
        assert {"title": symptom.what, "level": 2 if symptom.level == "critical" else 1}.items() <= next(
            alert for alert in alerts if alert["title"] == symptom.what
        ).items()


def test_without_matplotlib_the_option_says_what_to_install(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_report, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"training_report=True needs matplotlib.*trl-steady\[report\].*False"):
        tiny.trainer(models["dense"], tmp_path, training_report=True)


def test_pages_are_written_at_saves_only_if_that_takes_little_of_the_time(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(training_report.time, "monotonic", lambda: now[0])
    pages: list[float] = []

    def page(_: object) -> None:
        pages.append(now[0])
        report._written, report._seconds = now[0], 2.0

    trainer = tiny.trainer(models["dense"], tmp_path, training_report=True)
    report = trainer.feature(TrainingReport)
    monkeypatch.setattr(TrainingReport, "_write_page", page)
    report._written = 0.0
    for second in (100, 499, 501, 600, 700, 702):  # 5 s at first, then 2 s: a hundredth of 500 s and of 200 s
        now[0] = float(second)
        report.save_state(tmp_path)
    assert pages == [501.0, 702.0]


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(
    "broken",
    [
        pytest.param("trl_steady.report.page.write", id="page"),
        pytest.param("trl_steady.report.plots.draw", id="picture", marks=pytest.mark.slow),
        pytest.param("trl_steady.features.training_report.look", id="symptoms", marks=pytest.mark.slow),
        pytest.param("trl_steady.features.training_report.diagnose", id="verdict"),
        pytest.param("trl_steady.features.training_report.log_line", id="line"),
        pytest.param("trl_steady.features.training_report.chosen", id="answers", marks=pytest.mark.slow),
    ],
)
def test_an_error_of_the_report_is_one_warning_and_the_run_trains_the_same(
    run: tuple[Any, str], models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OverflowError("no room on the paper")

    monkeypatch.setattr(broken, fails)
    monkeypatch.setattr(training_report, "_LARGEST_SHARE", math.inf)  # a page at each save
    saves = {"save_strategy": "steps", "save_steps": 4}
    with pytest.warns(UserWarning, match="the report failed, .* OverflowError: no room on the paper") as warned:
        trained = tiny.train(tiny.trainer(models["dense"], tmp_path, **REPORTED, **saves, max_steps=8, beta=0.04))
    assert len([warning for warning in warned if "the report failed" in str(warning.message)]) == 1
    assert resumable.differences(tiny.parameters(run[0]), tiny.parameters(trained)) == []
    assert History.read(tmp_path / "checkpoint-8").settings["max_steps"] == 8


def test_a_checkpoint_with_a_broken_file_of_the_report_is_resumed(
    run: tuple[Any, str], models: dict[str, Path], tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint-4"
    shutil.copytree(Path(run[0].args.output_dir) / checkpoint.name, checkpoint)
    file = checkpoint / "steady.json"
    file.write_text('{"answers": 5}')  # a file that is no JSON is not complete
    resumed = tiny.trainer(models["dense"], tmp_path, **REPORTED, max_steps=8, beta=0.04)
    with pytest.warns(UserWarning, match="the report failed, .* TypeError"):
        resumed.train(resume_from_checkpoint=str(checkpoint))
    assert resumable.differences(tiny.parameters(run[0]), tiny.parameters(resumed)) == []


def test_a_range_too_wide_for_a_picture_ends_no_run(
    models: dict[str, Path], tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    # a loss that does not use epsilon, and a mask with which the picture of the range is drawn
    options: dict[str, Any] = {"loss_type": "sapo", "epsilon": 1e308, "off_policy_mask_threshold": 5.0}
    tiny.train(tiny.trainer(models["dense"], tmp_path, **REPORTED, **options))
    assert "clip range" in (tmp_path / "report.html").read_text()
    assert not [warning for warning in recwarn if "the report failed" in str(warning.message)]


def test_a_phase_does_not_count_the_phases_inside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, now = Clock(), iter([0.0, 1.0, 3.0, 7.0, 15.0, 31.0])
    monkeypatch.setattr("trl_steady.core.metrics._now", lambda: next(now))
    clock.is_on = True
    with clock.phase("scoring"):  # outside a step, as in an evaluation
        pass
    with clock.phase("update"), clock.phase("rollout"), clock.phase("generation"), clock.phase(None):
        pass
    clock.steps = 2
    assert clock.read() == {"update": (1 + 16) / 2, "rollout": (2 + 8) / 2, "generation": 4 / 2}
    assert clock.read() == {}


def test_sending_the_policy_to_an_engine_is_no_generation(in_process: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("trl_steady.core.metrics._now", lambda: now[0])
    trainer = in_process(training_report=True, max_steps=1)
    monkeypatch.setattr(VLLMGeneration, "sync_weights", lambda _: now.append(now.pop() + 3.0))
    generate = trainer.vllm_generation.generate
    monkeypatch.setattr(
        trainer.vllm_generation, "generate", lambda **asked: (now.append(now.pop() + 5.0), generate(**asked))[1]
    )
    trainer.train()
    times = {key: value for key, value in trainer.state.log_history[0].items() if key.startswith("time/")}
    assert times["time/sync"] == 3.0 and times["time/generation"] == 5.0 and sum(times.values()) == 8.0


def test_a_line_is_in_the_output_of_a_job_at_once(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file, or a pipe, has a buffer of some kilobytes."""
    written = io.BytesIO()
    seen: list[int] = []

    class Reader(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seen.append(written.getvalue().count(b"\nstep "))

    trainer = tiny.trainer(models["dense"], tmp_path, log_line=True, max_steps=4, build={"callbacks": [Reader()]})
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written))
    sys.stdout.write("\n")
    trainer.train()
    assert seen == [0, 1, 2, 3] and b"too few to judge" in written.getvalue()


def solved(completions: list[Any], **_: Any) -> list[float]:
    return [0.0] * len(completions)


def test_the_report_knows_the_metrics_of_the_runs_evaluations(models: dict[str, Path], tmp_path: Path) -> None:
    """They have any names, and one that falls while the reward rises is an exploited reward."""
    options = {"eval_metrics": [solved], "save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    trainer = tiny.trainer(models["dense"], tmp_path, **REPORTED, **options)
    trainer.train()
    written = json.loads((tmp_path / "checkpoint-1/steady.json").read_text())
    rows: list[dict[str, float]] = []
    for step in range(1, 201):
        rows.append({"step": step, "reward": step / 200})
        if step % 10 == 0:
            rows.append({"step": step, "eval_solved": 1 - step / 250})
    for run in (written, trainer.feature(TrainingReport)._run()):
        found, _ = look(History(rows, run))
        assert found["evaluation-falls"].metric == "eval_solved"


@pytest.mark.parametrize(("share", "shown"), [(0.0, "cut off 0%  "), (1.0, "cut off 100%  ")])
def test_a_line_names_answers_that_are_cut_off_and_the_report_reads_it(
    share: float, shown: str, tmp_path: Path
) -> None:
    logs = {"loss": 0.1, "reward": 0.31, "completions/clipped_ratio": share, "clip_ratio/region_mean": 0.0}
    line = log_line(logs, 1, 9)
    assert line == f"step 1/9  reward 0.31  {shown}clipped 0%"
    file = tmp_path / "train.log"
    evaluation = log_line({"eval_reward": 0.5, "eval_accuracy": 0.25}, 9, 9, ["accuracy"])
    file.write_text("\n".join([*(log_line(logs, step, 9) for step in range(1, 10)), evaluation]))
    run = History.read(file)
    assert [*run["completions/clipped_ratio"].values] == [share] * 9 and run["eval_accuracy"].values == [0.25]


def test_each_set_of_an_evaluation_has_a_line(models: dict[str, Path], tmp_path: Path) -> None:
    logs = {"eval_math_reward": 0.25, "eval_code_reward": 0.5, "eval_math_loss": 1.0}
    assert log_line(logs, 3, 9) == "step 3/9  eval_math_reward 0.25  eval_code_reward 0.50"
    logs = {"eval_reward": 0.975, "eval_solved": 0.08, "eval_loss": 1.0, "eval_completions/mean_length": 9.0}
    assert log_line(logs, 3, 9, ["solved", "length"]) == "step 3/9  held out 0.97  eval_solved 0.08"
    written: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_report.tqdm, "write", written.append)
        sets = {"eval_dataset": {"math": tiny.dataset(2), "code": tiny.dataset(2)}}
        tiny.trainer(models["dense"], tmp_path, log_line=True, build=sets).evaluate()
    assert ["eval_math_reward" in line for line in written] == [True, False]
