"""Passes of tiny mixtures of experts, with their routes replayed or not."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tests.features.router_replay import mixtures
from tests.tools import families
from trl_steady.features.router_replay.replay import Routers
from trl_steady.features.router_replay.routes import is_route

CASES = ("qwen3_moe normalised", "deepseek_v3 in groups", "gpt_oss")
ROWS, COLUMNS = 2, 6
TOKENS = ROWS * COLUMNS
FIRST = "model.layers.0.mlp.gate"
SECOND = "model.layers.1.mlp.gate"

# Of float32 sums in another order (merged weights), in parts of the largest value
ROUNDING = 1e-4

Outcome = tuple[Tensor, dict[str, Tensor]]


def run(model: nn.Module, *, closing: Callable[[], None] = lambda: None) -> Outcome:
    """Of fixed random weights for all logits; between forward and backward, something may be closed."""
    model.zero_grad(set_to_none=True)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, families.VOCABULARY, (ROWS, COLUMNS), generator=generator)
    logits = model(input_ids=ids, use_cache=False).logits
    closing()
    (torch.randn(logits.shape, generator=generator) * logits.float()).sum().backward()
    return logits.detach(), {
        name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None
    }


def recorded(model: nn.Module) -> Tensor:
    with torch.no_grad(), Routers(model).record() as recording:
        run_forward(model)
    return recording.routes()


def run_forward(model: nn.Module) -> Tensor:
    ids = torch.randint(2, families.VOCABULARY, (ROWS, COLUMNS), generator=torch.Generator().manual_seed(0))
    return model(input_ids=ids, use_cache=False).logits


def replayed(model: nn.Module, routes: Tensor) -> Outcome:
    """The first pass is over when the backward begins, which runs routers again where layers are checkpointed."""
    with Routers(model).replay(routes) as replay:
        return run(model, closing=replay.check)


def others(layers: int, seed: int = 0) -> Tensor:
    scores = torch.rand(TOKENS, layers, mixtures.EXPERTS, generator=torch.Generator().manual_seed(seed))
    return scores.argsort(-1)[..., :2].to(torch.uint8)


@contextmanager
def gone_through(model: nn.Module) -> Iterator[list[Tensor]]:
    """What experts are called for, in the order of calls."""
    seen: list[Tensor] = []
    handles = [
        module.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[1].clone()))
        for name, module in model.named_modules()
        if name.endswith("mlp.experts")
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def assert_gone_through(model: nn.Module, routes: Tensor) -> None:
    with gone_through(model) as seen:
        run_forward(model)
    assert torch.equal(torch.stack(seen, dim=1), routes.long())


def assert_equal(outcome: Outcome, expected: Outcome) -> None:
    assert torch.equal(outcome[0], expected[0])
    assert outcome[1].keys() == expected[1].keys()
    assert not [name for name, gradient in expected[1].items() if not torch.equal(outcome[1][name], gradient)]


def are_equal(outcome: Outcome, expected: Outcome) -> bool:
    return all(torch.equal(outcome[1][name], gradient) for name, gradient in expected[1].items())


def apart(value: Tensor, expected: Tensor) -> float:
    return ((value - expected).abs().max() / expected.abs().max()).item()


def routers_of(model: nn.Module) -> list[nn.Module]:
    return [each.router for each in mixtures.layers(model)]


@torch.no_grad()
def move_routers(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    for router in routers_of(model):
        weight = router.get_parameter("weight")
        weight.add_(torch.randn(weight.shape, generator=generator))


def to_engine(routes: Tensor) -> Tensor:
    """Routes as an engine gives them: int32, with -1 where there is no route."""
    return routes.to(torch.int32).where(is_route(routes).unsqueeze(-1), -1)
