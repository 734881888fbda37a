"""Every family with a mixture of experts records its routes and follows those it is given."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.tools import families, mixtures
from tests.tools.mixtures import CASES, FAMILIES, Layer
from trl_steady.routing.replay import Replay, Routers
from trl_steady.routing.routes import is_route, no_route

IS_TOLD = transformers.__version__.startswith("5.23.")
ROWS, COLUMNS = 2, 4

BY_OPTION = {"gemma4_text", "llama4_text"}
"""Not in `tests.tools.families`, or no mixtures there."""

# Of weights against a formula that is written otherwise, in float32: some units in the last place, of numbers up to 2.
GATES = 2e-6


@dataclass
class Outcome:
    logits: Tensor
    gradients: dict[str, Tensor]


def _built(case: str) -> tuple[PreTrainedModel, list[Layer]]:
    family, _ = CASES[case]
    if not IS_TOLD and family not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    try:
        model = mixtures.build(case)
        layers = mixtures.layers(model)
        if not IS_TOLD:
            _check_the_oracle(case, model, layers)
    except Exception as error:
        if IS_TOLD:
            raise
        pytest.skip(f"{family} of transformers {transformers.__version__} is another than the oracle knows: {error!r}")
    return model, layers


def _check_the_oracle(case: str, model: PreTrainedModel, layers: Sequence[Layer]) -> None:
    """Raise if the hooks, the routers alone and the formula differ on a plain pass, in which no code of ours runs."""
    with mixtures.seen(layers):
        _run(model)
    for layer in layers:
        chosen = layer.chosen.int().topk(int(layer.chosen[0].sum())).indices
        for gates in (mixtures.live(layer).gates, mixtures.expected_gates(case, layer, chosen)):
            torch.testing.assert_close(gates, layer.gates, rtol=0, atol=GATES)
    assert layers and all(layer.experts for layer in layers)


def _run(model: nn.Module) -> Outcome:
    """Of fixed random weights for the logits."""
    model.zero_grad(set_to_none=True)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, families.VOCABULARY, (ROWS, COLUMNS), generator=generator)
    logits = model(input_ids=ids, use_cache=False).logits
    weights = torch.randn(logits.shape, generator=generator)
    (weights * logits).sum().backward()
    gradients = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    return Outcome(logits.detach(), gradients)


def _recorded(routers: Routers, model: nn.Module) -> tuple[Outcome, Tensor]:
    with routers.recording() as recording:
        outcome = _run(model)
    return outcome, recording.routes()


def _replayed(routers: Routers, model: nn.Module, routes: Tensor) -> tuple[Outcome, Replay]:
    with routers.replaying(routes) as replay:
        outcome = _run(model)
        replay.check()
    return outcome, replay


def _others(layers: Sequence[Layer], chosen: int, seed: int = 0) -> Tensor:
    """(N, L, K) at random, but never the expert of a layer's own number."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(ROWS * COLUMNS, len(layers), layers[0].gates.size(1), generator=generator)
    for number in range(len(layers)):
        scores[:, number, number % mixtures.EXPERTS] = -1
    return scores.argsort(-1, descending=True)[..., :chosen].to(torch.uint8)


def _is_of(routes: Tensor, width: int) -> Tensor:
    """(N, E) bool of (N, K)."""
    return torch.zeros(len(routes), width, dtype=torch.bool).scatter(1, routes.long(), True)


def _assert_equal(outcome: Outcome, expected: Outcome) -> None:
    assert torch.equal(outcome.logits, expected.logits)
    assert outcome.gradients.keys() == expected.gradients.keys()
    assert not [
        name for name, gradient in expected.gradients.items() if not torch.equal(outcome.gradients[name], gradient)
    ]


@pytest.mark.skipif(not IS_TOLD, reason="the families are those of transformers 5.23")
def test_the_cases_are_all_families_with_experts() -> None:
    kinds = re.compile("Router|Experts|TopK|Topk")
    mixed = {
        name
        for name in families.names()
        if any(kinds.search(type(module).__name__) for module in families.build(name).modules())
    }
    assert mixed - {"doge", "phimoe"} == set(FAMILIES) - BY_OPTION
    assert {family for family, _ in CASES.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", ["llama", "doge", "gemma4_text"])
def test_a_model_without_experts_is_refused(name: str) -> None:
    if not IS_TOLD and name not in families.names():
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    with pytest.raises(ValueError, match="has no routers"):
        Routers(families.build(name))


def test_experts_that_topk_does_not_choose_are_refused_in_the_first_pass() -> None:
    """Phi-MoE takes one maximum after the other. A block without a router's name chooses by itself."""
    phi = families.build("phimoe")
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.router called topk 0 times"), Routers(phi).recording():
        _run(phi)
    qwen = mixtures.build("qwen3_moe")
    _, expected = _recorded(Routers(qwen), qwen)
    for layer in mixtures.layers(qwen):
        layer.router.__class__ = type("Linear", (type(layer.router),), {})
    by_block = Routers(qwen)
    assert by_block.names == ["model.layers.0.mlp", "model.layers.1.mlp"]
    _, routes = _recorded(by_block, qwen)
    assert torch.equal(routes, expected)


@pytest.mark.parametrize("case", CASES)
def test_a_family_records_its_routes_and_follows_others(case: str) -> None:
    model, layers = _built(case)
    routers = Routers(model)
    with mixtures.seen(layers):
        natural = _run(model)
    chosen = torch.stack([layer.chosen for layer in layers], dim=1)
    _check_recorded_routes(model, routers, natural, chosen)
    count = int(chosen[0, 0].sum())
    _check_other_routes(case, model, routers, layers, _others(layers, count))
    routes = _others(layers, count, seed=1)
    routes[torch.rand(routes.shape[:2], generator=torch.Generator().manual_seed(2)) < 0.5] = no_route(routes.dtype)
    _check_tokens_without_a_route(model, routers, layers, routes)
    _assert_equal(_run(model), natural)  # nothing is left behind
    # with no route at all, and by a replay that no recording went before
    outcome, replay = _replayed(Routers(model), model, torch.full_like(routes, no_route(routes.dtype)))
    _assert_equal(outcome, natural)
    assert replay.changed.tolist() == replay.replayed.tolist() == [0] * len(layers)


def _check_recorded_routes(model: nn.Module, routers: Routers, natural: Outcome, chosen: Tensor) -> None:
    """Recording, and replaying what was recorded, change no bit; the routes are those that hooks tell."""
    outcome, routes = _recorded(routers, model)
    _assert_equal(outcome, natural)
    assert routes.dtype == torch.uint8
    for number in range(chosen.size(1)):
        assert torch.equal(_is_of(routes[:, number], chosen.size(-1)), chosen[:, number])
    outcome, replay = _replayed(routers, model, routes)
    _assert_equal(outcome, natural)
    assert replay.changed.tolist() == [0] * chosen.size(1)
    assert replay.replayed.tolist() == [ROWS * COLUMNS * routes.size(-1)] * chosen.size(1)


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
            outcome.gradients[names[id(each)]].reshape(mixtures.EXPERTS, -1)
            for each in layer.experts
            if names[id(each)] in outcome.gradients
        ]
        assert torch.equal(torch.cat(of_experts, dim=1).ne(0).any(1), used)
        assert outcome.gradients[names[id(layer.weight)]].abs().max() > 0
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
