"""SIGTERM with `enable_jit_checkpoint`: the run saves a whole step and ends, and its resume is the run itself."""

import signal
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.tools import resumable, tiny
from tests.tools.cases import cases

JIT = {"enable_jit_checkpoint": True}
BASE: dict[str, Any] = {"max_steps": 9, "save_strategy": "steps", "save_steps": 1000}
EVALUATED: dict[str, Any] = {"build": {"eval_dataset": tiny.dataset(4)}, "per_device_eval_batch_size": 4}
# an epoch is six steps
EPOCHS: dict[str, Any] = {
    **EVALUATED,
    "steps_per_generation": 2,
    "build": {"train_dataset": tiny.dataset(3), "eval_dataset": tiny.dataset(4)},
    "max_steps": 15,
}


def build(models: dict[str, Path], output: Path, **options: Any) -> Any:
    options = {**BASE, **options}
    return tiny.trainer(models[options.pop("model", "dense")], output, **options)


@pytest.mark.fast_rows(1)
@pytest.mark.filterwarnings("ignore:value_init")
@pytest.mark.parametrize(
    ("place", "options"),
    cases(
        [
            ("loss", {}),
            ("data", {"lora": True}),
            ("rollout", {"steps_per_generation": 1}),
            ("log", {"logging_steps": 5}),
            ("save", {"save_steps": 5}),
            ("loss", {"gradient_accumulation_steps": 2, "steps_per_generation": 6, "num_iterations": 2}),
            ("loss", {"method": "RLOO", "lora": True}),
            ("loss", {"method": "PPO", "lora": True, "num_generations": 2, "num_iterations": 2}),
            ("rollout", {"method": "PPO", "num_generations": 1, "steps_per_generation": 1}),
            ("loss", {"model": "moe", "lora": True, "router_replay": "R2"}),
            ("rollout", {"model": "moe", "lora": True, "router_replay": "R3", "steps_per_generation": 5}),
            ("loss", {"keep_sampling_mask": True, "top_p": 0.9}),
            ("loss", {"lora": True, "beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 6}),
        ],
        (
            ("loss", {"gradient_accumulation_steps": 2, "steps_per_generation": 6, "num_iterations": 2}),
            ("rollout", {"method": "PPO", "num_generations": 1, "steps_per_generation": 1}),
        ),
    ),
)
def test_a_signal_in_a_step_is_saved_after_it(
    place: str, options: dict[str, Any], models: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    whole = resumable.state(tiny.train(build(models, tmp_path / "whole", **options)))
    stopped = build(models, tmp_path / "run", **JIT, **options)
    resumable.interrupt(stopped, place, 5)
    stopped.train()
    step = 5 if place == "save" else 6
    assert stopped.state.global_step == step and signal.getsignal(signal.SIGTERM) == handler
    assert [path.name for path in (tmp_path / "run").glob("*-*")] == [f"checkpoint-{step}"]
    said = capfd.readouterr()
    assert f"stopped at step {step}; resume_from_checkpoint=True continues from checkpoint-{step}\n" in said.err
    resumed = build(models, tmp_path / "run", **JIT, **options)
    resumed.train(resume_from_checkpoint=True)
    assert f"resumed from checkpoint-{step} (step {step})\n" in capfd.readouterr().out
    found = resumable.state(resumed)
    for history in (whole["history"], found["history"]):  # transformers averages a loss since the resume
        history[:] = [{name: row[name] for name in row if name != "loss"} for row in history]
    assert resumable.differences(whole, found) == []


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(
    ("place", "step", "options"),
    [
        pytest.param("loss", 5, {**EVALUATED, "eval_strategy": "steps", "eval_steps": 3}, id="by steps"),
        pytest.param("loss", 5, {**EPOCHS, "eval_strategy": "epoch"}, id="at the end of an epoch"),
        pytest.param("loss", 3, {**EPOCHS, "eval_strategy": "epoch", "save_strategy": "epoch"}, id="in mid-epoch"),
        pytest.param("evaluation", 6, {**EVALUATED, "eval_strategy": "steps", "eval_steps": 3}, id="in it"),
        pytest.param("evaluation", 6, {**EPOCHS, "eval_strategy": "epoch", "save_strategy": "epoch"}, id="in that"),
        pytest.param("loss", 8, {**EVALUATED, "eval_strategy": "steps", "eval_steps": 3}, id="after the last step"),
        # transformers then begins no epoch, in which it would restore the random numbers
        pytest.param("loss", 11, {**EPOCHS, "eval_strategy": "epoch", "max_steps": 12}, id="after the last epoch"),
    ],
)
def test_an_evaluation_that_is_due_waits_for_the_resume(
    place: str, step: int, options: dict[str, Any], models: dict[str, Path], tmp_path: Path
) -> None:
    """Its answers take random numbers from those of the rollouts."""
    whole = resumable.state(tiny.train(build(models, tmp_path / "whole", **options)))
    stopped = build(models, tmp_path / "run", **JIT, **options)
    resumable.interrupt(stopped, place, step)
    stopped.train()
    of_last_step = [row for row in stopped.state.log_history if row["step"] == stopped.state.global_step]
    assert any("eval_reward" in row for row in of_last_step) == (place == "evaluation")
    resumed = build(models, tmp_path / "run", **JIT, **options)
    resumed.train(resume_from_checkpoint=True)
    assert resumable.differences(whole, resumable.state(resumed)) == []


class StopsEarly(transformers.TrainerCallback):
    """Ends the run at an evaluation, as early stopping does."""

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == 6


@pytest.mark.parametrize(
    "options", [{}, {"steps_per_generation": 2, "build": EPOCHS["build"]}], ids=["in mid-epoch", "between epochs"]
)
def test_an_evaluation_that_ends_the_run_ends_its_resume(
    models: dict[str, Path], tmp_path: Path, options: dict[str, Any]
) -> None:
    """In mid-epoch, transformers has read the next step by then."""
    options = {**EVALUATED, "eval_strategy": "steps", "eval_steps": 3, "max_steps": 9, **options}
    options["build"] = {**options["build"], "callbacks": [StopsEarly()]}
    whole = tiny.train(build(models, tmp_path / "whole", **options))
    assert whole.state.global_step == 6
    stopped = build(models, tmp_path / "run", **JIT, **options)
    resumable.interrupt(stopped, "loss", 5)
    stopped.train()
    resumed = build(models, tmp_path / "run", **JIT, **options)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 6
    assert resumable.differences(tiny.parameters(whole), tiny.parameters(resumed)) == []


def rising(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
    return [float(trainer_state.global_step)] * len(completions)


def test_an_evaluation_after_the_last_step_finds_the_best_checkpoint(models: dict[str, Path], tmp_path: Path) -> None:
    options = {**EVALUATED, "eval_strategy": "steps", "eval_steps": 3, "save_steps": 3, "save_total_limit": 1}
    options |= {"load_best_model_at_end": True, "metric_for_best_model": "reward", "greater_is_better": True}
    options["build"] = {**EVALUATED["build"], "reward_funcs": rising}
    stopped = build(models, tmp_path, **JIT, **options)
    resumable.interrupt(stopped, "loss", 8)
    stopped.train()
    assert stopped.state.best_global_step == 6
    resumed = build(models, tmp_path, **JIT, **options)
    resumed.train(resume_from_checkpoint=True)
    assert Path(resumed.state.best_model_checkpoint).name == "checkpoint-9"
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-9"]


def test_the_checkpoint_stays_where_only_the_best_is_kept(models: dict[str, Path], tmp_path: Path) -> None:
    options = {**EVALUATED, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "save_total_limit": 1}
    options |= {"load_best_model_at_end": True, "metric_for_best_model": "reward"}
    stopped = build(models, tmp_path, **JIT, **options)
    resumable.interrupt(stopped, "data", 4)
    stopped.train()
    best = stopped.state.best_model_checkpoint
    assert best is not None and {Path(best).name, "checkpoint-5"} == {path.name for path in tmp_path.glob("*-*")}


def test_a_signal_in_the_last_step_changes_nothing(
    models: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer = build(models, tmp_path, save_strategy="no", max_steps=3, **JIT)
    resumable.interrupt(trainer, "loss", 2)
    trainer.train()
    assert trainer.state.global_step == 3 and "stopped at" not in capfd.readouterr().err
    trainer.train()  # a second training ends by itself too
    assert trainer.state.global_step == 3
