"""Find out whether a vLLM engine can serve the policy's adapter beside its own base, and write it as files."""

from dataclasses import fields
from typing import cast

from peft import LoraConfig, PeftModel
from peft.utils.save_and_load import get_peft_model_state_dict
from torch import Tensor
from transformers import BitsAndBytesConfig

from trl_steady.features.adapters.base_model import BaseModel, Gather
from trl_steady.trl_bridge import models

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM can be built."""
# Fields of LoraConfig with which an adapter still is two matrices a layer, of one rank and one scale. `BaseModel`
# knows which inits of these matrices have changed the base.
_SERVED = {
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version", "revision"),
    *("exclude_modules", "layers_pattern", "layers_to_transform", "target_modules", "fan_in_fan_out", "task_type"),
    *("lora_alpha", "lora_dropout", "r", "use_rslora", "runtime_config", "qalora_group_size"),
    *("init_lora_weights", "corda_config", "eva_config", "loftq_config", "lora_ga_config"),
}


def needs_adapter(model: PeftModel, mode: str) -> bool:
    """Return whether an engine cannot have merged weights, because it quantises its weights as the base is."""
    return mode == "colocate" and BaseModel(model).is_quantised


def served_rank(model: PeftModel) -> int:
    """Return the rank for which vLLM must be built to serve the adapter."""
    return next(rank for rank in _RANKS if rank >= cast(LoraConfig, model.active_peft_config).r)


def why_not_served(model: PeftModel, mode: str, gather: Gather) -> str | None:
    """Return why a vLLM engine cannot serve the adapter beside a base that it loads itself; None if it may."""
    config = model.active_peft_config
    if type(config) is not LoraConfig:
        return f"an adapter of {type(config).__name__} is not LoRA"
    if len(model.active_adapters) > 1:
        return f"{len(model.active_adapters)} adapters are active"
    for field in fields(LoraConfig):
        value = getattr(config, field.name)
        if field.name not in _SERVED and value and value != field.default:
            return f"vLLM does not serve LoRA with {field.name}={value!r}"
    if config.r > _RANKS[-1]:
        return f"vLLM does not serve LoRA of rank {config.r}, but up to {_RANKS[-1]}"
    base = BaseModel(model)
    if elsewhere := base.adapted_elsewhere:
        return f"vLLM serves LoRA in the language model only, and skips {elsewhere[0]}"
    if base.is_quantised and mode == "server":
        return "a server does not quantise its base as the policy's is"
    asked = getattr(base.model.config, "quantization_config", None)
    if isinstance(asked, BitsAndBytesConfig) and not (
        asked.load_in_4bit and asked.bnb_4bit_quant_type == "nf4" and asked.bnb_4bit_use_double_quant
    ):
        return (
            "vLLM quantises with bnb_4bit_quant_type='nf4' and bnb_4bit_use_double_quant=True, and the policy does not"
        )
    return base.why_not_checkpoint(gather)


def adapter_state(model: PeftModel, gather: Gather) -> dict[str, Tensor]:
    """Return the active adapter's tensors, whole and on the CPU, under the names that PEFT saves."""
    name = model.active_adapters[0]
    with gather([each for path, each in model.named_parameters() if name in path.split(".")]):
        state = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
        tensors = {path.replace("_checkpoint_wrapped_module.", ""): models.whole(each) for path, each in state.items()}
        return {path: each.to("cpu", copy=True).contiguous() for path, each in tensors.items()}
