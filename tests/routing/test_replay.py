"""Recording and replaying beside what else is done to a model: gradient checkpointing, hooks, other passes."""

import re
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.tools import families, mixtures
from tests.tools.passes import (
    CASES,
    COLUMNS,
    FIRST,
    ROUNDING,
    ROWS,
    SECOND,
    TOKENS,
    are_equal,
    assert_equal,
    assert_gone_through,
    gone_through,
    move_routers,
    others,
    recorded,
    replayed,
    routers_of,
    run,
    run_forward,
)
from trl_steady.routing.replay import Routers
from trl_steady.routing.routes import is_route


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
    with pytest.raises(RuntimeError, match=r"before the backward of an earlier one.*Run backward first"):
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
