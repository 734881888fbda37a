"""Recording and replaying beside what else is done to a model: checkpointing, hooks, adapters, generation."""

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.padding import families
from tests.routing import mixtures
from trl_steady.routing.replay import Routers
from trl_steady.routing.routes import is_route

CASES = ("qwen3_moe normalised", "deepseek_v3 in groups", "gpt_oss")
ROWS, COLUMNS = 2, 6
TOKENS = ROWS * COLUMNS
FIRST = "model.layers.0.mlp.gate"
SECOND = "model.layers.1.mlp.gate"

# Of float32 sums in another order (merged weights), in parts of the largest value
ROUNDING = 1e-4

Outcome = tuple[Tensor, dict[str, Tensor]]


@pytest.fixture(params=CASES)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return mixtures.build(request.param)


@pytest.fixture
def qwen() -> PreTrainedModel:
    return mixtures.build(CASES[0])


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
    with torch.no_grad(), Routers(model).recording() as recording:
        run_forward(model)
    return recording.routes()


def run_forward(model: nn.Module) -> Tensor:
    ids = torch.randint(2, families.VOCABULARY, (ROWS, COLUMNS), generator=torch.Generator().manual_seed(0))
    return model(input_ids=ids, use_cache=False).logits


def replayed(model: nn.Module, routes: Tensor) -> Outcome:
    """The first pass is over when the backward begins, which runs routers again where layers are checkpointed."""
    with Routers(model).replaying(routes) as replay:
        return run(model, closing=replay.check)


def others(layers: int, seed: int = 0, experts: int = mixtures.EXPERTS) -> Tensor:
    scores = torch.rand(TOKENS, layers, experts, generator=torch.Generator().manual_seed(seed))
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


@pytest.fixture(params=[True, False], ids=["reentrant", "not reentrant"])
def checkpointing(request: pytest.FixtureRequest) -> dict[str, bool]:
    return {"use_reentrant": request.param}


