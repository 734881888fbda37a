"""A step is left out on all of two processes if the gradient of one of them is not finite."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from tests.distributed import processes, sharded
from tests.tools import resumable, tiny
from tests.tools.nonfinite import OPTIONS, poison_loss, without

OWN: dict[str, Any] = {**OPTIONS, "per_device_train_batch_size": 2, "steps_per_generation": 2}
SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "max_steps": 5}


def build(engine: str, model: Path, output: Path, **options: Any) -> Any:
    torch.manual_seed(0)
    return tiny.trainer(model, output, **OWN, **options, **sharded.options(engine))


def here(trainer: Any) -> dict[str, Any]:
    """Return this process's part of parameters and moments, and the learning rate."""
    optimizer = trainer.optimizer
    while hasattr(optimizer, "optimizer"):  # wrappers of accelerate and DeepSpeed
        optimizer = optimizer.optimizer
    moments = [value for own in optimizer.state.values() for value in own.values() if isinstance(value, torch.Tensor)]
    return {
        "parameters": {name: sharded.bits(sharded.local(p)) for name, p in trainer.model.named_parameters()},
        "moments": [sharded.bits(sharded.local(value)) for value in moments],
        "rate": optimizer.param_groups[0]["lr"],
    }


class Watch(TrainerCallback):
    """Keeps which steps have changed something."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.changed = trainer, []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.before = here(self.trainer)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if resumable.differences(self.before, here(self.trainer)):
            self.changed.append(state.global_step)


@pytest.mark.parametrize(
    "engine", ["DDP", "FSDP2", *(pytest.param(zero, marks=sharded.needs_deepspeed) for zero in ("ZeRO-2", "ZeRO-3"))]
)
@pytest.mark.supports("skip_nonfinite_steps", on="DDP")
@pytest.mark.supports("skip_nonfinite_steps", on=("FSDP2", "ZeRO-2", "ZeRO-3"), only="CPU")
@processes.on_two
def test_all_processes_leave_a_step_out(models: dict[str, Path], tmp_path: Path, engine: str) -> None:
    rank, model, output = torch.distributed.get_rank(), models["dense"], tmp_path
    sharded.enable(engine)
    bad = (1, 2) if rank == 1 else ()
    trainer = poison_loss(build(engine, model, output), bad)
    watch = Watch(trainer)
    trainer.add_callback(watch)
    trainer.train()
    assert watch.changed == [1, 4, 5, 6]
    assert [row.get("steps/nonfinite") for row in tiny.history(trainer)[:-1]] == [None, 1, 1, None, None, None]
    if engine in ("DDP", "FSDP2"):  # DeepSpeed steps in backward, where a callback cannot stop it
        expected = without(build(engine, model, output, skip_nonfinite_steps=None), (1, 2))
        expected.train()
        assert resumable.differences(here(expected), here(trainer)) == []

    bad = (1, 2, 3) if rank == 1 else ()
    trainer = poison_loss(build(engine, model, output, **SAVING), bad)
    with pytest.raises(FloatingPointError, match="step 4 of the policy") as error:
        trainer.train()
    saved = output / "checkpoint-3"
    assert str(error.value).endswith(str(saved))
    resumed = build(engine, model, output, **SAVING)
    resumed.train(resume_from_checkpoint=str(saved))
    assert resumed.state.global_step == 5
    assert all(sharded.local(parameter).isfinite().all() for parameter in resumed.model.parameters())
