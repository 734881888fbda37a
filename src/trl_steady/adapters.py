"""The weights of a PEFT policy with its adapter merged on the side, for an inference engine: the base stays as it is.

TRL 1.16 pushes a PEFT policy by `merge_adapter`, then `unmerge_adapter`. On a bitsandbytes base each of the two
requantises, so that every push moves the stored base, which is also part of a KL reference.
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

__all__ = ["merged_weights"]

_LAYERS = (lora.Linear, lora.Embedding, bnb.Linear4bit, bnb.Linear8bitLt, ParamWrapper, TrainableTokensLayer)
# by name, as older releases of PEFT lack some; of the others, some route by token or write into the base as they merge
_KINDS = ("DoraLinear", "DoraEmbedding", "MiCALinear", "MiCAEmbedding", "BdLoraLinear", "VeloraLinear")
_VARIANTS = {f"{kind}Variant" for kind in _KINDS}
_REFUSED = "cannot be merged on the side"
_LORA = "Use LoRA or DoRA"
_BASE = "a bitsandbytes or an unquantised base"
_WAY_OUT = "or generate without an engine (use_vllm=False)."


def merged_weights(model: PeftModel, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Every parameter of the policy with its active adapters merged, one at a time, under its name in the bare model.

    Each merge is PEFT's own, in float32, on a copy of one layer, dequantised if need be; nothing is written into the
    model. Names and order are those of TRL's `VLLMGeneration._iter_named_params` (a tied weight once), but for what
    TRL would push under names no engine knows: inactive `modules_to_save`, `trainable_token_indices`.

    Args:
        model: a LoRA policy whose parameters are whole on this process (under ZeRO-3: gathered).
        dtype: of all that is yielded. `None`: each weight's own; of a quantised weight, the one its model was loaded
            in (`config.dtype`).

    Yields:
        (name, weight), without gradient, in the shape the bare, unquantised model has. What the adapter leaves alone
        and needs no cast is the parameter's own storage, as TRL yields it: read it, do not write it.

    Raises:
        ValueError: before anything is yielded, for what cannot be merged on the side: a tuner, layer, variant or
            quantisation not covered here, 4-bit weights that bitsandbytes has repacked on CPU, a parameter that is
            not whole, or tied weights that the adapter does not change together.
    """
    if not isinstance(model.base_model, lora.LoraModel):
        raise ValueError(f"{type(model.active_peft_config).__name__}: it {_REFUSED}. {_LORA}, {_WAY_OUT}")
    base = model.get_base_model()
    tied: defaultdict[int, list[_Site]] = defaultdict(list)
    for site in _sites(base, base):
        _check(site)
        tied[id(site.original)].append(site)
    for sites in tied.values():
        if any(site.trained_storage() != sites[0].trained_storage() for site in sites):
            raise ValueError(
                f"{' and '.join(site.name for site in sites)} are one weight in the base, which the adapter does not "
                "change together; an engine holds it once. Leave them out of the adapter, set "
                "ensure_weight_tying=True in its config, or untie them in the base (tie_word_embeddings=False)."
            )
    loaded_in = getattr(getattr(base, "config", None), "dtype", None)  # none if the model is not transformers'
    for first, *_ in tied.values():
        yield first.name, first.merged(dtype or (None if first.quant_state is None else loaded_in))


class _Site(NamedTuple):
    """One parameter at one place of the bare model, and the adapter layers around the module that holds it."""

    name: str
    owner: torch.nn.Module
    key: str
    original: Tensor
    """The base's own parameter, another one under `modules_to_save`: tied weights are known by it."""
    layers: tuple[Any, ...]
    """Innermost first."""

    @property
    def parameter(self) -> Any:
        return self.owner._parameters[self.key]

    @property
    def quant_state(self) -> Any:
        """What bitsandbytes dequantises the parameter with; `None` if it is not quantised."""
        if isinstance(self.owner, Linear4bit) and self.key == "weight":
            return getattr(self.parameter, "quant_state", None) or self.owner.quant_state
        if isinstance(self.owner, Linear8bitLt) and self.parameter.dtype == torch.int8:
            return copy.copy(self.owner.state)  # PEFT's dequantisation fills it in
        return None

    @property
    def merging(self) -> list[Any]:
        """The layers that change this parameter."""
        return [layer for layer in self.layers if self.key in _merged_keys(layer)]

    def trained_storage(self) -> set[int]:
        """Where this place's weight and its active adapters lie: equal for places that train as one."""
        adapters = (item for layer in self.merging for item in layer.named_parameters())
        active = {name for layer in self.merging for name in layer.active_adapters}
        trained = (value for name, value in adapters if not active.isdisjoint(name.split(".")))
        return {value.data_ptr() for value in (self.parameter, *trained)}

    def dequantised(self) -> Tensor:
        """The base's weight in its full shape: a new tensor if it is quantised, otherwise the stored one."""
        dequantise = dequantize_4bit if isinstance(self.owner, Linear4bit) else dequantize_bnb_weight
        return self.parameter.data if self.quant_state is None else dequantise(self.parameter, self.quant_state)

    @torch.no_grad()
    def merged(self, dtype: torch.dtype | None) -> Tensor:
        """The weight with the active adapters in `dtype`; `None`: as it is dequantised."""
        weight = self.dequantised()
        dtype = dtype or weight.dtype
        if not self.merging:
            return weight.to(dtype)
        precision = torch.promote_types(weight.dtype, torch.float32)
        bare = torch.nn.Module()  # all that PEFT's merges read of a base layer
        for key in {self.key, "weight", "bias"}:
            if self.owner._parameters.get(key) is not None:
                value = weight if key == self.key else self._replace(key=key).dequantised()
                setattr(bare, key, torch.nn.Parameter(value.to(precision, copy=True), requires_grad=False))
        for layer in self.merging:
            _on_the_side(layer, bare, precision).merge()
        return bare.get_parameter(self.key).data.to(dtype)


