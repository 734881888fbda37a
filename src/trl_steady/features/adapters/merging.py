"""Merge the adapter of a PEFT policy into a copy of its weights, for an inference engine. The base does not change.

TRL 1.16 pushes a PEFT policy by `merge_adapter`, then `unmerge_adapter`. On a bitsandbytes base both calls requantise,
so every push changes the stored base, which is also part of a KL reference.
"""

import copy
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from peft import PeftModel
from peft.tuners import lora
from peft.tuners.lora import bnb
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.integrations import dequantize_bnb_weight
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
from torch import Tensor

_LAYERS = (lora.Linear, lora.Embedding, bnb.Linear4bit, bnb.Linear8bitLt, ParamWrapper, TrainableTokensLayer)
_VARIANTS = {"DoraLinearVariant", "DoraEmbeddingVariant"}  # others route by token, or change the base when they merge


def merged_weights(model: PeftModel) -> Iterator[tuple[str, Tensor]]:
    """Return every parameter of the policy with its active adapters merged, under its name in the bare model.

    Parameters come one at a time. PEFT itself merges each of them, in float32, on a copy of one layer that is
    dequantised if necessary. The model is not changed.

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
    tied: defaultdict[int, list[Site]] = defaultdict(list)
    for site in sites(base, base):
        _check(site)
        tied[id(site.original)].append(site)
    for group in tied.values():
        if any(site.trained_storage() != group[0].trained_storage() for site in group):
            raise ValueError(
                f"{' and '.join(site.name for site in group)} are one tied weight, and the adapter does not change "
                "them together. Leave them out of the adapter, or set ensure_weight_tying=True in its config."
            )
    loaded_in = getattr(base.config, "dtype", None)
    return ((first.name, first.merged(loaded_in)) for first, *_ in tied.values())


class Site(NamedTuple):
    """A parameter at one place in the bare model, and the layers around its module that have an active adapter."""

    name: str
    owner: torch.nn.Module
    key: str
    original: Tensor
    """The base's own parameter, which identifies tied weights. Under `modules_to_save` it is not `parameter`."""
    layers: tuple[Any, ...]
    """Innermost first."""

    @property
    def parameter(self) -> Any:
        """The parameter, which is trained under `modules_to_save`."""
        return self.owner._parameters[self.key]

    @property
    def quant_state(self) -> Any:
        """The state with which bitsandbytes dequantises the parameter, or `None` if it is not quantised."""
        if isinstance(self.owner, Linear4bit) and self.key == "weight":
            return getattr(self.parameter, "quant_state", None) or self.owner.quant_state
        if isinstance(self.owner, Linear8bitLt) and self.parameter.dtype == torch.int8:
            return copy.copy(self.owner.state)  # a copy, because PEFT's dequantisation fills it in
        return None

    @property
    def merging(self) -> list[Any]:
        """The layers that change this parameter."""
        return [layer for layer in self.layers if self.key in _merged_keys(layer)]

    def trained_storage(self) -> set[int]:
        """Return the addresses of the weight and its active adapters here: equal for places that train as one."""
        adapters = (item for layer in self.merging for item in layer.named_parameters())
        active = {name for layer in self.merging for name in layer.active_adapters}
        trained = (value for name, value in adapters if not active.isdisjoint(name.split(".")))
        return {value.data_ptr() for value in (self.parameter, *trained)}

    def dequantised(self) -> Tensor:
        """Return the base's weight in its full shape: a new tensor if it is quantised, otherwise the stored one."""
        dequantise = dequantize_4bit if isinstance(self.owner, Linear4bit) else dequantize_bnb_weight
        return self.parameter.data if self.quant_state is None else dequantise(self.parameter, self.quant_state)

    @torch.no_grad()
    def merged(self, loaded_in: torch.dtype | None) -> Tensor:
        """Return the weight with the active adapters merged, in its dtype or, if it is quantised, in `loaded_in`."""
        weight = self.dequantised()
        dtype = weight.dtype if self.quant_state is None else loaded_in or weight.dtype
        if not self.merging:
            return weight.to(dtype)
        precision = torch.promote_types(weight.dtype, torch.float32)
        bare = torch.nn.Module()  # everything that PEFT's merges read from a base layer
        for key in {self.key, "weight", "bias"}:
            if self.owner._parameters.get(key) is not None:
                value = weight if key == self.key else self._replace(key=key).dequantised()
                setattr(bare, key, torch.nn.Parameter(value.to(precision, copy=True), requires_grad=False))
        for layer in self.merging:
            _on_the_side(layer, bare, precision).merge()
        return bare.get_parameter(self.key).data.to(dtype)


