"""Routing replay on a mixture of experts: a replay of the model's own routes changes nothing, in bf16."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.features.padding_free.rollouts import UNEQUAL
from tests.gpu.models import apart
from tests.gpu.places import Place, everywhere
from tests.gpu.recorder import Figures
from tests.tools import tiny
from trl_steady.features.router_replay.replay import Routers

SMALL = {"hidden_size": 32, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# experts of the size of Qwen3-30B-A3B's: 0.37 billion parameters, 0.7 GB in bf16, and three times that of gradients
LARGE = {
    **{"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128},
    **{"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 768, "vocab_size": 16_000},
    **{"initializer_range": 0.02},
}


class Mixture(NamedTuple):
    """A model, and the batch it gets."""

    model: Any
    ids: Tensor
    sizes: dict[str, int]

    @property
    def tokens(self) -> int:
        return self.ids.numel()


def mixture(place: Place) -> Mixture:
    torch.manual_seed(0)
    sizes = place.choose(SMALL, LARGE)
    model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**tiny.SIZES, **sizes}))
    nn.Module.to(model, place.device, torch.bfloat16)
    ids = torch.randint(50, 200, place.choose((2, 12), (2, 256)), generator=torch.manual_seed(1))
    return Mixture(model.train(), ids.to(place.device), sizes)


class Pass(NamedTuple):
    """Results of one forward and backward."""

    logits: Tensor
    gradients: list[Tensor]


def passed(own: Mixture, routes: Tensor | None, *, checkpointing: bool = False) -> Pass:
    """Forward and backward through given routes, or plain ones."""
    own.model.gradient_checkpointing_disable()
    if checkpointing:
        own.model.gradient_checkpointing_enable({"use_reentrant": False})
    own.model.zero_grad(set_to_none=True)
    weights = torch.linspace(-1, 1, own.ids.size(1), device=own.ids.device).unsqueeze(-1)

    def forward() -> Tensor:
        return own.model(input_ids=own.ids, use_cache=False).logits

    if routes is None:
        logits = forward()
        (logits.float() * weights).mean().backward()
    else:
        with Routers(own.model).replay(routes) as replaying:
            logits = forward()
            replaying.check()
            (logits.float() * weights).mean().backward()
    return Pass(logits.detach(), [p.grad.clone() for p in own.model.parameters() if p.grad is not None])


def recorded(own: Mixture) -> Tensor:
    with Routers(own.model).record() as recording, torch.no_grad():
        own.model(input_ids=own.ids, use_cache=False)
    return recording.routes()


@everywhere
def test_replaying_the_models_own_routes_changes_nothing(place: Place, figures: Figures) -> None:
    place.need_bf16()
    own = mixture(place)
    plain, again = passed(own, None), passed(own, None)
    noise = apart(again.gradients, plain.gradients)  # of the kernels themselves, which may add in any order
    replayed = passed(own, recorded(own))
    distance = apart(replayed.gradients, plain.gradients)
    assert torch.equal(replayed.logits, plain.logits)
    # two draws of the same noise, and the router's own gradient may be added in another order once more
    assert distance <= 3 * noise + 1e-3
    figures("gradients, distance from a plain pass", distance, "")
    figures("gradients, distance of two plain passes", noise, "")


@everywhere
def test_checkpointing_replays_the_same_routes(place: Place, figures: Figures) -> None:
    place.need_bf16()
    own = mixture(place)
    scores = torch.rand(
        own.tokens, tiny.SIZES["num_hidden_layers"], own.sizes["num_experts"], generator=torch.manual_seed(2)
    )
    other = scores.topk(own.sizes["num_experts_per_tok"]).indices.to(place.device, torch.uint8)
    kept, again, plain = passed(own, other), passed(own, other, checkpointing=True), passed(own, None)
    distance = apart(again.gradients, kept.gradients)
    assert torch.equal(again.logits, kept.logits) and not torch.equal(plain.logits, kept.logits)
    assert apart(plain.gradients, kept.gradients) > 0.1  # other experts have other gradients
    assert distance < 1e-2  # kernels may add in any order, in bf16 with its 8 bits
    figures("gradients, distance from a pass without checkpointing", distance, "")


@everywhere(slow=True)
@pytest.mark.parametrize("options", [{}, {"token_budget": 40, "share_prompts": True}], ids=["packed", "by tokens"])
def test_training_with_r2(
    place: Place, models: dict[str, Path], tmp_path: Path, options: dict[str, Any], figures: Figures
) -> None:
    """No route of the first update on a rollout would be another: the policy is the old one, up to rounding."""
    place.need_bf16()
    settings = {**place.arguments, "bf16": True, "router_replay": "R2", "router_aux_loss_coef": 0.0, "beta": 0.1}
    settings |= {"num_iterations": 2, "build": {"rollout_func": UNEQUAL}, **options}
    trainer = tiny.train(tiny.trainer(models["moe"], tmp_path, **settings))
    rows = [row for row in trainer.state.log_history if "routing/changed" in row]
    assert len(rows) == 6 and rows[0]["routing/fallback"] == 0
    # a packed pass may round differently from that of the old policy, and few tokens are at a tie of two experts
    assert rows[0]["routing/changed"] < 0.05 < max(row["routing/changed"] for row in rows)
    figures("share of routes changed, first update", rows[0]["routing/changed"], "")
    figures("share of routes changed, largest", max(row["routing/changed"] for row in rows), "")