def test_gradient_checkpointing_goes_by_the_routes_again(
    model: PreTrainedModel, checkpointing: dict[str, bool]
) -> None:
    model.train()
    routes = recorded(model)
    move_routers(model)
    now = recorded(model)
    assert (now.sort(-1).values != routes.sort(-1).values).any()
    with Routers(model).replaying(routes) as once:
        expected = run(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
    routers = Routers(model)
    with gone_through(model) as seen, routers.replaying(routes) as replay:
        outcome = run(model)
    assert_equal(outcome, expected)
    assert len(seen) == 2 * routes.size(1)  # the control: layers have run again
    assert torch.equal(replay.changed, once.changed)
    assert replay.changed.sum() > 0


def test_a_context_closed_before_the_backward_is_noticed(
    model: PreTrainedModel, checkpointing: dict[str, bool]
) -> None:
    """The control of the test above: routes count in the backward."""
    model.train()
    routes = recorded(model)
    move_routers(model)
    expected = replayed(model, routes)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
    with ExitStack() as context:
        context.enter_context(Routers(model).replaying(routes))
        try:
            outcome = run(model, closing=context.close)
        except torch.utils.checkpoint.CheckpointError:
            return  # tensors of other sizes than in the forward
    assert torch.equal(outcome[0], expected[0])
    assert not are_equal(outcome, expected)


def test_a_replay_needs_no_recording_before_it(model: PreTrainedModel) -> None:
    layers = len(routers_of(model))
    routes = others(layers)
    routers = Routers(model)
    with routers.recording():
        run_forward(model)
    with routers.replaying(routes):
        expected = run(model)
    assert_equal(replayed(model, routes), expected)
    with Routers(model).replaying(routes):
        assert_gone_through(model, routes)


def test_each_layer_decides_in_its_own_way(qwen: PreTrainedModel) -> None:
    """By one topk in one layer, by three in another."""
    in_groups = mixtures.build("deepseek_v3 in groups")
    qwen.get_submodule("model.layers.1").mlp = in_groups.get_submodule("model.layers.1.mlp")
    routes = others(2)
    with Routers(qwen).replaying(routes):
        assert_gone_through(qwen, routes)
    routes = recorded(qwen)
    assert routes.shape == (TOKENS, 2, 2)
    assert_equal(replayed(qwen, routes), run(qwen))


def test_routes_in_wider_integers(qwen: PreTrainedModel) -> None:
    routes = others(2)
    routes[::3] = 255
    wide = routes.to(torch.int16).where(is_route(routes).unsqueeze(-1), -1)
    assert_equal(replayed(qwen, wide), replayed(qwen, routes))


def test_more_experts_than_a_byte_counts() -> None:
    config = families.config("qwen3_moe")
    config.num_experts, config.num_hidden_layers = 300, 1
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    move_routers(model)
    routes = recorded(model)
    with gone_through(model) as seen:
        run_forward(model)
    assert routes.dtype == torch.int16
    assert routes.max() > 255
    assert torch.equal(routes[:, 0].long(), seen[0])
    assert_equal(replayed(model, routes), run(model))
    routes = torch.stack([torch.arange(255, 255 + TOKENS), torch.arange(TOKENS)], dim=-1)[:, None].to(torch.int16)
    with Routers(model).replaying(routes):
        assert_gone_through(model, routes)


def test_a_token_counts_as_changed_by_its_set_of_experts(qwen: PreTrainedModel) -> None:
    routes = recorded(qwen)
    with torch.no_grad(), Routers(qwen).replaying(routes.flip(-1)) as replay:
        run_forward(qwen)
    assert replay.changed.tolist() == [0, 0]
    first = routes[0, 0].tolist()
    other = next(expert for expert in range(mixtures.EXPERTS) if expert not in first)
    routes[0, 0, 1] = other
    with torch.no_grad(), Routers(qwen).replaying(routes) as replay:
        run_forward(qwen)
    assert replay.changed[0] == 1
    assert replay.replayed.tolist() == [2 * TOKENS] * 2


# What is left behind


def test_nothing_is_left_behind(model: PreTrainedModel) -> None:
    natural, routers = run(model), Routers(model)
    layers = len(routers_of(model))
    with routers.recording():
        assert all("forward" in vars(router) for router in routers_of(model))
        run_forward(model)
    assert not any("forward" in vars(router) for router in routers_of(model))
    with routers.replaying(others(layers)):
        run(model)
    assert not any("forward" in vars(router) for router in routers_of(model))
    assert_equal(run(model), natural)


@pytest.mark.parametrize("at", ["in the model", "in the context", "in a router"])
def test_nothing_is_left_behind_by_an_exception(qwen: PreTrainedModel, at: str) -> None:
    natural, routers = run(qwen), Routers(qwen)

    def fail(*_: Any) -> None:
        raise KeyError("planted")

    place = {"in the model": "model.layers.1.self_attn", "in a router": SECOND}.get(at)
    handle = qwen.get_submodule(place).register_forward_hook(fail) if place else None
    for context in (routers.recording(), routers.replaying(others(2))):
        with pytest.raises(KeyError, match="planted"), context:
            run_forward(qwen)
            fail()
    if handle is not None:
        handle.remove()
    assert not any("forward" in vars(router) for router in routers_of(qwen))
    assert_equal(run(qwen), natural)
    routes = others(2)
    with routers.replaying(routes):
        assert_gone_through(qwen, routes)


def test_a_forward_that_another_has_put_there_is_called_and_put_back(qwen: PreTrainedModel) -> None:
    """As accelerate's hooks do."""
    router, calls = routers_of(qwen)[0], []
    own = router.forward

    def hooked(*arguments: Any, **keywords: Any) -> Any:
        calls.append(1)
        return own(*arguments, **keywords)

    vars(router)["forward"] = hooked
    routers, routes = Routers(qwen), others(2)
    with routers.recording() as recording:
        run_forward(qwen)
    assert len(calls) == 1
    assert recording.routes().shape == (TOKENS, 2, 2)
    with routers.replaying(routes):
        assert_gone_through(qwen, routes)
    assert len(calls) == 2
    assert vars(router)["forward"] is hooked
    assert "forward" not in vars(routers_of(qwen)[1])


def test_a_context_within_another_holds_until_its_end(model: PreTrainedModel) -> None:
    routers, layers = Routers(model), len(routers_of(model))
    outer, inner, natural = others(layers, 1), others(layers, 2), recorded(model)
    with routers.replaying(outer) as of_outer:
        assert_gone_through(model, outer)
        with routers.replaying(inner) as of_inner:
            assert_gone_through(model, inner)
        of_inner.check()
        with routers.recording() as recording:
            run_forward(model)
        assert torch.equal(recording.routes(), natural)
        of_outer.check()  # what was within does not count
        with pytest.raises(KeyError, match="planted"), routers.replaying(inner):
            raise KeyError("planted")
        assert_gone_through(model, natural)  # its pass is over
    assert torch.equal(recorded(model), natural)
    assert not any("forward" in vars(router) for router in routers_of(model))


# Between forward and backward


def test_another_pass_between_forward_and_backward_chooses_anew(qwen: PreTrainedModel) -> None:
    routes, natural = others(2), recorded(qwen)
    _, expected = replayed(qwen, routes)
    qwen.train().gradient_checkpointing_enable({"use_reentrant": False})
    with Routers(qwen).replaying(routes) as replay:

        def look() -> None:
            replay.check()
            with torch.no_grad():
                assert_gone_through(qwen, natural)

        _, found = run(qwen, closing=look)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_two_passes_before_one_backward(qwen: PreTrainedModel) -> None:
    """Right without gradient checkpointing, and with it an error: layers could not tell whose they run again."""
    first, second = others(2, 1), others(2, 2)
    apart = [replayed(qwen, routes)[1] for routes in (first, second)]

    def together() -> dict[str, Tensor]:
        qwen.zero_grad(set_to_none=True)
        routers = Routers(qwen)
        generator = torch.Generator().manual_seed(0)
        torch.randint(2, families.VOCABULARY, (ROWS, COLUMNS), generator=generator)
        weights = torch.randn((ROWS, COLUMNS, families.VOCABULARY), generator=generator)
        with routers.replaying(first) as one:
            loss = (weights * run_forward(qwen)).sum()
            one.check()
            with routers.replaying(second) as other:
                loss = loss + (weights * run_forward(qwen)).sum()
                other.check()
                loss.backward()
        return {name: each.grad.clone() for name, each in qwen.named_parameters() if each.grad is not None}

    found = together()
    for name, gradient in found.items():
        expected = apart[0][name] + apart[1][name]
        assert torch.allclose(gradient, expected, atol=ROUNDING * float(expected.abs().max())), name
    qwen.train().gradient_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(RuntimeError, match=r"while the backward of another is still to come.*Go backward first"):
        together()


def test_one_pass_after_the_other_with_its_backward_in_one_context(qwen: PreTrainedModel) -> None:
    """As the micro-batches of a token budget do."""
    first, second = others(2, 1), others(2, 2)
    _, expected = replayed(qwen, second)
    qwen.train().gradient_checkpointing_enable({"use_reentrant": False})
    routers = Routers(qwen)
    with routers.replaying(first) as one:
        run(qwen, closing=one.check)
        with routers.replaying(second) as other:
            _, found = run(qwen, closing=other.check)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_a_router_that_writes_into_its_input_does_so_once(qwen: PreTrainedModel) -> None:
    """As jitter does; also where it runs once before, to be known."""
    router = routers_of(qwen)[1]
    own = router.forward

    def forward(hidden_states: Tensor) -> Any:
        hidden_states *= 1.5
        return own(hidden_states)

    vars(router)["forward"] = forward
    routes = others(2)
    with torch.no_grad():
        known = Routers(qwen)
        with known.recording():
            run_forward(qwen)
        logits = []
        for routers in (known, Routers(qwen)):
            with routers.replaying(routes):
                logits.append(run_forward(qwen))
    assert torch.equal(*logits)


def test_routers_in_two_stacks_are_refused() -> None:
    both = nn.Module()
    both.text, both.vision = mixtures.build(CASES[0]), mixtures.build(CASES[0])
    with pytest.raises(
        ValueError, match=r"in several stacks of layers, text\.model\.layers and vision\.model\.layers"
    ):
        Routers(both)


# Adapters


@torch.no_grad()
def spread(model: nn.Module) -> None:
    """LoRA begins as nothing."""
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ["q_proj"]},
    "experts": {"target_modules": ["q_proj"], "target_parameters": EXPERTS},
    "router": {"target_modules": ["q_proj"], "target_parameters": ["mlp.gate.weight"]},
    "experts and router": {"target_modules": [], "target_parameters": [*EXPERTS, "mlp.gate.weight"]},
    "copied router": {"target_modules": ["q_proj"], "modules_to_save": ["gate"]},
    "experts and copied router": {
        "target_modules": ["q_proj"],
        "target_parameters": EXPERTS,
        "modules_to_save": ["gate"],
    },
}
TRAINED_ROUTER = {
    "router": "lora_",
    "experts and router": "lora_",
    "copied router": "modules_to_save",
    "experts and copied router": "modules_to_save",
}