def sites(module: torch.nn.Module, original: Any, name: str = "", layers: tuple[Any, ...] = ()) -> Iterator[Site]:
    """Yield the parameters of the bare model in the order of `named_parameters`, tied ones at every place."""
    children: dict[str, Any] = module._modules
    if isinstance(module, ModulesToSaveWrapper):
        active = module.active_adapters  # PEFT allows one at most
        trained = children["modules_to_save"][active[0]] if active else module.original_module
        yield from sites(trained, module.original_module, name, layers)
    elif isinstance(module, TrainableTokensWrapper):
        yield from sites(children["token_adapter"], children["token_adapter"], name, layers)
    elif isinstance(module, BaseTunerLayer):
        acting = (module, *layers) if _acts(module) else layers
        yield from sites(children["base_layer"], children["base_layer"], name, acting)
    else:
        for key, parameter in module._parameters.items():
            if parameter is not None:
                yield Site(f"{name}{key}", module, key, original._parameters.get(key, parameter), layers)
        for key, child in children.items():
            if child is not None:
                path = name if key == "_checkpoint_wrapped_module" else f"{name}{key}."
                yield from sites(child, original._modules.get(key, child), path)


def _acts(layer: BaseTunerLayer) -> bool:
    """Return whether an active adapter is in this layer. A reference or a critic may have layers of its own."""
    return any(
        name in getattr(layer, part, ()) for part in layer.adapter_layer_names for name in layer.active_adapters
    )


def _merged_keys(layer: BaseTunerLayer) -> set[str]:
    """Return the names of the base layer's parameters that an adapter layer changes."""
    if isinstance(layer, ParamWrapper):
        return {layer.parameter_name}
    has_bias = any(getattr(layer, "lora_bias", {}).get(name) for name in layer.active_adapters)
    return {"weight", "bias"} if has_bias else {"weight"}


def _on_the_side(layer: Any, bare: torch.nn.Module, precision: torch.dtype) -> Any:
    """Return a copy of `layer` with its adapters in `precision`, around `bare` instead of its base layer."""
    side, children = copy.copy(layer), dict[str, Any](layer._modules)
    if type(layer) in (bnb.Linear4bit, bnb.Linear8bitLt):
        side.__class__ = lora.Linear  # its merge does not quantise
    for name in children.keys() & set(layer.adapter_layer_names):
        children[name] = copy.deepcopy(children[name]).to(precision)
    side._modules = {**children, "base_layer": bare}
    side.merged_adapters, side._caches = list(layer.merged_adapters), {}
    return side


def _check(site: Site) -> None:
    """Raise if a parameter cannot be merged into a copy of the weights."""
    for layer in site.layers:
        variants = {type(variant).__name__ for variant in getattr(layer, "lora_variant", {}).values()}
        if type(layer) not in _LAYERS or not variants <= _VARIANTS:
            raise _refusal(f"{site.name} in a {' '.join((type(layer).__name__, *variants))}")
    value = site.parameter.data
    is_plain = type(value) is Tensor and value.is_floating_point() and value.itemsize > 1  # 1: float8
    if site.quant_state is None and not is_plain:
        raise _refusal(f"{site.name}, a {type(value).__name__} of {value.dtype},")


def _refusal(what: str) -> ValueError:
    return ValueError(
        f"{what} cannot be merged into a copy of the weights. Use LoRA or DoRA on a bitsandbytes or an unquantised "
        "base that is not sharded, or generate without an engine (use_vllm=False)."
    )
