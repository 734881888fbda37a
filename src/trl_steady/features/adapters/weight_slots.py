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
        state = self.quant_state
        if state is None:
            return self.parameter.data
        if isinstance(self.owner, Linear4bit):
            return dequantize_4bit(self.parameter, state)
        return dequantize_bnb_weight(self.parameter, state)


def iter_weight_slots(base: torch.nn.Module) -> Iterator[WeightSlot]:
    """Yield the parameters of a bare model in the order of `named_parameters`, tied ones at every place."""
    return _slots(base, base, "", ())


def active_names(layer: BaseTunerLayer) -> list[str]:
    """Return the active adapters that are in a layer. A reference or a critic may have layers of its own."""
    present = set[str]()
    for part in layer.adapter_layer_names:
        present.update(getattr(layer, part, ()))
    return [name for name in layer.active_adapters if name in present]


def _slots(module: torch.nn.Module, original: Any, name: str, layers: tuple[Any, ...]) -> Iterator[WeightSlot]:
    children: dict[str, Any] = module._modules
    if isinstance(module, ModulesToSaveWrapper):
        original_module = module.original_module
        trained = original_module
        if module.active_adapters:  # PEFT allows one at most
            trained = children["modules_to_save"][module.active_adapters[0]]
        yield from _slots(trained, original_module, name, layers)
    elif isinstance(module, TrainableTokensWrapper):
        yield from _slots(children["token_adapter"], children["token_adapter"], name, layers)
    elif isinstance(module, BaseTunerLayer):
        if active_names(module):
            layers = (module, *layers)
        yield from _slots(children["base_layer"], children["base_layer"], name, layers)
    else:
        for key, parameter in module._parameters.items():
            if parameter is not None:
                yield WeightSlot(f"{name}{key}", module, key, original._parameters.get(key, parameter), layers)
        for key, child in children.items():
            if child is None:
                continue
            path = f"{name}{key}."
            if key == "_checkpoint_wrapped_module":
                path = name
            yield from _slots(child, original._modules.get(key, child), path, ())
