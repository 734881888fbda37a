"""Policy and reference partitioned by DeepSpeed ZeRO-3: gathered pair by pair, written back, nothing else touched."""

import contextlib
import copy
import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from trl.trainer.utils import use_adapter

from tests.distributed import processes
from tests.tools import resumable, tiny
from trl_steady.reference.adapter import add_reference_adapter
from trl_steady.reference.tensors import Pair, adapter_pairs, gather, model_pairs, move, restore

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


def references(pairs: list[Pair]) -> dict[str, torch.Tensor]:
    return {pair.name: pair.reference.detach().clone() for pair in pairs}


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


def partitions(pairs: list[Pair], *, policy: bool = False) -> dict[str, torch.Tensor]:
    """Copies of this process' part."""
    tensors = {pair.name: pair.policy if policy else pair.reference for pair in pairs}
    return {name: getattr(tensor, "ds_tensor", tensor).detach().clone() for name, tensor in tensors.items()}


class Adapters:
    """Both in one model, beside its plain copy."""

    def __init__(self, threshold: int) -> None:
        self.plain = with_adapters()
        self.engine = initialise(copy.deepcopy(self.plain), threshold=threshold)

    def pairs(self, *, plain: bool) -> list[Pair]:
        return adapter_pairs(self.plain if plain else self.engine.module)

    def logits(self, *, plain: bool) -> torch.Tensor:
        with torch.no_grad(), use_adapter(self.plain if plain else self.engine.module, "ref"):
            return (self.plain if plain else self.engine)(IDS).logits

    def train(self, *, plain: bool) -> None:
        train(self.plain if plain else self.engine)


class Models:
    """Two models, beside their plain copies."""

    def __init__(self, threshold: int) -> None:
        self.plain = build(0), build(1)
        self.engines = [initialise(copy.deepcopy(model), threshold=threshold) for model in self.plain]

    def pairs(self, *, plain: bool) -> list[Pair]:
        return model_pairs(*(self.plain if plain else [engine.module for engine in self.engines]))

    def logits(self, *, plain: bool) -> torch.Tensor:
        with torch.no_grad():
            return (self.plain if plain else self.engines)[1](IDS).logits

    def train(self, *, plain: bool) -> None:
        train((self.plain if plain else self.engines)[0])


def train(model: Any) -> None:
    """One step of gradient descent, on every process the same."""
    loss = model(input_ids=IDS, labels=IDS).loss
    if hasattr(model, "backward"):
        model.backward(loss)
        model.step()
    else:
        loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        model.zero_grad()


def check_zero3(rank: int) -> None:
    for threshold in (0, 100):  # without and with parameters that stay whole
        check(Adapters(threshold), rank)
        check(Models(threshold), rank)


def check(case: Adapters | Models, rank: int) -> None:
    pairs = case.pairs(plain=False)
    assert all(hasattr(pair.reference, "ds_id") for pair in pairs if isinstance(pair.policy, torch.nn.Parameter))
    for alpha in (1.0, 0.6):
        assert torch.allclose(case.logits(plain=False), case.logits(plain=True), rtol=1e-4, atol=1e-5)
        pairs, policy = case.pairs(plain=False), partitions(case.pairs(plain=False), policy=True)
        move(pairs, alpha)
        assert resumable.differences(policy, partitions(pairs, policy=True)) == []
        move(case.pairs(plain=True), alpha)
        found = gather(pairs, keep=rank == 0)
        assert found.keys() == ({pair.name for pair in pairs} if rank == 0 else set())
        for name, tensor in found.items():
            assert torch.allclose(tensor, references(case.pairs(plain=True))[name], rtol=1e-4, atol=1e-6), name
        assert torch.allclose(case.logits(plain=False), case.logits(plain=True), rtol=1e-4, atol=1e-5)
        for plain in (True, False):
            case.train(plain=plain)

    pairs = case.pairs(plain=False)
    saved, before = gather(pairs), partitions(pairs)
    move(pairs, 1.0)
    moved = partitions(pairs)
    assert resumable.differences(before, moved) != []
    name = next(pair.name for pair in pairs if pair.name.endswith("weight"))
    with pytest.raises(ValueError, match=rf"another shape than this model's: {name} is"):
        restore(pairs, {**saved, name: saved[name][:-1]})
    assert resumable.differences(moved, partitions(pairs)) == []
    restore(pairs, saved)
    assert resumable.differences(before, partitions(pairs)) == []
    assert resumable.differences(saved, gather(pairs)) == []
    assert torch.allclose(case.logits(plain=False), case.logits(plain=True), rtol=1e-4, atol=1e-5)


@pytest.mark.supports("moving reference, full", "moving reference, LoRA", on="ZeRO-3", only="pieces")
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
def test_partitions_move_as_whole_tensors_do(tmp_path: Path) -> None:
    processes.run(check_zero3, tmp_path)
