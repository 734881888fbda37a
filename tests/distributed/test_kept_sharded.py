"""Log-probs on kept tokens, and their gradients, of models sharded over two processes are those of whole ones."""

import copy
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from trl.trainer.utils import add_fused_lm_head

from tests.distributed import processes
from tests.tools import tiny
from tests.tools.sets import candidate_sets
from trl_steady.features.sampling_mask.model import SamplingMaskModel

IDS = torch.arange(14).view(2, 7)
SETS = candidate_sets([sorted({token, *range(token + 3, token + 3 + token % 5)}) for token in IDS.flatten().tolist()])
INDICES = torch.arange(14).view(2, 7)
INDEX = {"all": INDICES, "some": INDICES.where(IDS % 4 != 1, -1), "none": torch.full_like(INDICES, -1)}
"""Which tokens have sets."""


def log_probs(model: Any, kind: str) -> torch.Tensor:
    bare = lambda token_indices, **batch: model(**batch)
    kept = SamplingMaskModel(bare, SETS, INDEX[kind], with_entropy=False, kept_mass=torch.zeros(2).double())
    batch = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "labels": IDS, "fused_lm_head": True}
    scores = kept(token_indices=INDICES, **batch).log_probs
    assert (scores == 0).any() == (kind != "none") and (scores < 0).any()
    return scores


def loss(scores: torch.Tensor) -> torch.Tensor:
    return (scores * torch.linspace(-0.1, 0.1, scores.numel()).view_as(scores)).sum()


@processes.on_two
def test_shards_of_fsdp2(tmp_path: Path) -> None:
    rank = torch.distributed.get_rank()
    for tied in (False, True):
        torch.manual_seed(0)
        config = copy.deepcopy(tiny.CONFIGS["dense"])
        config.tie_word_embeddings = tied
        plain: Any = transformers.AutoModelForCausalLM.from_config(config).train()
        add_fused_lm_head(plain, temperature=0.7, outputs=("log_probs", "entropy"))
        sharded: Any = copy.deepcopy(plain)
        mesh = init_device_mesh("cpu", (processes.WORLD,))
        for part in (*sharded.model.layers, sharded):  # as accelerate does
            fully_shard(part, mesh=mesh)
        assert isinstance(sharded.lm_head.weight, DTensor)
        # which tokens of the first process have sets, and which of the second
        for kinds in (("some", "some"), ("all", "some"), ("some", "none"), ("none", "all")):
            sharded.zero_grad()  # before the forward, after which the root's parameters are whole
            plain.zero_grad()
            expected, found = log_probs(plain, kinds[rank]), log_probs(sharded, kinds[rank])
            assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)
            loss(expected).backward()
            loss(found).backward()
            for (name, whole), part in zip(plain.named_parameters(), sharded.parameters(), strict=True):
                torch.distributed.all_reduce(whole.grad)
                mean = whole.grad / processes.WORLD
                assert torch.allclose(part.grad.full_tensor(), mean, rtol=1e-5, atol=1e-6), (name, kinds, tied)
