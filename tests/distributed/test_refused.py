"""What cannot work under DeepSpeed, under FSDP or beside an engine is refused when the trainer is built.

accelerate takes the first two paths on accelerators alone; here the trainer is told that it is on one of them.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from trl.trainer import grpo_trainer

from tests.tools import tiny
from tests.tools import wide as wide_model
from trl_steady import RewardAdapter

MOVING: dict[str, Any] = {"beta": 0.04, "sync_ref_model": True}
RESET: dict[str, Any] = {**MOVING, "ref_model_sync_reset_optimizer": True}
PPO: dict[str, Any] = {"method": "PPO", "num_generations": 1}
LORA, FLOAT32 = {"lora": True}, {"lora": True, "adapter_dtype": "float32"}
REWARD_MODEL: dict[str, Any] = {"build": {"reward_funcs": RewardAdapter()}}


@pytest.mark.refuses("ref_model_sync_reset_optimizer", on=("ZeRO-2", "ZeRO-3"))
@pytest.mark.refuses("moving reference, full", "moving reference, LoRA", on="FSDP2", where="under version 1 of FSDP")
@pytest.mark.refuses("adapter_dtype", on="ZeRO-3")
@pytest.mark.refuses("PPO, full", "PPO, LoRA", "PPO, quantised base", "ptx_coef", on="ZeRO-3")
@pytest.mark.refuses("PPO, full", on="FSDP2")
@pytest.mark.refuses("PPO, LoRA", on="FSDP2", where="under version 1 of FSDP")
@pytest.mark.refuses("reward model, full", "reward model, LoRA", on=("ZeRO-2", "ZeRO-3", "FSDP2"))
@pytest.mark.refuses("teacher", on=("FSDP2", "ZeRO-2", "ZeRO-3"), where="for a model or an adapter")
@pytest.mark.parametrize(
    ("setup", "works", "refused", "message"),
    [
        pytest.param(
            {"stage": 2},
            MOVING,
            RESET,
            "ref_model_sync_reset_optimizer=True .*DeepSpeed.*FSDP2 or DDP",
            id="an optimizer in partitions is not cleared",
        ),
        pytest.param(
            {"fsdp_version": 1},
            LORA,
            LORA | MOVING,
            "FSDP version 1 .*fsdp_version: 2",
            id="a moving adapter under FSDP 1",
        ),
        pytest.param(
            {"fsdp_version": 1}, {}, MOVING, "FSDP version 1 .*fsdp_version: 2", id="a moving model under FSDP 1"
        ),
        pytest.param(
            {"stage": 3},
            LORA | {"model": "nf4"},
            FLOAT32 | {"model": "nf4"},
            "adapter_dtype='float32'.*ZeRO-3.*ZeRO-2 or FSDP2",
            id="adapters of another dtype in partitions",
        ),
        pytest.param(
            {"stage": 3}, LORA, PPO | LORA, "PPOTrainer .*ZeRO-3.* Use DDP .*FSDP2 with adapters", id="PPO with ZeRO-3"
        ),
        pytest.param(
            {"stage": 2},
            PPO | LORA,
            PPO | LORA | {"value_warmup_steps": 2},
            "value_warmup_steps=2 .*DeepSpeed",
            id="a critic's warm-up with DeepSpeed",
        ),
        pytest.param(
            {"fsdp_version": 2},
            PPO | LORA,
            PPO,
            "FSDP without adapters.*peft_config",
            id="a value model beside a sharded policy",
        ),
        pytest.param(
            {"fsdp_version": 1},
            LORA,
            PPO | LORA,
            "PPOTrainer .*FSDP version 1.*FSDP2 with adapters",
            id="PPO under FSDP 1",
        ),
        pytest.param(
            {"fsdp_version": 2, "activation_checkpointing": True},
            LORA,
            PPO | LORA,
            "activation_checkpointing .*gradient_checkpointing=True",
            id="PPO with FSDP's own checkpointing",
        ),
        pytest.param(
            {"stage": 3}, {}, REWARD_MODEL, "RewardAdapter .*DeepSpeed.* Use DDP", id="a reward model with DeepSpeed"
        ),
        pytest.param(
            {"fsdp_version": 2},
            LORA,
            LORA | REWARD_MODEL,
            "RewardAdapter .*FSDP.* Use DDP",
            id="a reward model with FSDP",
        ),
        pytest.param(
            {"fsdp_version": 2},
            {"teacher": "reference", "beta": 0.04},
            {"teacher": "a model"},
            "teacher='a model' .*FSDP.* Use a server, 'reference' or DDP",
            id="a teacher with FSDP",
        ),
        pytest.param(
            {"stage": 2},
            LORA | {"teacher": "reference"},
            LORA | {"teacher": "an adapter"},
            "teacher='an adapter' .*DeepSpeed.* Use a server, 'reference' or DDP",
            id="a teacher with DeepSpeed",
        ),
    ],
)
def test_what_an_engine_cannot_do_is_refused(
    models: dict[str, Path],
    wide: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    setup: dict[str, Any],
    works: dict[str, Any],
    refused: dict[str, Any],
    message: str,
) -> None:
    """A trainer is under DeepSpeed with a stage, or under a version of FSDP. With `works`, it can be built there."""
    create = transformers.Trainer.create_accelerator_and_postprocess

    def created(self: Any) -> None:
        create(self)
        if "stage" in setup:
            self.is_deepspeed_enabled, self.args.deepspeed_plugin = True, SimpleNamespace(zero_stage=setup["stage"])
        else:
            self.is_fsdp_enabled, plugin = True, SimpleNamespace(**setup)
            monkeypatch.setitem(self.accelerator.state.__dict__, "fsdp_plugin", plugin)

    monkeypatch.setattr(transformers.Trainer, "create_accelerator_and_postprocess", created)
    for prepare in ("prepare_deepspeed", "prepare_fsdp"):  # the reference's model, by what is not there
        monkeypatch.setattr(grpo_trainer, prepare, lambda model, *_, **__: model)

    def build(options: dict[str, Any]) -> Any:
        is_quantised = options.get("model") == "nf4"
        model = wide_model.load(wide, "nf4") if is_quantised else models["dense"]
        return tiny.trainer(model, tmp_path, **{name: value for name, value in options.items() if name != "model"})

    build(works)
    with pytest.raises(ValueError, match=message):
        build(refused)
