"""Merge the adapter of a PEFT policy into a copy of its weights, for an inference engine. The base does not change.

TRL 1.16 pushes a PEFT policy by `merge_adapter`, then `unmerge_adapter`. On a bitsandbytes base both calls requantise,
so every push changes the stored base, which is also part of a KL reference.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from peft import PeftModel
from peft.tuners import lora
from peft.tuners.lora import bnb
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.trainable_tokens import TrainableTokensLayer
from torch import Tensor

from trl_steady.features.adapters.weight_slots import WeightSlot, active_names, iter_weight_slots

_LAYERS = (lora.Linear, lora.Embedding, bnb.Linear4bit, bnb.Linear8bitLt, ParamWrapper, TrainableTokensLayer)
_DORA = {"DoraLinearVariant", "DoraEmbeddingVariant"}


def merged_weights(model: PeftModel) -> Iterator[tuple[str, Tensor]]:
    """Return every parameter of the policy with its active adapters merged, under its name in the bare model.

    Parameters come one at a time: the base's weight, dequantised if necessary, plus what the adapter adds, in float32.
    The model is not changed.

    Names and order are those of TRL's `VLLMGeneration._iter_named_params` (a tied weight once). The exceptions are
    inactive `modules_to_save` and `trainable_token_indices`, which TRL would push under names that no engine knows.

    Args:
        model: A LoRA policy whose parameters are whole on this process (under ZeRO-3: gathered).

    Returns:
        (name, weight) in the shape of the bare, unquantised model, in the weight's dtype. A quantised weight comes in
        the dtype in which its model was loaded. A weight that the adapter does not change is the parameter's own
        storage, as in TRL: read it, but do not write to it.

    Raises:
        ValueError: the adapter, the quantisation or tied weights are not covered, or parameters are not whole.
    """
    if not isinstance(model.base_model, lora.LoraModel):
        raise _refusal(f"an adapter of {type(model.active_peft_config).__name__}")
    base = model.get_base_model()
    tied: defaultdict[int, list[WeightSlot]] = defaultdict(list)
    for slot in iter_weight_slots(base):
        _refuse_unmergeable(slot)
        tied[id(slot.original)].append(slot)
    for slots in tied.values():
        if any(_trained_storage(slot) != _trained_storage(slots[0]) for slot in slots):
            names = [slot.name for slot in slots]
            raise ValueError(
                f"{' and '.join(names)} are one tied weight, and the adapter does not change "
                "them together. Leave them out of the adapter, or set ensure_weight_tying=True in its config."
            )
    loaded_in = getattr(base.config, "dtype", None)
    return _merged_one_by_one([slots[0] for slots in tied.values()], loaded_in)


def _merged_one_by_one(slots: list[WeightSlot], loaded_in: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    for slot in slots:
        yield slot.name, _merged(slot, loaded_in)


@torch.no_grad()
def _merged(slot: WeightSlot, loaded_in: torch.dtype | None) -> Tensor:
    """Return a weight with the active adapters, in its dtype or, if it is quantised, in `loaded_in`."""
    weight = slot.dequantised()
    dtype = weight.dtype
    if slot.quant_state is not None and loaded_in is not None:
        dtype = loaded_in
    layers = _changing_layers(slot)
    if not layers:
        return weight.to(dtype)
    merged = weight.to(torch.promote_types(weight.dtype, torch.float32))
    for layer in layers:
        for adapter in active_names(layer):
            if adapter in getattr(layer, "merged_adapters", ()):  # the base has it already
                continue
            merged = _with_adapter(merged, layer, adapter, slot.key)
    return merged.to(dtype)


def _with_adapter(weight: Tensor, layer: Any, adapter: str, key: str) -> Tensor:
    """Return a new weight: `weight` with one adapter of `layer`, as PEFT's forward applies it."""
    if isinstance(layer, TrainableTokensLayer):
        tokens = torch.tensor(layer.token_indices[adapter], device=weight.device)
        return weight.index_copy(0, tokens, layer.trainable_tokens_delta[adapter].to(weight))
    if key == "bias" and not isinstance(layer, ParamWrapper):
        bias = layer.lora_B[adapter].bias
        if bias is None:
            return weight
        return weight + bias.to(weight) * layer.scaling[adapter]
    if isinstance(layer, ParamWrapper):  # its layout of experts is PEFT's own, which rounds the product to the base
        return weight + layer.get_delta_weight(adapter)
    merged = weight + _lora_delta(layer, adapter, weight)
    if adapter not in layer.lora_variant:
        return merged
    # DoRA: each output has a norm of its own
    inputs = 0 if _is_transposed(layer) else 1
    magnitude = layer.lora_magnitude_vector[adapter].weight.to(weight)
    return (magnitude / merged.norm(dim=inputs)).unsqueeze(inputs) * merged


