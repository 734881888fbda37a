"""A mixture of experts sharded over two processes replays routes as the whole model does."""

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

from tests.distributed import processes
from tests.distributed.test_zero3 import initialise
from tests.tools import tiny
from trl_steady.routing.replay import Routers

IDS = torch.arange(14).view(2, 7)
EXPERTS, CHOSEN = 4, 2


def build() -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(tiny.CONFIGS["moe"]).train()


def shard(model: Any, *, routers_too: bool) -> Any:
    """The layers and the root, as accelerate does; or the routers in groups of their own as well."""
    mesh = init_device_mesh("cpu", (processes.WORLD,))
    gates = [layer.mlp.gate for layer in model.model.layers] if routers_too else []
    for part in (*gates, *model.model.layers, model):
        fully_shard(part, mesh=mesh)
    return model


def gradients(
    model: Any, routes: torch.Tensor, *, reentrant: bool | None
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Of a fixed loss under these routes, and the choices that were replayed and changed."""
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    with Routers(model).replaying(routes) as replay:
        logits = model(input_ids=IDS, use_cache=False).logits
        replay.check()
        (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
    whole = {
        name: parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        for name, parameter in model.named_parameters()
    }
    return whole, replay.changed


def any_routes() -> torch.Tensor:
    torch.manual_seed(1)
    routes = torch.stack([torch.randperm(EXPERTS)[:CHOSEN] for _ in range(IDS.numel() * 2)])
    return routes.view(IDS.numel(), 2, CHOSEN).to(torch.uint8)


def check(rank: int) -> None:
    routes = any_routes()
    plain = build()
    for routers_too in (False, True):
        for reentrant in (None, False, True):
            sharded = shard(copy.deepcopy(plain), routers_too=routers_too)
            expected, changed = gradients(copy.deepcopy(plain), routes, reentrant=None)
            found, changed_too = gradients(sharded, routes, reentrant=reentrant)
            assert changed.sum() > 0
            assert torch.equal(changed, changed_too)
            assert expected.keys() == found.keys()
            for name, gradient in expected.items():  # both processes have the same tokens: their mean is each one's
                assert torch.allclose(found[name], gradient, rtol=1e-5, atol=1e-6), (name, rank, reentrant)
            live, _ = gradients(copy.deepcopy(plain), torch.full_like(routes, 255), reentrant=None)
            assert not all(torch.allclose(live[name], gradient, rtol=1e-3) for name, gradient in expected.items())


def check_zero3(rank: int) -> None:
    routes = any_routes()
    plain = build()
    engine = initialise(copy.deepcopy(plain), threshold=0)
    assert engine.module.model.layers[0].mlp.gate.weight.numel() == 0  # but for its part
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)

    def loss(model: Any, routers: Routers) -> tuple[torch.Tensor, torch.Tensor]:
        with routers.replaying(routes) as replay:
            logits = model(input_ids=IDS, use_cache=False).logits
            replay.check()
        return (logits.log_softmax(-1) * torch.linspace(-1, 1, logits.numel()).view_as(logits)).mean(), replay.changed

    for _ in range(2):
        expected, changed = loss(plain, Routers(plain))
        found, changed_too = loss(engine, Routers(engine.module))
        assert torch.allclose(found, expected, rtol=1e-3, atol=1e-5), (rank, found, expected)
        assert changed.sum() > 0 and torch.equal(changed, changed_too)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        engine.backward(found)
        engine.step()
    live = plain(input_ids=IDS, use_cache=False).logits
    with Routers(plain).replaying(routes):
        assert not torch.allclose(plain(input_ids=IDS, use_cache=False).logits, live, rtol=1e-3)


@pytest.mark.supports("router_replay R2", "router_replay R3", on="FSDP2", only="pieces")
def test_shards_replay_routes_as_the_whole_model_does(tmp_path: Path) -> None:
    processes.run(check, tmp_path)


@pytest.mark.supports("router_replay R2", "router_replay R3", on="ZeRO-3", only="pieces")
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
def test_partitions_of_zero3_replay_routes_as_the_whole_model_does(tmp_path: Path) -> None:
    """The second pass is that after a step."""
    processes.run(check_zero3, tmp_path)
