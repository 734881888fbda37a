"""Policy and reference sharded by FSDP2 over two processes: shard by shard what plain tensors are as a whole."""

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from trl.trainer.utils import add_fused_lm_head, use_adapter

from tests.distributed import processes
from tests.tools import resumable, tiny
from trl_steady.host import models
from trl_steady.host.fused_head import per_token
from trl_steady.host.models import parameters_kept
from trl_steady.reference.adapter import add_reference_adapter
from trl_steady.reference.tensors import Pair, adapter_pairs, gather, model_pairs, move, restore

UNEVEN = transformers.Qwen2Config(**{**tiny.SIZES, "vocab_size": 259, "intermediate_size": 33})
IDS = torch.arange(12).view(2, 6)


def build(seed: int) -> Any:
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(UNEVEN).eval()


def with_adapters() -> peft.PeftModel:
    """A policy and a reference of other values; of rank 1 one process has nothing, of rank 3 each another share."""
    config = peft.LoraConfig(
        r=3,
        rank_pattern={"v_proj": 1},
        target_modules=["q_proj", "v_proj"],
        init_lora_weights=False,
        modules_to_save=["lm_head"],  # in the root's group, which stays whole after a forward
    )
    model = peft.get_peft_model(build(0), config)
    add_reference_adapter(model)
    for pair in adapter_pairs(model):
        pair.policy.data = torch.randn_like(pair.policy)
    return model


def shard(model: Any, *, reshard_after_forward: bool | None, dtype: torch.dtype | None = None) -> Any:
    """The layers, and the root with what is left, as accelerate and TRL do."""
    policy = MixedPrecisionPolicy(dtype, dtype, dtype)
    mesh = init_device_mesh("cpu", (processes.WORLD,))
    layers = (model.get_base_model() if isinstance(model, peft.PeftModel) else model).model.layers
    for part in (*layers, model):
        fully_shard(part, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=policy)
    return model


def references(pairs: list[Pair]) -> dict[str, torch.Tensor]:
    return {pair.name: pair.reference.detach().clone() for pair in pairs}


def local(pairs: list[Pair]) -> dict[str, torch.Tensor]:
    """Copies of this process' part of the reference."""
    whole = references(pairs)
    return {name: tensor.to_local() if isinstance(tensor, DTensor) else tensor for name, tensor in whole.items()}


class Adapters:
    """Both in one model, beside its plain copy."""

    def __init__(self) -> None:
        self.plain = with_adapters()
        self.sharded = shard(copy.deepcopy(self.plain), reshard_after_forward=None)

    def pairs(self, *, plain: bool) -> list[Pair]:
        return adapter_pairs(self.plain if plain else self.sharded)

    def logits(self, *, plain: bool) -> torch.Tensor:
        model = self.plain if plain else self.sharded
        with torch.no_grad(), use_adapter(model, "ref"):
            return model(IDS).logits

    def parameters(self) -> list[torch.nn.Parameter]:
        return list(self.sharded.parameters())


class Models:
    """Two models, beside their plain copies; the reference is not sharded again after a forward."""

    def __init__(self) -> None:
        self.plain = build(0), build(1)
        self.sharded = tuple(
            shard(copy.deepcopy(model), reshard_after_forward=again)
            for model, again in zip(self.plain, (None, False), strict=True)
        )

    def pairs(self, *, plain: bool) -> list[Pair]:
        return model_pairs(*(self.plain if plain else self.sharded))

    def logits(self, *, plain: bool) -> torch.Tensor:
        policy, reference = self.plain if plain else self.sharded
        with torch.no_grad():
            policy(IDS)  # an evaluation: the policy's too is left whole
            return reference(IDS).logits

    def parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for model in self.sharded for parameter in model.parameters()]


def check_adapters(rank: int) -> None:
    check(Adapters(), rank)


def check_models(rank: int) -> None:
    check(Models(), rank)


