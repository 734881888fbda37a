"""Routes recorded and replayed with adapters, in other precisions, and while a model generates."""

import copy
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from tests.features.router_replay import mixtures, passes
from tests.tools.headroom import within
from trl_steady.features.router_replay.replay import Routers


@torch.no_grad()
def spread(model: nn.Module) -> None:
    """LoRA begins as nothing."""
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.parametrize(
    ("adapter", "of_router"),
    [
        ({"target_modules": ["q_proj"], "target_parameters": EXPERTS}, None),
        ({"target_modules": [], "target_parameters": [*EXPERTS, "mlp.gate.weight"]}, "lora_"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["gate"]}, "modules_to_save"),
    ],
    ids=["experts", "experts and router", "copied router"],
)
def test_routes_are_replayed_with_and_without_an_adapter(
    qwen: PreTrainedModel, adapter: dict[str, Any], of_router: str | None
) -> None:
    base, routes = copy.deepcopy(qwen), passes.others(2)
    model = peft.get_peft_model(qwen, peft.LoraConfig(r=2, lora_dropout=0.0, **adapter)).eval()
    spread(model)
    natural = passes.recorded(model)
    passes.assert_equal(passes.replayed(model, natural), passes.run(model))
    routers = Routers(model)
    assert len(routers.names) == 2
    with routers.replay(routes):
        passes.assert_gone_through(model, routes)
    logits, gradients = passes.replayed(model, routes)
    assert all("lora_" in name or "modules_to_save" in name for name in gradients)
    trained = {name: gradient for name, gradient in gradients.items() if ".gate." in name}
    assert {name.split(".layers.")[1][0] for name in trained} == ({"0", "1"} if of_router else set())
    assert all(of_router and of_router in name and gradient.abs().max() > 0 for name, gradient in trained.items())
    # without the adapter, the base
    with model.disable_adapter():
        with torch.no_grad(), routers.record() as recording:
            passes.run_forward(model)
        assert torch.equal(recording.routes(), passes.recorded(base))
        with torch.no_grad(), routers.replay(routes):
            plain = passes.run_forward(model)
    with torch.no_grad(), Routers(base).replay(routes):
        assert torch.equal(plain, passes.run_forward(base))
    # in the weights, the same
    merged = model.merge_and_unload()
    assert not within(passes.apart(logits, plain), 100 * passes.ROUNDING)
    with torch.no_grad(), Routers(merged).replay(routes):
        assert within(passes.apart(passes.run_forward(merged), logits), passes.ROUNDING)


def test_a_router_in_advance_takes_no_random_numbers(checkpointing: dict[str, bool]) -> None:
    """A pass that only looks takes no random numbers from one that runs again."""
    routes = passes.others(2)
    kind = {"r": 2, "target_modules": ["wg"], "lora_dropout": 0.5}

    def outcome(seed: int, *, is_known: bool, is_checkpointed: bool) -> passes.Outcome:
        model = peft.get_peft_model(mixtures.build("hunyuan_v1_moe"), peft.LoraConfig(**kind))
        spread(model)
        model.train()
        if is_checkpointed:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
        routers = Routers(model)
        if is_known:
            with torch.no_grad(), routers.record():
                passes.run_forward(model)
        torch.manual_seed(seed)
        with routers.replay(routes):
            return passes.run(model)

    expected = outcome(0, is_known=True, is_checkpointed=False)
    assert not passes.are_equal(outcome(1, is_known=True, is_checkpointed=False), expected)
    passes.assert_equal(outcome(0, is_known=True, is_checkpointed=True), expected)
    passes.assert_equal(outcome(0, is_known=False, is_checkpointed=False), expected)
    passes.assert_equal(outcome(0, is_known=False, is_checkpointed=True), expected)


@pytest.mark.parametrize("precision", ["bfloat16", "autocast"])
def test_half_precision_records_and_replays(qwen: PreTrainedModel, precision: str) -> None:
    model = qwen
    if precision == "bfloat16":
        model.to(torch.bfloat16)
    else:  # as accelerate does
        vars(model)["forward"] = torch.autocast("cpu", dtype=torch.bfloat16)(model.forward)
    model.train()
    routers = Routers(model)
    routes = passes.others(len(routers.names))
    natural = passes.run(model)
    passes.assert_equal(passes.replayed(model, passes.recorded(model)), natural)
    with routers.record():
        passes.run_forward(model)
    with routers.replay(routes):
        passes.assert_gone_through(model, routes)
        expected = passes.run(model)
    assert not torch.equal(expected[0], natural[0])
    assert all(expected[1][f"{name}.weight"].abs().max() > 0 for name in routers.names)
    # of routers that have not run before
    passes.assert_equal(passes.replayed(model, routes), expected)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    passes.assert_equal(passes.replayed(model, routes), expected)
