"""Every family with a mixture of experts records its routes and goes by those it is given."""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.tools import families, mixtures
from tests.tools.headroom import within
from tests.tools.mixtures import CASES, FAMILIES, Layer
from trl_steady.routing.replay import Replay, Routers
from trl_steady.routing.routes import is_route, no_route

IS_TOLD = transformers.__version__.startswith("5.23.")
ROWS, COLUMNS = 2, 4

REFUSED = {
    "doge": "DogeForCausalLM has no routers",  # its experts are rows of two tables, found by a product of keys
    "phimoe": "layers.0.mlp of PhimoeForCausalLM holds experts and does not choose them by topk",
}
"""What is said of those that have no place where a route could be put."""
BY_OPTION = {"gemma4_text", "llama4_text"}
"""Not in `tests.tools.families`, or no mixtures there."""

# Of weights against a formula that is written otherwise, in float32: some units in the last place, of numbers up to 2.
GATES = 2e-6
# Of outputs where experts get other tokens than before: sums in another order, in float32 and a few layers deep.
ROUNDING = 1e-4


@dataclass
class Outcome:
    logits: Tensor
    gradients: dict[str, Tensor]


@functools.cache
def _built(case: str) -> tuple[PreTrainedModel, Routers, list[Layer]]:
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
    return model, Routers(model), layers


def _check_the_oracle(case: str, model: PreTrainedModel, layers: Sequence[Layer]) -> None:
    """Raise if the hooks, the routers alone and the formula differ on a plain pass, in which no code of ours runs."""
    with mixtures.seen(layers):
        _run(model)
    for layer in layers:
        chosen = layer.chosen.int().topk(int(layer.chosen[0].sum())).indices
        for gates in (mixtures.live(layer).gates, mixtures.expected_gates(case, layer, chosen)):
            torch.testing.assert_close(gates, layer.gates, rtol=0, atol=GATES)
    assert layers and all(layer.experts for layer in layers)


@functools.cache
def _plain(case: str) -> tuple[Outcome, Tensor]:
    """And the routes, told by hooks."""
    model, _, layers = _built(case)
    with mixtures.seen(layers):
        outcome = _run(model)
    return outcome, torch.stack([layer.chosen for layer in layers], dim=1)


def _run(model: nn.Module, columns: int = COLUMNS) -> Outcome:
    """Of fixed random weights for the logits of the first columns."""
    model.zero_grad(set_to_none=True)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, families.VOCABULARY, (ROWS, COLUMNS), generator=generator)
    logits = model(input_ids=ids, use_cache=False).logits
    weights = torch.randn(logits.shape, generator=generator)
    (weights * logits)[:, :columns].sum().backward()
    gradients = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    return Outcome(logits.detach(), gradients)


def _recorded(routers: Routers, model: nn.Module) -> tuple[Outcome, Tensor]:
    with routers.recording() as recording:
        outcome = _run(model)
    return outcome, recording.routes()


def _replayed(routers: Routers, model: nn.Module, routes: Tensor, columns: int = COLUMNS) -> tuple[Outcome, Replay]:
    with routers.replaying(routes) as replay:
        outcome = _run(model, columns)
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


