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
from torch.distributed.tensor.debug import CommDebugMode
from trl.trainer.utils import add_fused_lm_head, use_adapter

from tests.distributed import processes
from tests.tools import resumable, tiny
from trl_steady.features.reference.adapter import add_reference_adapter
from trl_steady.features.reference.tensors import Pair, gather, paired, refresh, restore
from trl_steady.trl_bridge import models
from trl_steady.trl_bridge.lm_head import per_token
from trl_steady.trl_bridge.models import keep_dtypes_and_trainability

UNEVEN = transformers.Qwen2Config(
    **{**tiny.SIZES, "vocab_size": 259, "intermediate_size": 33, "attention_dropout": 0.3}
)
IDS = torch.arange(12).view(2, 6)


def with_adapters() -> peft.PeftModel:
    """A policy and a reference of other values; of rank 1 one process has nothing, of rank 3 each another share."""
    config = peft.LoraConfig(
        r=3,
        rank_pattern={"v_proj": 1},
        target_modules=["q_proj", "v_proj"],
        init_lora_weights=False,
        modules_to_save=["lm_head"],  # in the root's group, which stays whole after a forward
    )
    torch.manual_seed(0)
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_config(UNEVEN).eval(), config)
    add_reference_adapter(model)
    for pair in paired(model):
        pair.policy.data = torch.randn_like(pair.policy)
    return model


def shard(model: Any, dtype: torch.dtype | None = None) -> Any:
    """The layers, and the root with what is left, as accelerate and TRL do."""
    policy = MixedPrecisionPolicy(dtype, dtype, dtype)
    mesh = init_device_mesh("cpu", (processes.WORLD,))
    for part in (*model.get_base_model().model.layers, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    return model


@processes.on_two
def test_shards_move_as_whole_tensors_do_and_only_saving_gathers_the_reference(tmp_path: Path) -> None:
    """A move needs no communication, and the reference alone is gathered. It is the same in eval mode."""
    rank = torch.distributed.get_rank()
    plain = with_adapters().train()
    sharded = shard(copy.deepcopy(plain))

    def pairs() -> list[Pair]:  # a forward leaves other tensors
        return paired(sharded)

    def logits(model: Any) -> torch.Tensor:
        with torch.no_grad(), use_adapter(model, "ref"), models.in_mode(model, is_training=False):
            return model(IDS).logits

    shares = {pair.reference.to_local().shape[0] * 2 - pair.reference.shape[0] for pair in pairs()}
    assert shares == {0, 1 if rank == 0 else -1}  # even and uneven ones
    for alpha in (1.0, 0.6):
        assert torch.equal(logits(sharded), logits(plain))
        of_shards = pairs()
        with CommDebugMode() as moving:
            refresh(of_shards, alpha)
        assert moving.get_total_counts() == 0
        refresh(paired(plain), alpha)
        with CommDebugMode() as gathering:
            found = gather(of_shards, keep=rank == 0)
        assert gathering.get_total_counts() == len(of_shards)
        expected = {pair.name: pair.reference.detach().clone() for pair in paired(plain)}
        assert resumable.differences(expected if rank == 0 else {}, found) == []
        for pair in (*paired(plain), *of_shards):
            pair.policy.data.mul_(1.5)
    saved = gather(pairs())
    refresh(pairs(), 1.0)
    assert not torch.equal(logits(sharded), logits(plain))
    with pytest.raises(ValueError, match="differ in name or shape"):
        restore(pairs(), {name: tensor[:-1] for name, tensor in saved.items()})
    restore(pairs(), saved)
    assert torch.equal(logits(sharded), logits(plain))
    assert all(module.training for module in sharded.modules())


@processes.on_two
def test_values_and_parameters_beside_the_casts_of_mixed_precision(tmp_path: Path) -> None:
    """What stays in the root after a forward follows the optimizer, and values are not rounded to bf16."""
    model = with_adapters()
    base: Any = model.get_base_model()
    add_fused_lm_head(base)
    shard(model, torch.bfloat16)
    with torch.no_grad():
        with keep_dtypes_and_trainability(model):  # which finds the root's parameters cast
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
