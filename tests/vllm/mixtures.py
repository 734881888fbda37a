"""Mixtures of experts that vLLM's CPU engine takes, some of whose layers are dense, and where their tokens go."""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from tests.oracles import routes as routed_oracle
from tests.tools import tiny

SPARSE = [1, 3, 4]
"""Which decoder layers have routers."""
SIZES: dict[str, Any] = {
    **tiny.SIZES,
    "initializer_range": 0.2,
    "num_hidden_layers": 5,
    "mlp_only_layers": [0, 2],
    "hidden_size": 64,
    "intermediate_size": 128,
    "head_dim": 32,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
}


def save_model(folder: Path) -> Path:
    """Random, with weights far enough apart that tokens go many ways."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SIZES))
    model.generation_config.eos_token_id = model.config.eos_token_id
    model.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


@torch.no_grad()
def agreement(model: nn.Module, ids: list[int], routes: Tensor) -> Tensor:
    """(T - 1, L): whether the first T - 1 rows of `routes` are where the model sends the tokens of `ids`.

    So they are, too, where two experts are so close that another order of adding up may choose the other.
    """
    scores: list[Tensor] = []
    routers = [module for module in model.modules() if isinstance(module, Qwen3MoeTopKRouter)]
    hooks = [router.register_forward_hook(lambda _m, _i, output: scores.append(output[0])) for router in routers]
    natural = routed_oracle.natural(model, ids)[:-1]
    for hook in hooks:
        hook.remove()
    best = torch.stack(scores, dim=1)[:-1].topk(natural.size(-1) + 1).values
    is_close = best[..., -2] - best[..., -1] < 1e-5
    assert is_close.float().mean() < 0.1  # few, so that agreement shows something
    return (routes[: len(natural)].long().sort(-1).values == natural).all(-1) | is_close


def share(of_sequences: list[Tensor]) -> float:
    return torch.cat([agreed.flatten() for agreed in of_sequences]).double().mean().item()