def _apart(value: Tensor, expected: Tensor) -> float:
    """In parts of the largest."""
    return ((value - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.skipif(not IS_TOLD, reason="the families are those of transformers 5.23")
def test_the_table_is_of_all_families() -> None:
    kinds = re.compile("Router|Experts|TopK|Topk")
    mixed = {
        name
        for name in families.names()
        if any(kinds.search(type(module).__name__) for module in families.build(name).modules())
    }
    assert mixed - set(REFUSED) == set(FAMILIES) - BY_OPTION
    assert {family for family, _ in CASES.values()} == set(FAMILIES)


@pytest.mark.skipif(not IS_TOLD, reason="the families are those of transformers 5.23")
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused(name: str) -> None:
    options: dict[str, Any] = {"is_moe": True, "num_experts": 16} if name == "doge" else {}
    config = families.config(name)
    for option, value in options.items():
        setattr(config, option, value)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=re.escape(REFUSED[name])):
        Routers(model)


@pytest.mark.parametrize("name", ["llama", "doge", "mamba2", "gemma4_text"])
def test_a_model_without_experts(name: str) -> None:
    if not IS_TOLD and name not in families.names():
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    with pytest.raises(ValueError, match="has no routers: it is not a mixture of experts"):
        Routers(families.build(name))


@pytest.mark.parametrize("case", CASES)
def test_recording_and_replaying_what_was_recorded_change_nothing(case: str) -> None:
    model, routers, layers = _built(case)
    expected, chosen = _plain(case)
    outcome, routes = _recorded(routers, model)
    _assert_equal(outcome, expected)
    assert routes.dtype == torch.uint8
    assert routes.shape[:2] == (ROWS * COLUMNS, len(layers))
    for number in range(len(layers)):
        assert torch.equal(_is_of(routes[:, number], chosen.size(-1)), chosen[:, number])
    outcome, replay = _replayed(routers, model, routes)
    _assert_equal(outcome, expected)
    assert replay.changed.tolist() == [0] * len(layers)
    assert replay.replayed.tolist() == [ROWS * COLUMNS * routes.size(-1)] * len(layers)


@pytest.mark.parametrize("case", CASES)
def test_other_routes_are_gone_and_weighed_by_the_live_scores(case: str) -> None:
    model, routers, layers = _built(case)
    _, natural = _plain(case)
    routes = _others(layers, int(natural[0, 0].sum()))
    with mixtures.seen(layers):
        outcome, replay = _replayed(routers, model, routes)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for number, layer in enumerate(layers):
        own = routes[:, number]
        assert torch.equal(layer.chosen, _is_of(own, layer.gates.size(1)))
        expected = mixtures.expected_gates(case, layer, own.long())
        torch.testing.assert_close(layer.gates, expected, rtol=0, atol=GATES)
        assert replay.changed[number] == mixtures.changes(layer, own)
        used = _is_of(own, layer.gates.size(1)).any(0)[: mixtures.EXPERTS]
        of_experts = [
            outcome.gradients[names[id(each)]].reshape(mixtures.EXPERTS, -1)
            for each in layer.experts
            if names[id(each)] in outcome.gradients
        ]
        assert torch.equal(torch.cat(of_experts, dim=1).ne(0).any(1), used)
        assert outcome.gradients[names[id(layer.weight)]].abs().max() > 0
    assert replay.changed.sum() > 0


@pytest.mark.parametrize("case", CASES)
def test_tokens_without_a_route_go_as_the_live_router_says(case: str) -> None:
    model, routers, layers = _built(case)
    expected, natural = _plain(case)
    routes = _others(layers, int(natural[0, 0].sum()), seed=1)
    is_left = torch.rand(routes.shape[:2], generator=torch.Generator().manual_seed(2)) < 0.5
    routes[is_left] = no_route(routes.dtype)
    with mixtures.seen(layers):
        outcome, replay = _replayed(routers, model, routes)
    for number, layer in enumerate(layers):
        has_route, alone = is_route(routes)[:, number], mixtures.live(layer)
        assert 0 < has_route.sum() < len(has_route)
        assert torch.equal(layer.gates[~has_route], alone.gates[~has_route])
        given = _is_of(routes[has_route, number], layer.gates.size(1))
        assert torch.equal(layer.chosen[has_route], given)
        assert replay.changed[number] == mixtures.changes(layer, routes[:, number])
        assert replay.replayed[number] == has_route.sum() * routes.size(-1)
    assert not within(_apart(outcome.logits, expected.logits), ROUNDING)
    outcome, replay = _replayed(routers, model, torch.full_like(routes, no_route(routes.dtype)))
    _assert_equal(outcome, expected)
    assert replay.changed.tolist() == replay.replayed.tolist() == [0] * len(layers)


@pytest.mark.parametrize("case", CASES)
def test_the_route_of_a_token_is_nothing_to_those_before_it(case: str) -> None:
    model, routers, layers = _built(case)
    _, natural = _plain(case)
    chosen = int(natural[0, 0].sum())
    routes, others = (_others(layers, chosen, seed).unflatten(0, (ROWS, COLUMNS)) for seed in (3, 4))
    of: dict[int, Outcome] = {}
    for changed in (-1, 1, COLUMNS - 1):
        own = routes.clone()
        if changed >= 0:
            own[:, changed] = others[:, changed]
        of[changed], _ = _replayed(routers, model, own.flatten(0, 1), columns=COLUMNS - 1)
    last, early, none = of[COLUMNS - 1], of[1], of[-1]
    assert within(_apart(last.logits[:, :-1], none.logits[:, :-1]), ROUNDING)
    assert not within(_apart(last.logits[:, -1], none.logits[:, -1]), ROUNDING)
    assert within(_apart(early.logits[:, :1], none.logits[:, :1]), ROUNDING)
    assert not within(_apart(early.logits[:, 1], none.logits[:, 1]), ROUNDING)
    largest = max(gradient.abs().max() for gradient in none.gradients.values())
    moved = lambda outcome: max(
        ((outcome.gradients[name] - gradient).abs().max() / largest).item()
        for name, gradient in none.gradients.items()
    )
    assert within(moved(last), ROUNDING) and not within(moved(early), ROUNDING)


def test_routes_without_a_context_are_nothing() -> None:
    """What the sweep has left behind."""
    for case in ("qwen3_moe", "deepseek_v3 in groups", "dbrx"):
        model, routers, layers = _built(case)
        expected, _ = _plain(case)
        _replayed(routers, model, _others(layers, 2))
        _assert_equal(_run(model), expected)
