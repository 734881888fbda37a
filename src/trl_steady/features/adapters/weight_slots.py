"""The weights of a PEFT policy's bare model, each with the adapter layers around it and its quantisation."""

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.integrations import dequantize_bnb_weight
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
from torch import Tensor


class WeightSlot(NamedTuple):
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

    def dequantised(self) -> Tensor:
        """Return the base's weight in its full shape: a new tensor if it is quantised, otherwise the stored one."""
        dequantise: Any = dequantize_4bit if isinstance(self.owner, Linear4bit) else dequantize_bnb_weight
        return self.parameter.data if self.quant_state is None else dequantise(self.parameter, self.quant_state)


def iter_weight_slots(base: torch.nn.Module) -> Iterator[WeightSlot]:
    """Yield the parameters of a bare model in the order of `named_parameters`, tied ones at every place."""
    return _slots(base, base, "", ())


def active_names(layer: BaseTunerLayer) -> list[str]:
    """Return the active adapters that are in a layer. A reference or a critic may have layers of its own."""
    parts = [getattr(layer, part, ()) for part in layer.adapter_layer_names]
    return [name for name in layer.active_adapters if any(name in part for part in parts)]


def _slots(module: torch.nn.Module, original: Any, name: str, layers: tuple[Any, ...]) -> Iterator[WeightSlot]:
    children: dict[str, Any] = module._modules
    if isinstance(module, ModulesToSaveWrapper):
        active = module.active_adapters  # PEFT allows one at most
        trained = children["modules_to_save"][active[0]] if active else module.original_module
        yield from _slots(trained, module.original_module, name, layers)
    elif isinstance(module, TrainableTokensWrapper):
        yield from _slots(children["token_adapter"], children["token_adapter"], name, layers)
    elif isinstance(module, BaseTunerLayer):
        acting = (module, *layers) if active_names(module) else layers
        yield from _slots(children["base_layer"], children["base_layer"], name, acting)
    else:
        for key, parameter in module._parameters.items():
            if parameter is not None:
                yield WeightSlot(f"{name}{key}", module, key, original._parameters.get(key, parameter), layers)
        for key, child in children.items():
            if child is not None:
                path = name if key == "_checkpoint_wrapped_module" else f"{name}{key}."
                yield from _slots(child, original._modules.get(key, child), path, ())
