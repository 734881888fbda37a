"""Every family with a mixture of experts records its routes and follows those it is given."""

import re
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from tests.features.router_replay import mixtures
from tests.features.router_replay.mixtures import CASES, FAMILIES, Layer
from tests.features.router_replay.passes import TOKENS, Outcome, assert_equal, run
from tests.tools import families
from trl_steady.core.token_record import nothing
from trl_steady.features.router_replay.replay import Replay, Routers
from trl_steady.features.router_replay.router import RoutingError
from trl_steady.features.router_replay.routes import is_route

pytestmark = pytest.mark.skipif(not families.IS_TOLD, reason="the families are those of newer transformers")

BY_OPTION = {"gemma4_text", "llama4_text"}
"""Not in `tests.tools.families`, or no mixtures there."""
REFUSED = {"doge", "inkling2_loop_text", "phimoe"}

# Of weights against a formula that is written otherwise, in float32: some units in the last place, of numbers up to 2.
GATES = 2e-6


def _recorded(routers: Routers, model: nn.Module) -> tuple[Outcome, Tensor]:
    with routers.record() as recording:
        outcome = run(model)
    return outcome, recording.routes()


def _replayed(routers: Routers, model: nn.Module, routes: Tensor) -> tuple[Outcome, Replay]:
    with routers.replay(routes) as replay:
        outcome = run(model)
        replay.check()
    return outcome, replay


def _others(layers: Sequence[Layer], chosen: int, seed: int = 0) -> Tensor:
    """(N, L, K) at random, but never the expert of a layer's own number."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(TOKENS, len(layers), layers[0].gates.size(1), generator=generator)
    for number in range(len(layers)):
        scores[:, number, number % mixtures.EXPERTS] = -1
    return scores.argsort(-1, descending=True)[..., :chosen].to(torch.uint8)


def _is_of(routes: Tensor, width: int) -> Tensor:
    """(N, E) bool of (N, K)."""
    return torch.zeros(len(routes), width, dtype=torch.bool).scatter(1, routes.long(), True)


@pytest.mark.slow
def test_the_cases_are_all_families_with_experts() -> None:
    kinds = re.compile("Router|Experts|TopK|Topk")
    mixed = {
        name
        for name in families.names()
        if any(kinds.search(type(module).__name__) for module in families.build(name).modules())
    }
    assert mixed - REFUSED == set(FAMILIES) - BY_OPTION
    assert {family for family, _ in CASES.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", ["llama", "doge", "gemma4_text"])
def test_a_model_without_experts_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="has no routers"):
        Routers(families.build(name))


def test_layers_that_run_more_than_once_in_a_pass_are_refused() -> None:
    model = families.build("inkling2_loop_text")
    routers = Routers(model)
    with routers.record() as recording:
        run(model)
    with pytest.raises(RoutingError, match=r"layers\.1\.mlp\.gate chose experts .* more than once"):
        recording.routes()
    routes = torch.zeros(TOKENS, len(routers.names), 2, dtype=torch.uint8)
    with pytest.raises(RoutingError, match=r"layers\.1\.mlp\.gate ran 2 times .* more than once"):
        _replayed(routers, model, routes)


def test_experts_that_topk_does_not_choose_are_refused_in_the_first_pass() -> None:
    """Phi-MoE takes one maximum after the other. A block without a router's name chooses by itself."""
    phi = families.build("phimoe")
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.router called topk 0 times"), Routers(phi).record():
        run(phi)
    qwen = mixtures.build("qwen3_moe")
    _, expected = _recorded(Routers(qwen), qwen)
    for layer in mixtures.layers(qwen):
        layer.router.__class__ = type("Linear", (type(layer.router),), {})
    by_block = Routers(qwen)
    assert by_block.names == ["model.layers.0.mlp", "model.layers.1.mlp"]
    _, routes = _recorded(by_block, qwen)
    assert torch.equal(routes, expected)