def _lora_delta(layer: Any, adapter: str, weight: Tensor) -> Tensor:
    """Return what LoRA adds to a weight, computed in its dtype.

    PEFT's `get_delta_weight` would round a bf16 adapter's product to bf16, by 2e-3 of what the adapter adds.
    """
    if isinstance(layer, lora.Embedding):
        up = layer.lora_embedding_B[adapter].to(weight)
        down = layer.lora_embedding_A[adapter].to(weight)
    else:
        up = layer.lora_B[adapter].weight.to(weight)
        down = layer.lora_A[adapter].weight.to(weight)
    delta = up @ down
    if _is_transposed(layer):
        delta = delta.T
    return delta * layer.scaling[adapter]


def _is_transposed(layer: Any) -> bool:
    """Return whether the first dimension of a layer's weight is that of its inputs."""
    return isinstance(layer, lora.Embedding) or layer.fan_in_fan_out


def _changing_layers(slot: WeightSlot) -> list[Any]:
    """Return the adapter layers that change a parameter."""
    return [layer for layer in slot.layers if slot.key in _changed_keys(layer)]


def _changed_keys(layer: Any) -> set[str]:
    """Return the names of the base layer's parameters that an adapter layer changes."""
    if isinstance(layer, ParamWrapper):
        return {layer.parameter_name}
    biases: dict[str, bool] = getattr(layer, "lora_bias", {})
    if any(map(biases.get, layer.active_adapters)):
        return {"weight", "bias"}
    return {"weight"}


def _trained_storage(slot: WeightSlot) -> set[int]:
    """Return the addresses of a weight and its active adapters: equal for slots that train as one."""
    layers = _changing_layers(slot)
    active = set[str]()
    for layer in layers:
        active.update(active_names(layer))
    addresses = {slot.parameter.data_ptr()}
    for layer in layers:
        for name, parameter in layer.named_parameters():
            if not active.isdisjoint(name.split(".")):
                addresses.add(parameter.data_ptr())
    return addresses


def _refuse_unmergeable(slot: WeightSlot) -> None:
    """Raise a ValueError if a parameter cannot be merged into a copy of the weights."""
    for layer in slot.layers:
        variants: dict[str, object] = getattr(layer, "lora_variant", {})
        adapters = active_names(layer)
        kinds = {type(variants[adapter]).__name__ for adapter in adapters if adapter in variants}
        if type(layer) not in _LAYERS or not kinds <= _DORA:  # others route by token, or change the base
            raise _refusal(f"{slot.name} in a {' '.join([type(layer).__name__, *kinds])}")
        if kinds and len(adapters) > 1:
            raise _refusal(f"{slot.name} with DoRA in one of {len(adapters)} active adapters")
    value = slot.parameter.data
    is_plain = type(value) is Tensor and value.is_floating_point() and value.itemsize > 1  # 1: float8
    if slot.quant_state is None and not is_plain:
        raise _refusal(f"{slot.name}, a {type(value).__name__} of {value.dtype},")


def _refusal(what: str) -> ValueError:
    return ValueError(
        f"{what} cannot be merged into a copy of the weights. Use LoRA or DoRA on a bitsandbytes or an unquantised "
        "base that is not sharded, or generate without an engine (use_vllm=False)."
    )
