"""What cannot work under DeepSpeed, under FSDP or beside an engine is refused when the trainer is built.

accelerate takes the first two paths on accelerators alone; here the trainer is told that it is on one of them.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from trl.trainer import grpo_trainer

from tests.host import test_engine
from tests.tools import tiny
from tests.tools import wide as wide_model

server = test_engine.server
MOVING: dict[str, Any] = {"beta": 0.04, "sync_ref_model": True}
RESET: dict[str, Any] = {**MOVING, "ref_model_sync_reset_optimizer": True}


def under(
    monkeypatch: pytest.MonkeyPatch, *, stage: int | None = None, fsdp: int | None = None, **of_fsdp: bool
) -> None:
    """Trainers built from now on are under DeepSpeed with this stage, or under this version of FSDP."""
    create = transformers.Trainer.create_accelerator_and_postprocess

    def created(self: Any) -> None:
        create(self)
        if stage is not None:
            self.is_deepspeed_enabled, self.args.deepspeed_plugin = True, SimpleNamespace(zero_stage=stage)
        if fsdp is not None:
            self.is_fsdp_enabled, plugin = True, SimpleNamespace(fsdp_version=fsdp, **of_fsdp)
            monkeypatch.setitem(self.accelerator.state.__dict__, "fsdp_plugin", plugin)

    monkeypatch.setattr(transformers.Trainer, "create_accelerator_and_postprocess", created)
    for prepare in ("prepare_deepspeed", "prepare_fsdp"):  # the reference's model, by what is not there
        monkeypatch.setattr(grpo_trainer, prepare, lambda model, *_, **__: model)


@pytest.mark.refuses(
    "ref_model_sync_reset_optimizer",
    on=("ZeRO-2", "ZeRO-3"),
    message="DeepSpeed keeps the optimizer's state in partitions of its own, which cannot be cleared from here. Leave "
    "the optimizer's state as it is (ref_model_sync_reset_optimizer=False), or use FSDP2 or DDP.",
)
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
def test_an_optimizer_in_partitions_is_not_cleared(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int, lora: bool
) -> None:
    under(monkeypatch, stage=stage)
    tiny.trainer(models["dense"], tmp_path, lora=lora, **MOVING)
    with pytest.raises(ValueError, match=r"DeepSpeed keeps the optimizer's state .*cannot be cleared .*FSDP2 or DDP"):
        tiny.trainer(models["dense"], tmp_path, lora=lora, **RESET)


@pytest.mark.refuses(
    "moving reference, full",
    "moving reference, LoRA",
    on="FSDP2",
    where="under version 1 of FSDP",
    message="FSDP version 1 flattens the reference's parameters away. Set fsdp_version: 2.",
)
@pytest.mark.parametrize("lora", [False, True])
def test_version_1_of_fsdp_is_refused_a_moving_reference(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: bool
) -> None:
    with monkeypatch.context() as patch:
        under(patch, fsdp=2)
        tiny.trainer(models["dense"], tmp_path, lora=lora, **RESET)
    under(monkeypatch, fsdp=1)
    tiny.trainer(models["dense"], tmp_path, lora=lora, beta=0.04)
    with pytest.raises(ValueError, match=r"FSDP version 1 flattens the reference's .*Set fsdp_version: 2"):
        tiny.trainer(models["dense"], tmp_path, lora=lora, **MOVING)


@pytest.mark.refuses(
    "adapter_dtype",
    on="ZeRO-3",
    message="adapter_dtype='float32': ZeRO-3 needs parameters of one dtype. Leave it unset, or use ZeRO-2 or FSDP2.",
)
def test_zero3_is_refused_an_adapter_of_another_dtype(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = lambda **options: tiny.trainer(wide_model.load(wide, "nf4"), tmp_path, lora=True, **options)
    with monkeypatch.context() as patch:
        under(patch, stage=2)
        build(adapter_dtype="float32")
    under(monkeypatch, stage=3)
    build()
    with pytest.raises(ValueError, match=r"adapter_dtype='float32': ZeRO-3 needs parameters of one.*ZeRO-2 or FSDP2"):
        build(adapter_dtype="float32")
