"""Routes recorded and replayed with adapters, in other precisions, and while a model generates."""

import copy
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.tools import families, mixtures
from tests.tools.headroom import within
from tests.tools.passes import (
    ROUNDING,
    Outcome,
    apart,
    are_equal,
    assert_equal,
    assert_gone_through,
    others,
    recorded,
    replayed,
    routers_of,
    run,
    run_forward,
)
from trl_steady.routing.part import fed
from trl_steady.routing.replay import Routers, continued

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
def test_routes_are_replayed_with_and_without_an_adapter(qwen: PreTrainedModel, kind: str) -> None:
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
    assert not within(apart(logits, plain), 100 * ROUNDING)
    with torch.no_grad(), Routers(merged).replaying(routes):
        assert within(apart(run_forward(merged), logits), ROUNDING)


@pytest.mark.parametrize("kind", ["experts and router", "copied router"])
def test_adapters_replay_under_gradient_checkpointing(
    qwen: PreTrainedModel, kind: str, checkpointing: dict[str, bool]
) -> None:
    routes = others(2)
    model = adapted(qwen, kind).train()
    expected = replayed(model, routes)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
    assert_equal(replayed(model, routes), expected)


def test_a_router_in_advance_takes_no_random_numbers(checkpointing: dict[str, bool]) -> None:
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


def test_a_frozen_router_is_replayed_and_gets_no_gradient(qwen: PreTrainedModel) -> None:
    routes = others(len(routers_of(qwen)))
    logits, gradients = replayed(qwen, routes)
    for router in routers_of(qwen):
        router.requires_grad_(False)
    names = {
        name
        for name, each in qwen.named_parameters()
        if not each.requires_grad and gradients.pop(name, None) is not None
    }
    assert len(names) >= len(routers_of(qwen))
    assert_equal(replayed(qwen, routes), (logits, gradients))


# Other precisions


@pytest.mark.parametrize("precision", ["bfloat16", "autocast"])
def test_half_precision_records_and_replays(model: PreTrainedModel, precision: str) -> None:
    if precision == "bfloat16":
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
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_equal(replayed(model, routes), expected)


# Generation

NEW = 6


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_generation_has_the_routes_of_a_pass_over_its_tokens(qwen: PreTrainedModel, use_cache: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(5) >= torch.tensor([[0], [2], [4]])
    prompts = torch.randint(2, families.VOCABULARY, mask.shape, generator=generator) * mask

    def generate(**options: Any) -> Tensor:
        torch.manual_seed(0)
        return qwen.generate(
            input_ids=prompts,
            attention_mask=mask.long(),
            do_sample=False,
            use_cache=use_cache,
            max_new_tokens=NEW,
            pad_token_id=0,
            **options,
        )

    ends = generate(eos_token_id=None)[0, 7].item()  # the third that the first one says
    with Routers(qwen).recording() as recording, fed(qwen) as passes:
        sequences = generate(eos_token_id=ends)
    assert (sequences[0, 8:] == 0).all()
    assert sequences.size(1) == mask.size(1) + NEW  # another one goes on
    routes = continued(recording.routes_of_passes([len(ids) for ids in passes]), len(sequences))
    assert torch.equal(continued(passes, len(sequences)), sequences[:, :-1])
    assert routes.shape == (3, sequences.size(1) - 1, 2, 2)
    whole = nn.functional.pad(mask, (0, NEW), value=True)
    with torch.no_grad(), Routers(qwen).recording() as recording:
        qwen(
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
