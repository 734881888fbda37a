"""SIGTERM to one of two processes, with `enable_jit_checkpoint`."""

from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate import PartialState

from tests.distributed import processes
from tests.tools import resumable, tiny

JIT = {"enable_jit_checkpoint": True}


def build(models: dict[str, Path], output: Path, **options: Any) -> Any:
    options = {"max_steps": 9, "save_strategy": "steps", "save_steps": 1000, **options}
    return tiny.trainer(models["dense"], output, **options)


@processes.on_two
def test_a_signal_to_one_of_two_processes_ends_both(models: dict[str, Path], tmp_path: Path) -> None:
    PartialState(cpu=True)
    rank = torch.distributed.get_rank()
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    whole = resumable.state(tiny.train(build(models, tmp_path / "whole", **options)))
    for run, asked in (("first", (0,)), ("second", (1,)), ("both", (0, 1))):
        stopped = build(models, tmp_path / run, **JIT, **options)
        if rank in asked:
            resumable.interrupt(stopped, "loss", 5)
        stopped.train()
        assert [path.name for path in (tmp_path / run).glob("*-*")] == ["checkpoint-6"]
        resumed = build(models, tmp_path / run, **JIT, **options)
        resumed.train(resume_from_checkpoint=True)
        assert resumable.differences(whole, resumable.state(resumed)) == []


@processes.on_two
def test_processes_exchange_nothing_without_the_option(models: dict[str, Path], tmp_path: Path) -> None:
    PartialState(cpu=True)
    exchanged: dict[bool, int] = {}
    for is_on in (False, True):
        trainer = build(models, tmp_path, per_device_train_batch_size=2, max_steps=4, enable_jit_checkpoint=is_on)
        with mock.patch.object(trainer.accelerator, "reduce", wraps=trainer.accelerator.reduce) as reduce:
            trainer.train()
        exchanged[is_on] = reduce.call_count
    # after each step, at the end of the epoch, and after the save
    assert exchanged[True] - exchanged[False] == 6