def adapted(model: PreTrainedModel, kind: str) -> peft.PeftModel:
    adapter = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_dropout=0.0, **ADAPTERS[kind]))
    spread(adapter)
    return adapter.eval()


@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters(qwen: PreTrainedModel, kind: str) -> None:
    base, routes = copy.deepcopy(qwen), others(2)
    model = adapted(qwen, kind)
    own = recorded(model)
    assert_equal(replayed(model, own), run(model))
    routers = Routers(model)
    assert len(routers.names) == 2
    with routers.replaying(routes):
        assert_gone_through(model, routes)
    logits, gradients = replayed(model, routes)
    assert all("lora_" in name or "modules_to_save" in name for name in gradients)
    of_router = {name: gradient for name, gradient in gradients.items() if ".gate." in name}
    if kind in TRAINED_ROUTER:
        assert {name.split(".layers.")[1][0] for name in of_router} == {"0", "1"}
        assert all(TRAINED_ROUTER[kind] in name and gradient.abs().max() > 0 for name, gradient in of_router.items())
    else:
        assert not of_router
    # without the adapter, the base
    with model.disable_adapter():
        with torch.no_grad(), routers.recording() as recording:
            run_forward(model)
        assert torch.equal(recording.routes(), recorded(base))
        with torch.no_grad(), routers.replaying(routes):
            plain = run_forward(model)
    with torch.no_grad(), Routers(base).replaying(routes):
        assert torch.equal(plain, run_forward(base))
    # in the weights, the same
    merged = model.merge_and_unload()
    assert apart(logits, plain) > 100 * ROUNDING
    with torch.no_grad(), Routers(merged).replaying(routes):
        assert apart(run_forward(merged), logits) < ROUNDING


