"""Which calls of `log` exchange metrics of several processes: one for each call of transformers, on all of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import trl_steady
from tests.tools import tiny

OF_A_SCRIPT: list[dict[str, float]] = [{"judge_runtime": 1.0}, {"train_runtime": 1.0, "loss": 1.0}]


class Plain(trl_steady.GRPOTrainer):
    pass


class Delegates(trl_steady.GRPOTrainer):
    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        self.write(logs, start_time)

    def write(self, logs: dict[str, float], start_time: float | None) -> None:
        super().log({**logs, "mine": 1.0}, start_time)


class LogsAgain(trl_steady.GRPOTrainer):
    """As on the main process alone."""

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log(logs, start_time)
        super().log({**OF_A_SCRIPT[0]})


class Decorated(trl_steady.GRPOTrainer):
    @torch.no_grad()
    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log(logs, start_time)


class InTheLoss(trl_steady.GRPOTrainer):
    def compute_loss(self, *arguments: Any, **keywords: Any) -> Any:
        self.log({**OF_A_SCRIPT[0]})
        return super().compute_loss(*arguments, **keywords)


class Judge(transformers.TrainerCallback):
    """Has a method `log` of its own."""

    trainer: Any

    def log(self, logs: dict[str, float]) -> None:
        self.trainer.log(logs)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.log({**OF_A_SCRIPT[1]})


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("kind", [Plain, Delegates, LogsAgain, Decorated, InTheLoss, Judge])
def test_each_call_of_transformers_exchanges_metrics_once(models: dict[str, Path], tmp_path: Path, kind: Any) -> None:
    options = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}
    args = tiny.arguments(trl_steady.GRPOConfig, tmp_path, **options)
    data = {"train_dataset": tiny.dataset(), "eval_dataset": tiny.dataset(4), "processing_class": tiny.tokenizer()}
    trainer = (Plain if kind is Judge else kind)(str(models["dense"]), tiny.reward, args, **data)
    if kind is Judge:
        judge = Judge()
        judge.trainer = trainer
        trainer.add_callback(judge)
    calls: list[bool] = []
    exchanged: list[dict[str, Any]] = []
    write = trainer.metrics.log

    def record(logs: Any, *, is_collective: bool) -> None:
        calls.append(is_collective)
        if is_collective:
            exchanged.append({**logs})
        write(logs, is_collective=is_collective)

    trainer.metrics.log = record
    trainer.train()
    trainer.evaluate()
    assert calls.count(True) == 5  # two steps, two evaluations and the end
    assert not [logs for logs in exchanged if logs in OF_A_SCRIPT]  # which may come before that of transformers
    # an evaluation has four micro-batches: four prompts, four generations of each
    others = {
        Plain: 0,
        Delegates: 0,
        LogsAgain: 5,
        Decorated: 0,
        InTheLoss: 2 + 2 * 4,
        Judge: 2,
    }
    assert calls.count(False) == others[kind]
