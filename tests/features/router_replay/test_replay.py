"""Recording and replaying beside what else is done to a model: gradient checkpointing, hooks, other passes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.features.router_replay import mixtures, passes
from tests.tools import families
from trl_steady.features.router_replay.replay import Routers


def test_gradient_checkpointing_recomputes_layers_on_the_routes(
    qwen: PreTrainedModel, checkpointing: dict[str, bool]
) -> None:
    model = qwen
    model.train()
    routes = passes.recorded(model)
    passes.move_routers(model)
    now = passes.recorded(model)
    assert (now.sort(-1).values != routes.sort(-1).values).any()
    with Routers(model).replay(routes) as once:
        expected = passes.run(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
    routers = Routers(model)
    with passes.gone_through(model) as seen, routers.replay(routes) as replay:
        outcome = passes.run(model)
    passes.assert_equal(outcome, expected)
    assert len(seen) == 2 * routes.size(1)  # the control: layers have run again
    assert torch.equal(replay.changed, once.changed)
    assert replay.changed.sum() > 0


def test_each_layer_decides_in_its_own_way(qwen: PreTrainedModel) -> None:
    """By one topk in one layer, by three in another."""
    in_groups = mixtures.build("deepseek_v3 in groups")
    qwen.get_submodule("model.layers.1").mlp = in_groups.get_submodule("model.layers.1.mlp")
    routes = passes.others(2)
    with Routers(qwen).replay(routes):
        passes.assert_gone_through(qwen, routes)
    routes = passes.recorded(qwen)
    assert routes.shape == (passes.TOKENS, 2, 2)
    passes.assert_equal(passes.replayed(qwen, routes), passes.run(qwen))


def test_more_experts_than_a_byte_counts() -> None:
    config = families.config("qwen3_moe")
    config.num_experts, config.num_hidden_layers = 300, 1
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    passes.move_routers(model)
    routes = passes.recorded(model)
    assert routes.dtype == torch.int16 and routes.max() > 255
    passes.assert_gone_through(model, routes)
    passes.assert_equal(passes.replayed(model, routes), passes.run(model))
    routes = torch.stack([torch.arange(255, 255 + passes.TOKENS), torch.arange(passes.TOKENS)], dim=-1)[:, None].to(
        torch.int16
    )
    with Routers(model).replay(routes):
        passes.assert_gone_through(model, routes)


def test_nothing_is_left_behind_by_an_exception(qwen: PreTrainedModel) -> None:
    natural, routers = passes.run(qwen), Routers(qwen)

    def fail(*_: Any) -> None:
        raise KeyError("planted")

    handle = qwen.get_submodule(passes.SECOND).register_forward_hook(fail)
    for context in (routers.record(), routers.replay(passes.others(2))):
        with pytest.raises(KeyError, match="planted"), context:
            passes.run_forward(qwen)
    handle.remove()
    assert not any("forward" in vars(router) for router in passes.routers_of(qwen))
    passes.assert_equal(passes.run(qwen), natural)
    routes = passes.others(2)
    with routers.replay(routes):
        passes.assert_gone_through(qwen, routes)


def test_a_context_within_another_holds_until_its_end(qwen: PreTrainedModel) -> None:
    routers, outer, inner, natural = Routers(qwen), passes.others(2, 1), passes.others(2, 2), passes.recorded(qwen)
    with routers.replay(outer) as of_outer:
        passes.assert_gone_through(qwen, outer)
        with routers.replay(inner) as of_inner:
            passes.assert_gone_through(qwen, inner)
        of_inner.check()
        with routers.record() as recording:
            passes.run_forward(qwen)
        assert torch.equal(recording.routes(), natural)
        of_outer.check()  # what was within does not count
        passes.assert_gone_through(qwen, natural)  # its pass is over
    assert torch.equal(passes.recorded(qwen), natural)


def test_two_passes_before_one_backward_are_refused_if_layers_run_again(qwen: PreTrainedModel) -> None:
    """Recomputed layers could not tell whose routes they take."""

    def together() -> None:
        routers = Routers(qwen)
        with routers.replay(passes.others(2, 1)) as first:
            passes.run_forward(qwen)
            first.check()
            with routers.replay(passes.others(2, 2)) as second:
                passes.run_forward(qwen)
                second.check()

    together()
    qwen.train().gradient_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(RuntimeError, match=r"before the backward of an earlier one.*Run backward first"):
        together()


def test_a_router_that_writes_into_its_input_does_so_once(qwen: PreTrainedModel) -> None:
    """As jitter does; also where it runs once before, to be known."""
    router = passes.routers_of(qwen)[1]
    original = router.forward

    def forward(hidden_states: Tensor) -> Any:
        hidden_states *= 1.5
        return original(hidden_states)

    vars(router)["forward"] = forward
    routes = passes.others(2)
    with torch.no_grad():
        known = Routers(qwen)
        with known.record():
            passes.run_forward(qwen)
        logits = []
        for routers in (known, Routers(qwen)):
            with routers.replay(routes):
                logits.append(passes.run_forward(qwen))
    assert torch.equal(*logits)


def test_routes_of_another_shape_are_refused(qwen: PreTrainedModel) -> None:
    """Some of them would broadcast."""
    for shape in ((passes.TOKENS + 1, 2, 2), (passes.TOKENS, 2, 1), (passes.TOKENS, 3, 2), (1, 2, 2)):
        routes = torch.arange(shape[-1], dtype=torch.uint8).expand(shape)
        with pytest.raises(ValueError, match=r"do not fit .*model\.layers"), Routers(qwen).replay(routes):
            passes.run_forward(qwen)
    assert not any("forward" in vars(router) for router in passes.routers_of(qwen))


def test_a_layer_whose_router_does_not_run_is_refused(qwen: PreTrainedModel) -> None:
    routers = Routers(qwen)
    qwen.get_submodule("model.layers.1").mlp = nn.Identity()
    with routers.record() as recording:
        passes.run_forward(qwen)
    with pytest.raises(ValueError, match=rf"the router {passes.SECOND} chose experts for \[\] tokens"):
        recording.routes()
    with routers.replay(passes.others(2)) as replay:
        passes.run_forward(qwen)
    with pytest.raises(ValueError, match=f"the router {passes.SECOND} ran 0 times"):
        replay.check()


def test_a_router_that_runs_twice_is_refused(qwen: PreTrainedModel) -> None:
    routers = Routers(qwen)
    with routers.record() as recording:
        passes.run_forward(qwen)
        passes.run_forward(qwen)
    with pytest.raises(
        ValueError, match=rf"{passes.FIRST} chose experts for \[{passes.TOKENS}, {passes.TOKENS}\] tokens"
    ):
        recording.routes()
    layers = qwen.get_submodule("model.layers")
    assert isinstance(layers, nn.ModuleList)
    layers[0].mlp = layers[1].mlp
    with Routers(qwen).replay(passes.others(1)) as replay:
        passes.run_forward(qwen)
    with pytest.raises(ValueError, match=r"mlp\.gate ran 2 times"):
        replay.check()


@pytest.mark.parametrize("in_training", [0, 1, 3])
def test_a_router_that_decides_otherwise_than_before_is_refused(qwen: PreTrainedModel, in_training: int) -> None:
    """By another number of calls of topk: the call that decides is unknown."""
    router = passes.routers_of(qwen)[1]
    original = router.forward

    def forward(hidden_states: Tensor) -> Any:
        for _ in range(in_training if router.training else 2):
            hidden_states.topk(3)
        return original(hidden_states)

    vars(router)["forward"] = forward
    routers, routes = Routers(qwen), passes.others(2)
    with routers.replay(routes):
        passes.assert_gone_through(qwen, routes)
    qwen.train()
    message = "do not fit" if in_training == 3 else f"called topk {in_training + 1} times instead of 3"
    with pytest.raises(ValueError, match=message), routers.replay(routes):
        passes.run_forward(qwen)
    assert vars(router)["forward"] is forward
