"""Find from a model's config and modules which padding its passes can leave out without changing results."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from trl_steady.features.padding_free.attention import own_implementation, why_not_packed

_LAYERS = {"full_attention", "sliding_attention"}
_WIDTH_DEPENDENT_ROPE = ("dynamic", "longrope")
# Layers that divide a row into blocks, starting at its first column
_BLOCK_LAYERS = {"compressed_sparse_attention", "heavily_compressed_attention", "minimax_m3_sparse"}
# Rotary families in which states absorb the padding before a sequence, or the input is grouped into patches
_COUNTS_COLUMNS = {"recurrent_gemma", "blt"}
# A forward that changes queries or keys after their last rotation makes attention depend on columns, not only on
# distances: a norm with weights (hunyuan), or a scale for each channel (dory) or column (beam, mistral4).
# Running the model with and without padding would not show it. The scales and norms of a new model are all equal, and
# only training makes them differ. The scale of mistral4 first changes after 8,192 columns. bfloat16 rounds by more
# than the scale of beam changes.
_AFTER_ROTATION = re.compile(r"(?s)apply_\w*ro(tary|pe)(?!.*apply_\w*ro(tary|pe)).*\b[qk]\w* = [^\n]*(norm\(|scal|\*)")
# Families in which tokens depend on later tokens (cpmant), or on other rows (doge, as a mixture of experts)
_SEES_EVERYTHING = {"cpmant", "doge"}


@dataclass(frozen=True)
class Support:
    """Which padding a model can do without."""

    implementation: str | None  # name of the attention function
    why_not_packed: str | None  # why packed sequences would influence each other; None if they do not
    is_shift_invariant: bool  # True if padding before a sequence changes nothing
    width_limit: float  # largest width of batches whose columns may be cut; usually infinite


def find_support(model: PreTrainedModel) -> Support:
    """Return which padding a transformers model can do without. Pass the model without PEFT's wrapper."""
    config = model.config.get_text_config()
    limits = list(_selections(model))
    for rope in _rope(config):
        if rope.get("rope_type") in _WIDTH_DEPENDENT_ROPE:
            limits.append(rope.get("original_max_position_embeddings") or config.max_position_embeddings)
    if config.model_type in _SEES_EVERYTHING:
        limits = [0]
    counts_columns = config.model_type in _COUNTS_COLUMNS or _changes_rotated(model)
    has_blocks = not _BLOCK_LAYERS.isdisjoint(getattr(config, "layer_types", None) or ())
    return Support(
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
        return f"{name} lets a token depend on more than the tokens before it"
    has_sections = any("mrope_section" in rope for rope in _rope(config))  # of positions, for images too
    if config.get_text_config() is not config or has_sections:
        return f"{name} takes other inputs than text"
    if not _is_rotary(model):
        return f"{name} has no rotary positions"
    if not type(model)._supports_attention_backend:
        return f"{name} does not support transformers' attention interface"
    has_other_layers = not _LAYERS.issuperset(getattr(config, "layer_types", None) or ())
    has_convolutions = any(isinstance(module, nn.Conv1d) for module in model.modules())
    if has_other_layers or has_convolutions or model._is_stateful:
        return f"{name} has layers other than attention that carry on information from earlier tokens"
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        return f"{name} has bidirectional attention"
    return why_not_packed(own_implementation(model))


def _is_known(model: PreTrainedModel) -> bool:
    for kind in type(model).__mro__:
        if not kind.__module__.startswith("torch."):  # FSDP2 puts a class of its own before the model's
            return kind.__module__.startswith("transformers.models.")
    return False


def _is_rotary(model: PreTrainedModel) -> bool:
    return any("Rotary" in type(module).__name__ for module in _text_modules(model))


def _changes_rotated(model: PreTrainedModel) -> bool:
    functions: set[Callable[..., Any]] = set()
    try:
        for module in _text_modules(model):
            forward = inspect.unwrap(module.forward)  # a script may have set it on the module
            functions.add(getattr(forward, "__func__", forward))
        sources = list(map(inspect.getsource, functions))
    except (OSError, TypeError):  # a script has made one without a source
        return True
    return any(_AFTER_ROTATION.search(source) for source in sources)


def _text_modules(model: PreTrainedModel) -> Iterator[nn.Module]:
    # a vision tower beside the text may be rotary
    return cast(PreTrainedModel, model.base_model).get_decoder().modules()


def _selections(model: PreTrainedModel) -> Iterator[int]:
    """Yield the width up to which each indexer of sparse attention selects all tokens.

    In wider batches, the padding can decide which tokens are selected: scores of 0 tie, and padding may have a score.
    """
    for module in model.modules():
        sizes = vars(module)
        if "index_topk" in sizes:
            yield sizes["index_topk"] * sizes.get("compress_rate", 1)
        elif "topk_blocks" in sizes:
            yield sizes["topk_blocks"] * sizes["block_size"]


def _rope(config: PretrainedConfig) -> Iterator[Mapping[str, Any]]:
    """Yield the rotary parameters: one set for all layers, or one set for each kind of layer."""
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, Mapping):
        yield rope
        for of_kind in rope.values():
            if isinstance(of_kind, Mapping):
                yield of_kind