@pytest.mark.parametrize("kind", ["experts and router", "copied router"])
def test_adapters_and_gradient_checkpointing(qwen: PreTrainedModel, kind: str, checkpointing: dict[str, bool]) -> None:
    routes = others(2)
    model = adapted(qwen, kind).train()
    expected = replayed(model, routes)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
    assert_equal(replayed(model, routes), expected)


def test_a_router_with_dropout(checkpointing: dict[str, bool]) -> None:
    """A pass that only looks takes no random numbers from one that runs again."""
    routes = others(2)
    kind = {"r": 2, "target_modules": ["wg"], "lora_dropout": 0.5}

    def outcome(seed: int, *, is_known: bool, is_checkpointed: bool) -> Outcome:
        model = peft.get_peft_model(mixtures.build("hunyuan_v1_moe"), peft.LoraConfig(**kind))
        spread(model)
        model.train()
        if is_checkpointed:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
        routers = Routers(model)
        if is_known:
            with torch.no_grad(), routers.recording():
                run_forward(model)
        torch.manual_seed(seed)
        with routers.replaying(routes):
            return run(model)

    expected = outcome(0, is_known=True, is_checkpointed=False)
    assert not are_equal(outcome(1, is_known=True, is_checkpointed=False), expected)
    assert_equal(outcome(0, is_known=True, is_checkpointed=True), expected)
    assert_equal(outcome(0, is_known=False, is_checkpointed=False), expected)
    assert_equal(outcome(0, is_known=False, is_checkpointed=True), expected)


def test_a_frozen_router(model: PreTrainedModel) -> None:
    routes = others(len(routers_of(model)))
    logits, gradients = replayed(model, routes)
    for router in routers_of(model):
        router.requires_grad_(False)
    names = {
        name
        for name, each in model.named_parameters()
        if not each.requires_grad and gradients.pop(name, None) is not None
    }
    assert len(names) >= len(routers_of(model))
    assert_equal(replayed(model, routes), (logits, gradients))


# Other precisions


