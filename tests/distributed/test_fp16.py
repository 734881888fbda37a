"""fp16 on two processes: both leave the same steps out, lower the same scales, and resume to the bit."""

import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from accelerate.utils import gather_object

from tests.distributed import processes, sharded
from tests.tools import half, resumable, tiny
from trl_steady.features.scalar_head.optimizer import ScalarHeadOptimizer
from trl_steady.trl_bridge.models import reshard

# a rollout is used for 4 steps, and the checkpoint is in the middle of one
OPTIONS: dict[str, Any] = {
    "fp16": True,
    "per_device_train_batch_size": 2,
    "steps_per_generation": 2,
    "num_iterations": 2,
    "max_steps": 10,
    "save_strategy": "steps",
    "save_steps": 6,
    "optim": "adamw_torch",  # torch's fused one fails with the scaler that accelerate has for FSDP2
}
METHODS: dict[str, dict[str, Any]] = {
    "GRPO": {"beta": 0.04},
    "PPO": {"method": "PPO", "num_generations": 1, "beta": 0.0},
}


def here(trainer: Any) -> dict[str, Any]:
    """Return this process's part of the policy and the critic, all scalers, and the log."""
    parameters = dict(trainer.model.named_parameters())
    if hasattr(trainer, "critic"):
        parameters |= {f"critic {i}": value for i, value in enumerate(trainer.critic.parameters)}
    shown = ("step", "loss", "loss_scale", "steps/nonfinite")
    return {
        "parameters": {name: sharded.bits(sharded.local(value)) for name, value in parameters.items()},
        "scalers": {name: scaler.state_dict() for name, scaler in half.scalers(trainer).items()},
        "log": [{name: str(row.get(name)) for name in shown} for row in tiny.history(trainer)[:-1]],
    }


def train(model: Path, output: Path, engine: str, checkpoint: str | None = None, **options: Any) -> Any:
    with half.allowed(scale=2.0**20, growth_interval=2):  # the first steps overflow, and some steps after a growth
        torch.manual_seed(0)
        trainer = tiny.trainer(model, output, lora=True, **{**OPTIONS, **options}, **sharded.options(engine))
        trainer.train(resume_from_checkpoint=checkpoint)
    return trainer


@pytest.mark.parametrize("engine", ["DDP", "FSDP2"])
@pytest.mark.parametrize("method", METHODS)
@processes.on_two
def test_two_processes_leave_the_same_steps_out(
    models: dict[str, Path], tmp_path: Path, engine: str, method: str
) -> None:
    sharded.enable(engine)
    trainer = train(models["dense"], tmp_path, engine, save_strategy="no", **METHODS[method])
    own = here(trainer)
    one, two = gather_object([(own["scalers"], own["log"])])
    assert one == two
    left_out = [row for row in own["log"] if row["steps/nonfinite"] != "None"]
    assert 2 < len(left_out) < len(own["log"])
    assert all(sharded.local(parameter).isfinite().all() for parameter in trainer.model.parameters())


@pytest.mark.parametrize("method", METHODS)
@processes.on_two
def test_two_processes_resume_exactly(models: dict[str, Path], tmp_path: Path, method: str) -> None:
    """accelerate cannot load the optimizer of a run under FSDP2 and fp16."""
    sharded.enable("DDP")
    whole = train(models["dense"], tmp_path / "whole", "DDP", **METHODS[method])
    checkpoint = str(tmp_path / "whole/checkpoint-6")
    resumed = train(models["dense"], tmp_path / "resumed", "DDP", checkpoint, **METHODS[method])
    assert resumable.differences(here(whole), here(resumed)) == []


@pytest.mark.parametrize("engine", ["DDP", "FSDP2"])
@processes.on_two
def test_an_overflow_of_one_process_leaves_the_step_of_the_critic_out_on_both(
    models: dict[str, Path], tmp_path: Path, engine: str
) -> None:
    sharded.enable(engine)
    rank = torch.distributed.get_rank()
    with half.allowed():
        how = {**OPTIONS, **METHODS["PPO"], **sharded.options(engine), "save_strategy": "no", "max_steps": 4}
        trainer = tiny.trainer(models["dense"], tmp_path, lora=True, **how)
    step, norms = ScalarHeadOptimizer.step, []

    def overflow(optimizer: ScalarHeadOptimizer, *arguments: Any) -> Any:
        reshard(trainer.critic.backbone)
        parameters = [own for group in optimizer.adamw.param_groups for own in group["params"] if own.grad is not None]
        if rank == 1:
            sharded.part(parameters[0].grad).fill_(math.inf)
        before = [sharded.local(parameter) for parameter in parameters]
        norms.append(step(optimizer, *arguments))
        assert all(torch.equal(sharded.local(own), value) for own, value in zip(parameters, before, strict=True))

    with patch.object(ScalarHeadOptimizer, "step", overflow):
        trainer.train()
    assert len(norms) == 4 and not any(norm.isfinite() for norm in norms)
    scales = gather_object([half.scalers(trainer)["critic"].get_scale()])
    assert scales == [half.SCALE / 2**4] * 2
