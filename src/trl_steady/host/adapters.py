"""Contexts that keep PEFT from changing a model when it adds, loads or switches adapters."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

__all__ = ["POLICY_ADAPTER", "base_kept", "parameters_kept"]

POLICY_ADAPTER = "default"
"""Name of the policy's adapter."""


@contextmanager
def base_kept(config: Any) -> Iterator[None]:
    """Keep PEFT from changing the base while it adds adapters of this configuration.

    The initialisations of PiSSA and OLoRA would write into the base.
    """
    start = getattr(config, "init_lora_weights", None)
    if not isinstance(start, str):
        yield
        return
    config.init_lora_weights = True
    try:
        yield
    finally:
        config.init_lora_weights = start


@contextmanager
def parameters_kept(model: torch.nn.Module) -> Iterator[None]:
    """Restore the dtype and `requires_grad` of all parameters on exit.

    PEFT makes every parameter of an adapter trainable when it switches adapters, and float32 when it loads one. FSDP2
    may put an unsharded copy in the place of a parameter, in the dtype of its forwards, which is kept.
    """
    before = {
        name: (isinstance(parameter, DTensor), parameter.dtype, parameter.requires_grad)
        for name, parameter in model.named_parameters()
    }
    try:
        yield
    finally:
        for name, parameter in model.named_parameters():
            if name in before:
                was_shard, dtype, requires_grad = before[name]
                if parameter.dtype != dtype and isinstance(parameter, DTensor) == was_shard:
                    parameter.data = parameter.data.to(dtype)
                parameter.requires_grad_(requires_grad)
