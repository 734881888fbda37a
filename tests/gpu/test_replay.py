"""Routing replay on CUDA: the identities of the CPU suite on 3.5 billion parameters. Not yet run on a GPU.

    python -m pytest tests/gpu/test_replay.py -m gpu -s

prints what was compared; `python tests/benchmarks/replay.py --large --checkpointing` measures the time.
"""

from typing import Any

import pytest
import torch
from tests.benchmarks import replay
from tests.tools import tiny
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from trl_steady.routing.replay import Routers

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
SHAPE = (2, 256)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    with torch.device("cuda"):
        built = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**tiny.SIZES, **replay.LARGE})).to(torch.bfloat16)
    return built.train()


def ids() -> Tensor:
    return torch.randint(50, 200, SHAPE, generator=torch.manual_seed(1)).cuda()


def passed(model: Any, routes: Tensor | None, *, checkpointing: bool) -> tuple[Tensor, list[Tensor], Tensor]:
    """Logits, gradients, and the routes that were taken."""
    model.gradient_checkpointing_disable()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.zero_grad(set_to_none=True)
    routers = Routers(model)
    if routes is None:
        with routers.recording() as recording, torch.no_grad():
            model(input_ids=ids(), use_cache=False)
        routes = recording.routes()
    weights = torch.linspace(-1, 1, SHAPE[1], device="cuda").unsqueeze(-1)
    with routers.replaying(routes) as replaying:
        logits = model(input_ids=ids(), use_cache=False).logits
        replaying.check()
        (logits.float() * weights).mean().backward()
    return logits.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None], routes


def plain(model: Any) -> tuple[Tensor, list[Tensor]]:
    model.gradient_checkpointing_disable()
    model.zero_grad(set_to_none=True)
    logits = model(input_ids=ids(), use_cache=False).logits
    (logits.float() * torch.linspace(-1, 1, SHAPE[1], device="cuda").unsqueeze(-1)).mean().backward()
    return logits.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def apart(own: list[Tensor], others: list[Tensor]) -> float:
    """Of gradients, relative to their length."""
    off = sum(float((a.float() - b.float()).square().sum()) for a, b in zip(own, others, strict=True))
    return (off / sum(float(b.float().square().sum()) for b in others)) ** 0.5


def test_replaying_the_models_own_routes_changes_nothing(model: Any) -> None:
    logits, gradients = plain(model)
    _, again = plain(model)
    noise = apart(again, gradients)  # of the kernels themselves
    replayed, own, _ = passed(model, None, checkpointing=False)
    print(f"gradients apart by {apart(own, gradients):.1e}, two plain passes by {noise:.1e}")
    assert torch.equal(replayed, logits)
    assert apart(own, gradients) <= 2 * noise


def test_checkpointing_replays_the_same_routes(model: Any) -> None:
    experts, chosen = replay.LARGE["num_experts"], replay.LARGE["num_experts_per_tok"]
    generator = torch.Generator().manual_seed(2)
    tokens, layers = SHAPE[0] * SHAPE[1], replay.LARGE["num_hidden_layers"]
    other = torch.rand(tokens, layers, experts, generator=generator).topk(chosen).indices.to("cuda", torch.uint8)
    logits, gradients, _ = passed(model, other, checkpointing=False)
    again, own, _ = passed(model, other, checkpointing=True)
    live, _ = plain(model)
    print(f"gradients apart by {apart(own, gradients):.1e}")
    assert torch.equal(again, logits) and not torch.equal(live, logits)
    assert apart(own, gradients) < 1e-2
