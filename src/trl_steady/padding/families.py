"""What may be left out of a model's passes without moving a number, told from its config and its modules."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from trl_steady.padding.attention import IMPLEMENTATIONS, own_implementation

__all__ = ["Traits", "traits"]

_LAYERS = {"full_attention", "sliding_attention"}
_ROPE_OF_THE_WIDTH = ("dynamic", "longrope")
# Layers that divide a row into blocks, beginning at its first column
_LAYERS_OF_BLOCKS = {"compressed_sparse_attention", "heavily_compressed_attention", "minimax_m3_sparse"}
# Families with rotary positions that padding before a sequence changes all the same: queries scaled by their column
# (beam), weighted norms after the rotation (hunyuan), states that take padding in (recurrent_gemma), patches (blt)
_COUNTS_COLUMNS = {"beam", "blt", "hunyuan_v1_dense", "hunyuan_v1_moe", "recurrent_gemma"}
# Families in which tokens see what comes after them (cpmant), or what is in other rows (doge, as a mixture of experts)
_SEES_EVERYTHING = {"cpmant", "doge"}


@dataclass(frozen=True)
class Traits:
    """How a model takes batches without their padding."""

    implementation: str | None
    """Of attention."""
    why_not_packed: str | None
    """Why sequences laid end to end would not stay apart; None if they do."""
    is_shift_invariant: bool
    """Whether padding before a sequence changes nothing."""
    width_limit: float
    """Up to which width batches may be cut; usually infinite."""


def traits(model: PreTrainedModel) -> Traits:
    """Of a transformers model, without PEFT's wrapper."""
    config = model.config.get_text_config()
    limits = [
        rope.get("original_max_position_embeddings")
        or getattr(config, "original_max_position_embeddings", None)  # transformers 4
        or config.max_position_embeddings
        for rope in _rope(config)
        if rope.get("rope_type", rope.get("type")) in _ROPE_OF_THE_WIDTH
    ]
    if config.model_type in _SEES_EVERYTHING:
        limits = [0]
    counts_columns = config.model_type in _COUNTS_COLUMNS or any("llama_4_scaling_beta" in r for r in _rope(config))
    has_blocks = not _LAYERS_OF_BLOCKS.isdisjoint(getattr(config, "layer_types", None) or ())
    return Traits(
        implementation=own_implementation(model),
        why_not_packed=_why_not_packed(model),
        is_shift_invariant=_is_known(model) and _is_rotary(model) and not counts_columns and not has_blocks,
        width_limit=min(limits, default=float("inf")),
    )


def _why_not_packed(model: PreTrainedModel) -> str | None:
    config, name = model.config, type(model).__name__
    if not _is_known(model):
        return f"{name} is not one of transformers' own models"
    if config.model_type in _SEES_EVERYTHING:
        return f"{name} lets tokens see more than what came before them"
    if config.get_text_config() is not config or any("mrope_section" in rope for rope in _rope(config)):
        return f"{name} reads more than text"
    if not _is_rotary(model):
        return f"{name} has no rotary positions"
    if not type(model)._supports_attention_backend:
        return f"{name} does not attend by transformers' attention interface"
    others = not _LAYERS.issuperset(getattr(config, "layer_types", None) or ())
    if others or model._is_stateful or any(isinstance(module, nn.Conv1d) for module in model.modules()):
        return f"{name} has layers other than attention that pass on what came before"
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        return f"{name} attends in both directions"
    if own_implementation(model) not in IMPLEMENTATIONS:
        tried = " and ".join(map(repr, IMPLEMENTATIONS))
        return f"attn_implementation={own_implementation(model)!r} has not been tried with it; {tried} have"
    return None


def _is_known(model: PreTrainedModel) -> bool:
    own_class = next(each for each in type(model).__mro__ if not each.__module__.startswith("torch."))  # under FSDP2
    return own_class.__module__.startswith("transformers.models.")


def _is_rotary(model: PreTrainedModel) -> bool:
    return any("Rotary" in type(module).__name__ for module in model.modules())


def _rope(config: PretrainedConfig) -> Iterator[Mapping[str, Any]]:
    """Rotary parameters: one set for all layers, or one for each kind of them."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = getattr(config, name, None)
        if isinstance(rope, Mapping):
            yield rope
            yield from (each for each in rope.values() if isinstance(each, Mapping))