def check(case: Adapters | Models, rank: int) -> None:
    pairs = case.pairs(plain=False)
    sharded = [pair for pair in pairs if isinstance(pair.reference, DTensor)]
    assert sharded == [pair for pair in pairs if isinstance(pair.policy, torch.nn.Parameter)]  # no buffers
    shares = {pair.reference.to_local().shape[0] * 2 - pair.reference.shape[0] for pair in sharded}
    assert shares == {0, 1 if rank == 0 else -1}  # even and uneven ones

    for alpha in (1.0, 0.6):
        assert torch.equal(case.logits(plain=False), case.logits(plain=True))
        pairs = case.pairs(plain=False)
        with CommDebugMode() as moving:
            move(pairs, alpha)
        assert moving.get_total_counts() == 0
        move(case.pairs(plain=True), alpha)
        expected = references(case.pairs(plain=True))
        check_gathering(case, rank, expected)
        assert torch.equal(case.logits(plain=False), case.logits(plain=True))
        for pair in case.pairs(plain=True):
            pair.policy.data = pair.policy * 1.5
        for pair in case.pairs(plain=False):
            pair.policy.data.mul_(1.5)
    check_restoring(case)


def check_gathering(case: Adapters | Models, rank: int, expected: dict[str, torch.Tensor]) -> None:
    """Whole on the process that keeps them, and nothing else is gathered: no base, no policy."""
    pairs = case.pairs(plain=False)
    with CommDebugMode() as gathering:
        found = gather(pairs, keep=rank == 0)
    assert gathering.get_total_counts() == sum(isinstance(pair.reference, DTensor) for pair in pairs)
    with CommDebugMode() as everything:
        for parameter in case.parameters():
            assert isinstance(parameter, DTensor)
            parameter.full_tensor()
    assert everything.get_total_counts() >= 2 * gathering.get_total_counts()
    assert not any(isinstance(tensor, DTensor) or tensor.requires_grad for tensor in found.values())
    assert resumable.differences(expected if rank == 0 else {}, found) == []


def check_restoring(case: Adapters | Models) -> None:
    pairs = case.pairs(plain=False)
    saved, before = gather(pairs), local(pairs)
    case.logits(plain=False)
    pairs = case.pairs(plain=False)
    move(pairs, 1.0)
    moved = local(pairs)
    assert resumable.differences(before, moved) != []
    name = next(pair.name for pair in pairs if pair.name.endswith("weight"))
    for wrong, message in (
        ({**saved, name: saved[name][:-1]}, rf"differ in name or shape, for example {name}"),
        (
            {key: value for key, value in saved.items() if key != name},
            rf"1 tensors differ in name or shape, for example {name}",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            restore(pairs, wrong)
        assert resumable.differences(moved, local(pairs)) == []
    restore(pairs, saved)
    assert resumable.differences(before, local(pairs)) == []
    assert resumable.differences(before, local(case.pairs(plain=False))) == []
    assert torch.equal(case.logits(plain=False), case.logits(plain=True))


@pytest.mark.supports("moving reference, full", "moving reference, LoRA", on="FSDP2", only="pieces")
@pytest.mark.parametrize("checks", [check_adapters, check_models])
def test_shards_move_as_whole_tensors_do_and_only_saving_gathers_the_reference(checks: Any, tmp_path: Path) -> None:
    processes.run(checks, tmp_path)


def check_mixed_precision(rank: int) -> None:
    model = with_adapters()
    base: Any = model.get_base_model()
    add_fused_lm_head(base)
    shard(model, reshard_after_forward=None, dtype=torch.bfloat16)
    with torch.no_grad():
        with parameters_kept(model):  # which finds the root's parameters cast
            before = model(IDS).logits
        models.reshard(model)
        base.lm_head.modules_to_save.default.weight.to_local().mul_(2)
        assert torch.equal(model(IDS).logits, 2 * before)
    found: list[torch.Tensor] = []

    def answer(head: Any) -> torch.Tensor:
        found.append(head.hidden.float().sum(-1))
        return found[0]

    labels = IDS.clone()
    labels[0, 3] = -100
    values = per_token(model, answer, labels=labels, input_ids=IDS, attention_mask=torch.ones_like(IDS))
    assert values.dtype == torch.float32 and not torch.equal(values, values.bfloat16().float())
    torch.testing.assert_close(values, found[0].view(2, 5).where(labels[:, 1:] != -100, 0), rtol=1e-6, atol=0)
    values.square().sum().backward()
    models.reshard(model)
    grads = [p.grad for name, p in model.named_parameters() if "lora_B.default" in name]
    assert all(grad is not None and models.whole(grad).any() for grad in grads)


def test_values_and_parameters_beside_the_casts_of_mixed_precision(tmp_path: Path) -> None:
    """What stays in the root after a forward follows the optimizer, and values are not rounded to bf16."""
    processes.run(check_mixed_precision, tmp_path)
