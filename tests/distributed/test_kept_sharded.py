"""Log-probs on kept tokens, and their gradients, of models sharded over two processes are those of whole ones."""

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from trl.trainer.utils import add_fused_lm_head

from tests import tiny
from tests.distributed import processes
from tests.distributed.test_zero3 import initialise
from trl_steady.host.head import scored_by
from trl_steady.sampling.kept import KeptTokens
from trl_steady.sampling.model import KeptModel

IDS = torch.arange(14).view(2, 7)
SETS = KeptTokens.of([sorted({token, *range(token + 3, token + 3 + token % 5)}) for token in IDS.flatten().tolist()])
INDEX = torch.arange(14).view(2, 7).where(IDS % 4 != 1, -1)  # some have no set


def build(*, tied: bool) -> Any:
    torch.manual_seed(0)
    config = copy.deepcopy(tiny.CONFIGS["dense"])
    config.tie_word_embeddings = tied
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", "entropy"))
    return model


def shard(model: Any) -> Any:
    """The layers and the root, as accelerate does."""
    mesh = init_device_mesh("cpu", (processes.WORLD,))
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh)
    return model


def log_probs(model: Any) -> torch.Tensor:
    kept = KeptModel(lambda places, **batch: model(**batch), SETS, INDEX, scored_by, with_entropy=False)
    batch = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "labels": IDS, "fused_lm_head": True}
    return kept(places=torch.arange(14).view(2, 7), **batch).log_probs


def loss(scores: torch.Tensor) -> torch.Tensor:
    assert (scores == 0).any() and (scores < 0).any()
    return (scores * torch.linspace(-1, 1, scores.numel()).view_as(scores)).sum()


def check_fsdp2(rank: int) -> None:
    for tied in (False, True):
        plain = build(tied=tied)
        sharded = shard(copy.deepcopy(plain))
        assert isinstance(sharded.lm_head.weight, DTensor)
        expected, found = log_probs(plain), log_probs(sharded)
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)
        for scores in (expected, found):
            loss(scores).backward()
        for (name, whole), part in zip(plain.named_parameters(), sharded.parameters(), strict=True):
            # both processes have the same tokens: their mean is each one's
            assert torch.allclose(part.grad.full_tensor(), whole.grad, rtol=1e-5, atol=1e-6), (name, rank, tied)


def check_zero3(rank: int) -> None:
    for tied in (False, True):
        plain = build(tied=tied)
        engine = initialise(copy.deepcopy(plain), threshold=0)
        assert engine.module.lm_head.weight.numel() == 0  # but for its part
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        for _ in range(2):
            expected, found = log_probs(plain), log_probs(engine)
            assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5), (rank, tied)
            optimizer.zero_grad()
            loss(expected).backward()
            optimizer.step()
            engine.backward(loss(found))
            engine.step()


@pytest.mark.supports("keep_sampling_mask", on="FSDP2", only="pieces")
def test_shards_of_fsdp2(tmp_path: Path) -> None:
    processes.run(check_fsdp2, tmp_path)


@pytest.mark.supports("keep_sampling_mask", on="ZeRO-3", only="pieces")
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
def test_partitions_of_zero3(tmp_path: Path) -> None:
    """The second log-probs are those after a step."""
    processes.run(check_zero3, tmp_path)