def _sites(module: Any, original: Any, name: str = "", layers: tuple[Any, ...] = ()) -> Iterator[_Site]:
    """The parameters of the bare model in the order of `named_parameters`, tied ones at every place."""
    children: dict[str, Any] = module._modules
    if isinstance(module, ModulesToSaveWrapper):
        active = module.active_adapters  # one at most, says PEFT
        trained = children["modules_to_save"][active[0]] if active else module.original_module
        yield from _sites(trained, module.original_module, name, layers)
    elif isinstance(module, TrainableTokensWrapper):
        yield from _sites(children["token_adapter"], children["token_adapter"], name, layers)
    elif isinstance(module, BaseTunerLayer):
        yield from _sites(children["base_layer"], children["base_layer"], name, (module, *layers))
    else:
        for key, parameter in module._parameters.items():
            if parameter is not None:
                yield _Site(f"{name}{key}", module, key, original._parameters.get(key, parameter), layers)
        for key, child in children.items():
            if child is not None:
                path = name if key == "_checkpoint_wrapped_module" else f"{name}{key}."
                yield from _sites(child, original._modules.get(key, child), path)


def _merged_keys(layer: Any) -> set[str]:
    """The parameters of its base layer that an adapter layer changes."""
    if isinstance(layer, ParamWrapper):
        return {layer.parameter_name}
    has_bias = any(getattr(layer, "lora_bias", {}).get(name) for name in layer.active_adapters)
    return {"weight", "bias"} if has_bias else {"weight"}


def _on_the_side(layer: Any, bare: torch.nn.Module, precision: torch.dtype) -> Any:
    """`layer` with copies of its adapters in `precision`, around `bare` in place of its base layer."""
    side, children = copy.copy(layer), dict[str, Any](layer._modules)
    if type(layer) in (bnb.Linear4bit, bnb.Linear8bitLt):
        side.__class__ = lora.Linear  # whose merge does not quantise
    for name in children.keys() & set(layer.adapter_layer_names):
        children[name] = copy.deepcopy(children[name]).to(precision)
    side._modules = {**children, "base_layer": bare}
    side.merged_adapters, side._caches = list(layer.merged_adapters), {}
    return side


def _check(site: _Site) -> None:
    """Refuse what cannot be merged on the side."""
    for layer in site.layers:
        variants = getattr(layer, "lora_variant", {})
        kinds = {type(variants[name]).__name__ for name in layer.active_adapters if name in variants} - _VARIANTS
        if type(layer) not in _LAYERS or kinds:
            kind = " with ".join((f"{type(layer).__module__}.{type(layer).__name__}", *kinds))
            raise ValueError(f"{site.name} is in a {kind}, which {_REFUSED}. {_LORA} on {_BASE}, {_WAY_OUT}")
        if "bias" in _merged_keys(layer) and site.owner._parameters.get("bias") is None:
            raise ValueError(f"{site.name} has a lora_bias in a layer without a bias. Set lora_bias=False.")
    if getattr(site.quant_state, "packing_format_for_cpu", False):
        raise ValueError(
            f"bitsandbytes has repacked {site.name} for inference, because the model was used in eval mode on CPU. "
            "Load the model again and build the trainer before the first eval-mode forward."
        )
    value = site.parameter
    whole = type(value.data) is Tensor and value.numel() and not value.is_meta
    if site.quant_state is None and not (whole and value.is_floating_point() and value.itemsize > 1):  # 1: float8
        raise ValueError(
            f"{site.name} cannot be read whole in full precision: in a {type(site.owner).__name__}, it is a "
            f"{type(value.data).__name__} of {value.dtype} on {value.device}. Use {_BASE}, not sharded or offloaded, "
            f"{_WAY_OUT}"
        )
