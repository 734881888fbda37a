"""Log-probs of a Qwen3 mixture of experts whose tokens go through given experts, from the definition.

Each sequence alone: no padding, no packing, no gradient checkpointing, no cache.
"""

import contextlib
import copy
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PeftModel
from torch import Tensor, nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

NONE = 255  # in a table of routes: of this token and layer, none


def weights(model: nn.Module) -> dict[str, Tensor]:
    """A copy of all, of the adapter too."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def plain(folder: Path, model: nn.Module, state: dict[str, Tensor]) -> nn.Module:
    """The model that `model` is with these weights, adapters merged, and with nothing of a trainer's about it."""
    if not isinstance(model, PeftModel):
        return initial(folder, state)
    own = copy.deepcopy(model)
    own.load_state_dict(state)
    return initial(folder, own.merge_and_unload().state_dict())


def initial(folder: Path, state: dict[str, Tensor] | None = None) -> nn.Module:
    """What lies in the folder, with other weights if given."""
    model = copy.deepcopy(_loaded(folder))
    if state is not None:
        model.load_state_dict(state)
    return model


@functools.cache
def _loaded(folder: Path) -> nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def log_probs(
    model: nn.Module, ids: list[int], prompt: int, routes: Tensor | None = None, temperature: float = 1.0
) -> Tensor:
    """Of the tokens after the first `prompt`; (T, L, K) `routes`, in which a row of NONE leaves it to the model."""
    with contextlib.nullcontext() if routes is None else _forced(routes):
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
    scores = torch.log_softmax(logits.float() / temperature, dim=-1)
    return scores.gather(-1, torch.tensor(ids)[1:, None])[prompt - 1 :, 0]


@torch.no_grad()
def natural(model: nn.Module, ids: list[int]) -> Tensor:
    """(T, L, K): where the model itself sends each token, in ascending order."""
    chosen: list[Tensor] = []
    routers = [module for module in model.modules() if isinstance(module, Qwen3MoeTopKRouter)]
    hooks = [router.register_forward_hook(lambda _m, _i, output: chosen.append(output[2])) for router in routers]
    model(input_ids=torch.tensor([ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, dim=1).sort(-1).values


@torch.no_grad()
def refused(model: nn.Module, ids: list[int], routes: Tensor) -> Tensor:
    """(L,) how many of the forced choices the routers would not have made, in the pass in which they are forced."""
    counts: list[int] = []
    with _forced(routes, counts):
        model(input_ids=torch.tensor([ids]), use_cache=False)
    return torch.tensor(counts)


@contextlib.contextmanager
def _forced(routes: Tensor, refused: list[int] | None = None) -> Iterator[None]:
    own, layers = Qwen3MoeTopKRouter.forward, iter(routes.long().unbind(1))

    def forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden_states.flatten(0, -2) @ self.weight.T
        p = torch.exp(logits.float()) / torch.exp(logits.float()).sum(-1, keepdim=True)
        forced = next(layers)
        live = p.argsort(-1, descending=True)[:, : forced.size(-1)]
        is_forced = forced[:, :1] != NONE
        experts = forced.where(is_forced, live)
        if refused is not None:
            refused.append(sum(len(set(f) - set(own)) for f, own in zip(experts.tolist(), live.tolist(), strict=True)))
        gates = torch.stack([p[token, chosen] for token, chosen in enumerate(experts)])
        if self.norm_topk_prob:
            gates = gates / gates.sum(-1, keepdim=True)
        return logits, gates.to(logits.dtype), experts

    Qwen3MoeTopKRouter.forward = forward
    try:
        yield
    finally:
        Qwen3MoeTopKRouter.forward = own