@pytest.mark.fast_rows(11)
@pytest.mark.parametrize("case", CASES)
def test_a_family_records_its_routes_and_follows_others(case: str) -> None:
    model = mixtures.build(case)
    layers = mixtures.layers(model)
    routers = Routers(model)
    with mixtures.seen(layers):
        natural = run(model)
    chosen = torch.stack([layer.chosen for layer in layers], dim=1)
    _check_recorded_routes(model, routers, natural, chosen)
    count = int(chosen[0, 0].sum())
    _check_other_routes(case, model, routers, layers, _others(layers, count))
    routes = _others(layers, count, seed=1)
    routes[torch.rand(routes.shape[:2], generator=torch.Generator().manual_seed(2)) < 0.5] = nothing(routes.dtype)
    _check_tokens_without_a_route(model, routers, layers, routes)
    assert_equal(run(model), natural)  # nothing is left behind
    # with no route at all, and by a replay that no recording went before
    outcome, replay = _replayed(Routers(model), model, torch.full_like(routes, nothing(routes.dtype)))
    assert_equal(outcome, natural)
    assert replay.changed.tolist() == replay.replayed.tolist() == [0] * len(layers)


def _check_recorded_routes(model: nn.Module, routers: Routers, natural: Outcome, chosen: Tensor) -> None:
    """Recording, and replaying what was recorded, change no bit; the routes are those that hooks tell."""
    outcome, routes = _recorded(routers, model)
    assert_equal(outcome, natural)
    assert routes.dtype == torch.uint8
    for number in range(chosen.size(1)):
        assert torch.equal(_is_of(routes[:, number], chosen.size(-1)), chosen[:, number])
    outcome, replay = _replayed(routers, model, routes)
    assert_equal(outcome, natural)
    assert replay.changed.tolist() == [0] * chosen.size(1)
    assert replay.replayed.tolist() == [TOKENS * routes.size(-1)] * chosen.size(1)


def _check_other_routes(
    case: str, model: nn.Module, routers: Routers, layers: Sequence[Layer], routes: Tensor
) -> None:
    """Other experts run, weighed by the live scores, and get gradients."""
    with mixtures.seen(layers):
        outcome, replay = _replayed(routers, model, routes)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for number, layer in enumerate(layers):
        given = routes[:, number]
        assert torch.equal(layer.chosen, _is_of(given, layer.gates.size(1)))
        expected = mixtures.expected_gates(case, layer, given.long())
        torch.testing.assert_close(layer.gates, expected, rtol=0, atol=GATES)
        assert replay.changed[number] == mixtures.changes(layer, given)
        used = _is_of(given, layer.gates.size(1)).any(0)[: mixtures.EXPERTS]
        of_experts = [
            outcome[1][names[id(each)]].reshape(mixtures.EXPERTS, -1)
            for each in layer.experts
            if names[id(each)] in outcome[1]
        ]
        assert torch.equal(torch.cat(of_experts, dim=1).ne(0).any(1), used)
        assert outcome[1][names[id(layer.weight)]].abs().max() > 0
    assert replay.changed.sum() > 0


def _check_tokens_without_a_route(model: nn.Module, routers: Routers, layers: Sequence[Layer], routes: Tensor) -> None:
    """Tokens without a route go as the live router says, and the others as they are told."""
    with mixtures.seen(layers):
        _, replay = _replayed(routers, model, routes)
    for number, layer in enumerate(layers):
        has_route, alone = is_route(routes)[:, number], mixtures.live(layer)
        assert 0 < has_route.sum() < len(has_route)
        assert torch.equal(layer.gates[~has_route], alone.gates[~has_route])
        assert torch.equal(layer.chosen[has_route], _is_of(routes[has_route, number], layer.gates.size(1)))
        assert replay.changed[number] == mixtures.changes(layer, routes[:, number])
        assert replay.replayed[number] == has_route.sum() * routes.size(-1)
