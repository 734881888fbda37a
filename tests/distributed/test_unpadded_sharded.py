"""Passes without padding of models sharded over two processes, each with rows of its own, are those of whole ones."""

import contextlib
import copy
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from trl.trainer.utils import add_fused_lm_head

from tests.distributed import processes
from tests.distributed.test_zero3 import initialise
from tests.oracles.padding import padded
from tests.tools import tiny
from trl_steady.padding.attention import attending_in, switched
from trl_steady.padding.families import traits
from trl_steady.padding.packing import Segment
from trl_steady.padding.proxy import UnpaddedModel

FIRST, SECOND = [5, 6, 7, 8], [9, 4]
ROWS = padded([(FIRST, [8, 3]), (FIRST, [9, 9, 4, 5, 6]), (SECOND, [11]), (SECOND, [12, 13, 3])])
OWN = len(ROWS.ids) // processes.WORLD


def build() -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(tiny.CONFIGS["dense"]).train()
    add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", "entropy"))
    return model


WEIGHTS = torch.linspace(-1, 1, ROWS.ids[:, 1:].numel()).view(len(ROWS.ids), -1)


def loss(called: Any, rows: slice) -> torch.Tensor:
    """Over the completions of these rows."""
    batch = {"input_ids": ROWS.ids[rows], "attention_mask": ROWS.mask[rows], "labels": ROWS.labels[rows]}
    scores = called(**batch, fused_lm_head=True).log_probs
    assert (scores < 0).sum() == (ROWS.labels[rows] != -100).sum()
    return (scores * WEIGHTS[rows]).sum()


def unpadded(called: Any, bare: Any, shapes: list[tuple[int, ...]], *, share_prompts: bool) -> UnpaddedModel:
    @contextlib.contextmanager
    def attending(segments: Sequence[Segment]) -> Iterator[None]:
        with switched(bare), attending_in(segments):
            yield

    def seen(**batch: Any) -> Any:
        shapes.append(tuple(batch["input_ids"].shape))
        return called(**batch)

    width = ROWS.prompt_columns
    return UnpaddedModel(seen, traits(bare), prompt_width=width, share_prompts=share_prompts, attending=attending)


def check_shapes(shapes: list[tuple[int, ...]], rank: int) -> None:
    """Every token of this process' rows, in one row; then one copy of the prompt, but for its last token."""
    prompt = len((FIRST, SECOND)[rank])
    tokens = int(ROWS.mask[rank * OWN :][:OWN].sum())
    assert shapes == [(1, tokens), (1, tokens - (prompt - 1))]


def check_fsdp2(rank: int) -> None:
    own, shapes = slice(rank * OWN, (rank + 1) * OWN), list[tuple[int, ...]]()
    for share_prompts in (False, True):
        plain = build()
        sharded = copy.deepcopy(plain)
        mesh = init_device_mesh("cpu", (processes.WORLD,))
        for part in (*sharded.model.layers, sharded):
            fully_shard(part, mesh=mesh)
        (loss(plain, slice(None)) / processes.WORLD).backward()
        found = loss(unpadded(sharded, sharded, shapes, share_prompts=share_prompts), own)
        assert torch.allclose(found, loss(plain, own), rtol=1e-5, atol=1e-5), (rank, share_prompts)
        found.backward()
        for (name, whole), part in zip(plain.named_parameters(), sharded.parameters(), strict=True):
            assert torch.allclose(part.grad.full_tensor(), whole.grad, rtol=1e-4, atol=1e-5), (name, share_prompts)
    check_shapes(shapes, rank)


def check_zero3(rank: int) -> None:
    own, shapes = slice(rank * OWN, (rank + 1) * OWN), list[tuple[int, ...]]()
    for share_prompts in (False, True):
        plain = build()
        engine = initialise(copy.deepcopy(plain), threshold=0)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        (loss(plain, slice(None)) / processes.WORLD).backward()
        found = loss(unpadded(engine, engine.module, shapes, share_prompts=share_prompts), own)
        assert torch.allclose(found, loss(plain, own), rtol=1e-4, atol=1e-4), (rank, share_prompts)
        engine.backward(found)
        engine.step()
        optimizer.step()
        with torch.no_grad():
            assert torch.allclose(loss(engine, own), loss(plain, own), rtol=1e-3, atol=1e-3), (rank, share_prompts)
    check_shapes(shapes, rank)


@pytest.mark.supports("trim_padding", "share_prompts", on="FSDP2", only="pieces")
def test_shards_of_fsdp2_leave_padding_out(tmp_path: Path) -> None:
    processes.run(check_fsdp2, tmp_path)


@pytest.mark.supports("trim_padding", "share_prompts", on="ZeRO-3", only="pieces")
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
def test_partitions_of_zero3_leave_padding_out(tmp_path: Path) -> None:
    """Log-probs, and those after a step."""
    processes.run(check_zero3, tmp_path)
