"""Log-probs on kept tokens, and their gradients, of models sharded over two processes are those of whole ones."""

import contextlib
import copy
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers.integrations.deepspeed import HfDeepSpeedConfig
from trl.trainer.utils import add_fused_lm_head

from tests.distributed import processes
from tests.distributed.test_zero3 import initialise
from tests.tools import tiny
from tests.tools.sets import kept_of
from trl_steady.sampling.proxy import KeptModel

IDS = torch.arange(14).view(2, 7)
SETS = kept_of([sorted({token, *range(token + 3, token + 3 + token % 5)}) for token in IDS.flatten().tolist()])
INDICES = torch.arange(14).view(2, 7)
INDEX = {"all": INDICES, "some": INDICES.where(IDS % 4 != 1, -1), "none": torch.full_like(INDICES, -1)}
"""Which tokens have sets."""
ROUNDS = [("some", "some"), ("all", "some"), ("some", "none"), ("none", "all")]
"""Which tokens of the first process have sets, and which of the second."""


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


def log_probs(model: Any, kind: str, *, with_entropy: bool = False) -> torch.Tensor:
    kept = KeptModel(lambda token_indices, **batch: model(**batch), SETS, INDEX[kind], with_entropy=with_entropy)
    batch = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "labels": IDS, "fused_lm_head": True}
    scores = kept(token_indices=INDICES, **batch).log_probs
    assert (scores == 0).any() == (kind != "none") and (scores < 0).any()
    return scores


def loss(scores: torch.Tensor) -> torch.Tensor:
    return (scores * torch.linspace(-0.1, 0.1, scores.numel()).view_as(scores)).sum()


def train(model: Any, scores: torch.Tensor) -> None:
    """Leave in each gradient the mean over the processes."""
    model.zero_grad()
    loss(scores).backward()
    for parameter in (each for each in model.parameters() if each.requires_grad):
        torch.distributed.all_reduce(parameter.grad)
        parameter.grad /= processes.WORLD


def check_fsdp2(rank: int) -> None:
    for tied in (False, True):
        plain = build(tied=tied)
        sharded = shard(copy.deepcopy(plain))
        assert isinstance(sharded.lm_head.weight, DTensor)
        for kinds in ROUNDS:
            sharded.zero_grad()  # before the forward, after which the root's parameters are whole
            expected, found = log_probs(plain, kinds[rank]), log_probs(sharded, kinds[rank])
            assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)
            train(plain, expected)
            loss(found).backward()
            for (name, whole), part in zip(plain.named_parameters(), sharded.parameters(), strict=True):
                assert torch.allclose(part.grad.full_tensor(), whole.grad, rtol=1e-5, atol=1e-6), (name, kinds, tied)


class Gathers:
    """Which gathers of the head a ZeRO-3 engine enters, where it has to gather it by itself.

    DeepSpeed 0.19 notices in a forward that the model reads the head, and from then on gathers it with the model's own
    parameters. Here it does not notice, so that TRL's gathers do it all.
    """

    def __init__(self, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        import deepspeed  # pyright: ignore[reportMissingImports]

        self.passes: list[str] = []
        self._config = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})  # TRL gathers only if there is one
        engine.module.register_forward_pre_hook(self._hide)
        entering = deepspeed.zero.GatheredParameters.__enter__

        def enter(context: Any) -> None:
            self.passes.append("forward" if torch._C._current_graph_task_id() == -1 else "backward")
            entering(context)

        monkeypatch.setattr(deepspeed.zero.GatheredParameters, "__enter__", enter)

    def _hide(self, model: Any, _: Any) -> None:
        model.lm_head._parameters._in_forward = False


def check_zero3(rank: int) -> None:
    for tied in (False, True):
        check_rounds(rank, build(tied=tied), lambda _: contextlib.nullcontext())


def check_zero3_with_a_frozen_head(rank: int) -> None:
    """DeepSpeed can leave only a frozen head to TRL's gathers: a trained one must be whole when its gradient comes."""
    plain = build(tied=False)
    plain.lm_head.requires_grad_(False)
    check_rounds(rank, plain, gathering_alone)


@contextlib.contextmanager
def gathering_alone(engine: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        gathers = Gathers(engine, monkeypatch)
        yield
        assert gathers.passes == ["forward", "backward"] * len(ROUNDS)


def check_rounds(rank: int, plain: Any, context: Callable[[Any], contextlib.AbstractContextManager[None]]) -> None:
    engine = initialise(copy.deepcopy(plain), threshold=0)
    assert engine.module.lm_head.weight.numel() == 0  # but for its part
    asked = [(kinds[rank], number % 2 == 0) for number, kinds in enumerate(ROUNDS)]
    optimizer, expected = torch.optim.SGD(plain.parameters(), lr=0.1), list[torch.Tensor]()
    for kind, with_entropy in asked:
        expected.append(log_probs(plain, kind, with_entropy=with_entropy))
        train(plain, expected[-1])
        optimizer.step()
    with context(engine):
        for number, (kind, with_entropy) in enumerate(asked):
            found = log_probs(engine, kind, with_entropy=with_entropy)
            assert torch.allclose(found, expected[number], rtol=1e-4, atol=1e-5), (
                number,
                (found - expected[number]).abs().max(),
            )
            engine.backward(loss(found))
            engine.step()


@pytest.mark.supports("keep_sampling_mask", on="FSDP2", only="pieces")
def test_shards_of_fsdp2(tmp_path: Path) -> None:
    processes.run(check_fsdp2, tmp_path)


@pytest.mark.supports("keep_sampling_mask", on="ZeRO-3", only="pieces")
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
@pytest.mark.parametrize("check", [check_zero3, check_zero3_with_a_frozen_head])
def test_partitions_of_zero3(tmp_path: Path, check: Callable[[int], None]) -> None:
    """Each round's log-probs are those after the steps before."""
    processes.run(check, tmp_path, seconds=120)
