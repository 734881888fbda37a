"""Find out whether a vLLM engine can serve the policy's adapter beside its own base, and write it as files."""

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.functional import quantize_4bit
from peft import LoraConfig, PeftModel
from peft.tuners.lora.layer import ParamWrapper
from peft.utils.save_and_load import get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.utils.hub import cached_file

from trl_steady.adapters.merging import Site, sites

__all__ = ["adapter_state", "needs_adapter", "save_adapter", "served_rank", "why_not_served"]

Gather = Callable[[Sequence[Tensor]], AbstractContextManager[Any]]
"""Returns a context in which parameters are whole on this process, under ZeRO-3 too. All processes enter it."""
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM can be built."""
# Fields of LoraConfig with which an adapter still is two matrices a layer, of one rank and one scale. How the matrices
# began does not matter, because the base is compared with the engine's.
_SERVED = {
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version", "revision"),
    *("exclude_modules", "layers_pattern", "layers_to_transform", "target_modules", "fan_in_fan_out", "task_type"),
    *("lora_alpha", "lora_dropout", "r", "use_rslora", "runtime_config", "qalora_group_size"),
    *("init_lora_weights", "corda_config", "eva_config", "loftq_config", "lora_ga_config"),
}
_INDEX, _ALONE = "model.safetensors.index.json", "model.safetensors"


def needs_adapter(model: PeftModel, mode: str) -> bool:
    """Return whether an engine cannot have merged weights, because it quantises its weights as the base is."""
    return mode == "colocate" and _is_quantised(model)


def served_rank(model: PeftModel) -> int:
    """Return the rank for which vLLM must be built to serve the adapter."""
    return next(rank for rank in _RANKS if rank >= _config(model).r)


def why_not_served(model: PeftModel, mode: str, gather: Gather) -> str | None:
    """Return why a vLLM engine cannot serve the adapter beside the base of the policy's checkpoint; None if it may.

    The engine loads the base itself, and it must be the policy's. The shape and the first row of each weight are
    compared with those of the checkpoint. A weight without an adapter is left out if the checkpoint has it under
    another name.

    Args:
        model: A PEFT policy.
        mode: "colocate" or "server".
        gather: Returns a context in which parameters are whole, under ZeRO-3 too.
    """
    config: Any = model.active_peft_config
    if type(config) is not LoraConfig:
        return f"an adapter of {type(config).__name__} is not LoRA"
    if len(model.active_adapters) > 1:
        return f"{len(model.active_adapters)} adapters are active"
    plain = LoraConfig()
    for name in (field.name for field in fields(LoraConfig) if field.name not in _SERVED):
        value = getattr(config, name)
        if value and value != getattr(plain, name):
            return f"vLLM does not serve LoRA with {name}={value!r}"
    if config.r > _RANKS[-1]:
        return f"vLLM does not serve LoRA of rank {config.r}, but up to {_RANKS[-1]}"
    base: Any = model.get_base_model()
    if any(isinstance(layer, ParamWrapper) for site in sites(base, base) for layer in site.layers):
        return "vLLM does not serve LoRA on the joint weights of experts"
    if _is_quantised(model):
        if mode == "server":
            return "a server does not quantise its base as the policy's is"
        own = base.config.quantization_config
        if getattr(own, "load_in_8bit", False):
            return "vLLM does not quantise its base to 8 bits"
        is_4bit = getattr(own, "load_in_4bit", False)
        if is_4bit and not (own.bnb_4bit_quant_type == "nf4" and own.bnb_4bit_use_double_quant):
            return (
                "vLLM quantises with bnb_4bit_quant_type='nf4' and bnb_4bit_use_double_quant=True, and the policy has "
                f"{own.bnb_4bit_quant_type!r} and {own.bnb_4bit_use_double_quant}"
            )
    return _why_other_base(model, gather)


def adapter_state(model: PeftModel, gather: Gather) -> dict[str, Tensor]:
    """Return the active adapter's tensors, whole and on the CPU, under the names that PEFT saves."""
    name = model.active_adapters[0]
    with gather([each for path, each in model.named_parameters() if name in path.split(".")]):
        state = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
        tensors = {path.replace("_checkpoint_wrapped_module.", ""): _whole(each) for path, each in state.items()}
        return {path: each.to("cpu", copy=True).contiguous() for path, each in tensors.items()}


def save_adapter(model: PeftModel, state: dict[str, Tensor], folder: Path) -> None:
    """Write an adapter into a folder as PEFT does."""
    save_file(state, folder / "adapter_model.safetensors")
    _config(model).save_pretrained(str(folder))


def _config(model: PeftModel) -> LoraConfig:
    config = model.active_peft_config
    assert isinstance(config, LoraConfig)
    return config


def _is_quantised(model: PeftModel) -> bool:
    return bool(getattr(model.get_base_model(), "is_quantized", False))


def _whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()


def _why_other_base(model: PeftModel, gather: Gather) -> str | None:
    base: Any = model.get_base_model()
    path = base.config.name_or_path
    files = _files(path)
    if not files:
        return f"the base of the policy cannot be compared with that of the engine: {path!r} has no safetensors files"
    for site in sites(base, base):
        if site.name not in files:
            if site.layers:
                return f"{site.name} has another name in the checkpoint {path!r}, so that it cannot be compared"
            continue
        with safe_open(files[site.name], "pt") as file, gather([site.parameter]):
            there = file.get_slice(site.name)
            is_sized = site.quant_state is not None or [*site.parameter.shape] == there.get_shape()
            if not (is_sized and _begins_with(site, there[:1])):
                return f"{site.name} is not that of the checkpoint {path!r}, which the engine loads"
    return None


def _files(path: str) -> dict[str, str]:
    """Return the file of each tensor of a checkpoint."""

    def found(name: str) -> str | None:
        try:
            return cached_file(path, name, local_files_only=True)
        except OSError:  # there is no such file, or no such folder
            return None

    if (index := found(_INDEX)) is not None:
        names: dict[str, str] = json.loads(Path(index).read_text())["weight_map"]
        return {name: str(Path(index).with_name(file)) for name, file in names.items()}
    if (alone := found(_ALONE)) is None:
        return {}
    with safe_open(alone, "pt") as file:
        return dict.fromkeys(file.keys(), alone)


def _begins_with(site: Site, row: Tensor) -> bool:
    """Return whether a parameter begins with this row of the checkpoint, quantised as the parameter is."""
    parameter, state = site.parameter.detach(), site.quant_state
    if state is None or row.dtype == parameter.dtype == torch.uint8:
        own = parameter[:1]
        return own.shape == row.shape and torch.equal(own, row.to(own.device, own.dtype))
    if row.numel() % state.blocksize:
        return False
    codes, _ = quantize_4bit(
        row.to(parameter.device, state.dtype), blocksize=state.blocksize, quant_type=state.quant_type
    )
    return torch.equal(parameter.flatten()[: codes.numel()], codes.flatten())