@pytest.mark.parametrize("how", ["bfloat16", "autocast"])
def test_half_precision(model: PreTrainedModel, how: str, checkpointing: dict[str, bool]) -> None:
    if how == "bfloat16":
        model.to(torch.bfloat16)
    else:  # as accelerate does
        vars(model)["forward"] = torch.autocast("cpu", dtype=torch.bfloat16)(model.forward)
    model.train()
    routers = Routers(model)
    routes = others(len(routers.names))
    natural = run(model)
    assert_equal(replayed(model, recorded(model)), natural)
    with routers.recording():
        run_forward(model)
    with routers.replaying(routes):
        assert_gone_through(model, routes)
        expected = run(model)
    assert not torch.equal(expected[0], natural[0])
    assert all(expected[1][f"{name}.weight"].abs().max() > 0 for name in routers.names)
    # of routers that have not run before
    assert_equal(replayed(model, routes), expected)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
    assert_equal(replayed(model, routes), expected)


# Errors


@pytest.mark.parametrize("shape", [(TOKENS, 1, 2), (TOKENS, 3, 2), (TOKENS, 2), (ROWS, COLUMNS, 2, 2)])
def test_routes_of_other_layers(qwen: PreTrainedModel, shape: tuple[int, ...]) -> None:
    routes = torch.zeros(shape, dtype=torch.uint8)
    message = rf"routes of shape {re.escape(str(shape))} for 2 layers with routers \({FIRST} to {SECOND}\)"
    with pytest.raises(ValueError, match=message), Routers(qwen).replaying(routes):
        pass
    assert not any("forward" in vars(router) for router in routers_of(qwen))


@pytest.mark.parametrize("wrong", [(TOKENS - 1, 2), (TOKENS + 1, 2), (TOKENS, 1), (TOKENS, 3)])
def test_routes_of_other_tokens(model: PreTrainedModel, wrong: tuple[int, int]) -> None:
    tokens, chosen = wrong
    routers = Routers(model)
    routes = torch.arange(chosen, dtype=torch.uint8).repeat(tokens, len(routers.names), 1)
    message = rf"{routers.names[0]} .*= \({TOKENS}, 2\), and the routes are for \({tokens}, {chosen}\)"
    with pytest.raises(RuntimeError, match=message), routers.replaying(routes):
        run_forward(model)


def test_an_expert_that_there_is_not(model: PreTrainedModel) -> None:
    routers = Routers(model)
    routes = others(len(routers.names))
    routes[-1, -1] = torch.tensor([0, mixtures.EXPERTS - 1])
    with routers.replaying(routes):
        assert_gone_through(model, routes)
    routes[-1, -1, 1] = mixtures.EXPERTS
    message = f"expert {mixtures.EXPERTS}, and the router {routers.names[0]} has {mixtures.EXPERTS}"
    with pytest.raises(ValueError, match=message), routers.replaying(routes):
        run_forward(model)


