"""A reference partitioned by DeepSpeed ZeRO-3 is gathered pair by pair. tests/sharded has whole runs."""

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import peft
import pytest
import torch
import transformers

from tests.tools import tiny
from trl_steady.reference.adapter import add_reference_adapter
from trl_steady.reference.tensors import adapter_pairs, gather, model_pairs, move, restore

IDS = torch.arange(12).view(2, 6)
LORA = peft.LoraConfig(
    r=3, target_modules=["q_proj", "v_proj"], init_lora_weights=False, modules_to_save=["input_layernorm"]
)


def build(seed: int) -> Any:
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(tiny.CONFIGS["dense"])


def with_adapters() -> peft.PeftModel:
    """A policy and a reference of other values."""
    model = peft.get_peft_model(build(0), LORA)
    add_reference_adapter(model)
    for pair in adapter_pairs(model):
        pair.policy.data = torch.randn_like(pair.policy)
    return model


class Recorder:
    """Stands in for `deepspeed.zero`: what is gathered, and who may write."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[torch.Tensor], int | None]] = []
        self.open = False

    @contextlib.contextmanager
    def GatheredParameters(self, params: list[torch.Tensor], modifier_rank: int | None = None) -> Iterator[None]:
        assert not self.open
        self.calls.append((params, modifier_rank))
        self.open = True
        yield
        self.open = False


@pytest.fixture
def deepspeed(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    module = types.ModuleType("deepspeed")
    recorder = Recorder()
    module.zero = recorder  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "deepspeed", module)
    return recorder


@pytest.mark.parametrize("lora", [False, True])
def test_each_pair_is_gathered_alone_and_written_from_one_process(deepspeed: Recorder, lora: bool) -> None:
    if lora:
        models = (with_adapters(),)
        pairs = adapter_pairs(models[0])
    else:
        models = (build(0), build(1))
        pairs = model_pairs(*models)
    for i, parameter in enumerate(parameter for model in models for parameter in model.parameters()):
        parameter.ds_id, parameter.ds_shape = i, parameter.shape
    partitioned = [pair for pair in pairs if hasattr(pair.policy, "ds_id")]
    assert len(partitioned) == 10 if lora else len(partitioned) == len(list(models[0].parameters()))

    def gathered() -> list[tuple[list[int], int | None]]:
        calls = [([id(tensor) for tensor in tensors], rank) for tensors, rank in deepspeed.calls]
        deepspeed.calls.clear()
        return calls

    move(pairs, 0.5)
    assert gathered() == [([id(pair.policy), id(pair.reference)], 0) for pair in partitioned]
    saved = gather(pairs)
    assert gathered() == [([id(pair.reference)], None) for pair in partitioned]
    restore(pairs, saved)
    assert gathered() == [([id(pair.reference)], 0) for pair in partitioned]


def initialise(model: Any, *, threshold: int) -> Any:
    """A ZeRO-3 engine; parameters of fewer elements than `threshold` stay whole between uses."""
    import deepspeed  # pyright: ignore[reportMissingImports]

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": threshold},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return deepspeed.initialize(model=model, config=config, optimizer=torch.optim.SGD(trained, lr=0.1))[0]
