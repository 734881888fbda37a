"""Options of a moving reference, and the tensors of adapters and of the base."""

from typing import Any

import peft
import torch

MOVING: dict[str, Any] = {
    "beta": 0.04,
    "sync_ref_model": True,
    "ref_model_mixup_alpha": 1.0,
    "ref_model_sync_steps": 3,  # a window is 4 steps
    "max_steps": 13,
}


def adapter_tensors(model: Any, name: str) -> dict[str, torch.Tensor]:
    """By PEFT's own reading of an adapter."""
    state = peft.get_peft_model_state_dict(model, adapter_name=name)
    return {key: value.detach().clone() for key, value in state.items() if "base_layer" not in key}


def base_tensors(model: Any) -> list[torch.Tensor]:
    """What is not of an adapter; bitsandbytes puts the scales of quantised weights into the state too."""
    found = [value for name, value in model.state_dict().items() if "lora_" not in name]
    return [value.detach().view(torch.uint8) if value.dtype == torch.bfloat16 else value.detach() for value in found]