class Nothing(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states


def test_a_layer_whose_router_does_not_run(qwen: PreTrainedModel) -> None:
    routers = Routers(qwen)
    qwen.get_submodule("model.layers.1").mlp = Nothing()
    message = f"the router {SECOND} ran 0 times"
    with routers.recording() as recording:
        run_forward(qwen)
    with pytest.raises(RuntimeError, match=message):
        recording.routes()
    with routers.replaying(others(2)) as replay:
        run_forward(qwen)
    with pytest.raises(RuntimeError, match=message):
        replay.check()


def test_no_pass_at_all(qwen: PreTrainedModel) -> None:
    with Routers(qwen).recording() as recording:
        pass
    with pytest.raises(RuntimeError, match=f"the router {FIRST} ran 0 times"):
        recording.routes()


def test_a_router_that_runs_twice(qwen: PreTrainedModel) -> None:
    routers = Routers(qwen)
    with routers.recording() as recording:
        run_forward(qwen)
        run_forward(qwen)
    with pytest.raises(RuntimeError, match=f"the router {FIRST} ran 2 times"):
        recording.routes()
    layers = qwen.get_submodule("model.layers")
    assert isinstance(layers, nn.ModuleList)
    layers[0].mlp = layers[1].mlp
    routers = Routers(qwen)
    with routers.replaying(others(1)) as replay:
        run_forward(qwen)
    with pytest.raises(RuntimeError, match=r"the router model.layers.\d.mlp.gate ran 2 times"):
        replay.check()


def test_a_router_that_does_not_call_topk(qwen: PreTrainedModel) -> None:
    """As a kernel in its place would not."""
    router = routers_of(qwen)[1]

    def sorting(hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = nn.functional.linear(hidden_states, router.get_parameter("weight"))
        ordered = logits.softmax(-1).sort(-1, descending=True)
        return logits, ordered.values[:, :2], ordered.indices[:, :2]

    vars(router)["forward"] = sorting
    routers = Routers(qwen)
    message = f"the router {SECOND} chose experts without calling topk"
    with pytest.raises(RuntimeError, match=message), routers.recording():
        run_forward(qwen)
    with pytest.raises(RuntimeError, match=message), routers.replaying(others(2)):
        run_forward(qwen)
    assert vars(router)["forward"] is sorting


@pytest.mark.parametrize("in_training", [0, 1, 3])
def test_a_router_that_decides_otherwise_than_before(qwen: PreTrainedModel, in_training: int) -> None:
    """By another number of calls of topk: what was learned of it does not hold, and it would go its own way."""
    router = routers_of(qwen)[1]
    own = router.forward

    def forward(hidden_states: Tensor) -> Any:
        for _ in range(in_training if router.training else 2):
            hidden_states.topk(3)
        return own(hidden_states)

    vars(router)["forward"] = forward
    routers, routes = Routers(qwen), others(2)
    with routers.replaying(routes):
        assert_gone_through(qwen, routes)
    qwen.train()
    with pytest.raises(RuntimeError, match=SECOND), routers.replaying(routes) as replay:
        assert_gone_through(qwen, routes)
        replay.check()


def test_layers_that_choose_different_numbers_of_experts(qwen: PreTrainedModel) -> None:
    vars(routers_of(qwen)[1])["top_k"] = 3
    with Routers(qwen).recording() as recording:
        run_forward(qwen)
    with pytest.raises(RuntimeError, match=rf"'{FIRST}': \({TOKENS}, 2\), '{SECOND}': \({TOKENS}, 3\)"):
        recording.routes()


# Generation

NEW = 6


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("do_sample", [False, True])
def test_routes_of_a_generation(model: PreTrainedModel, do_sample: bool, use_cache: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(5) >= torch.tensor([[0], [2], [4]])
    prompts = torch.randint(2, families.VOCABULARY, mask.shape, generator=generator) * mask

    def generate(**options: Any) -> Tensor:
        torch.manual_seed(0)
        return model.generate(
            input_ids=prompts,
            attention_mask=mask.long(),
            do_sample=do_sample,
            top_k=0,
            use_cache=use_cache,
            max_new_tokens=NEW,
            pad_token_id=0,
            **options,
        )

    ends = generate(eos_token_id=None)[0, 7].item()  # the third that the first one says
    with Routers(model).recording() as recording:
        sequences = generate(eos_token_id=ends)
    assert (sequences[0, 8:] == 0).all()
    assert sequences.size(1) == mask.size(1) + NEW  # another one goes on
    routes = recording.routes_of_generation(len(sequences))
    assert routes.shape == (3, sequences.size(1) - 1, len(routers_of(model)), 2)
    whole = nn.functional.pad(mask, (0, NEW), value=True)
    with torch.no_grad(), Routers(model).recording() as recording:
        model(
            input_ids=sequences,
            attention_mask=whole.long(),
            position_ids=(whole.cumsum(-1) - 1).clamp(min=0),
            use_cache=False,
        )
    full = recording.routes().unflatten(0, sequences.shape)[:, :-1]
    is_token = whole[:, :-1]
    assert torch.equal(routes.sort(-1).values[is_token], full.sort(-1).values[is_token])
    # the control: other tokens have other routes
    assert not torch.equal(routes[:, 1:].sort(-1).values, full[:, :-1].sort(-1).values)


def test_a_generation_of_one_token(qwen: PreTrainedModel) -> None:
    prompts = torch.randint(2, families.VOCABULARY, (2, 4), generator=torch.Generator().manual_seed(0))
    with Routers(qwen).recording() as recording:
        qwen.generate(input_ids=prompts, max_new_tokens=1, do_sample=False, pad_token_id=0)
    routes = recording.routes_of_generation(2)
    assert routes.shape == (2, 4, 2, 2)
    assert torch.equal(routes.flatten(0, 1), recording.routes())
