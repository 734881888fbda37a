"""Save a model with a scalar head, and load the adapter of one, in the formats of transformers and PEFT.

This file knows files, and the names of parameters in them. It makes no model.
"""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel, TaskType
from safetensors.torch import load_file, save_file
from torch import Tensor

from trl_steady.features.adapters.saved import adapter_settings
from trl_steady.features.scalar_head.model import HEAD, HEAD_WEIGHT, POLICY_HEAD, ScalarHeadModel

_BASE_PREFIX = "base_model.model."  # before the names of a transformers model in a PEFT model
_WEIGHTS_FILE = "adapter_model.safetensors"  # PEFT's name

SavedAdapter = tuple[LoraConfig, dict[str, Tensor]]
"""The configuration and the tensors of a saved adapter."""


def model_settings(model: ScalarHeadModel) -> dict[str, Any]:
    """Return the `adapter_settings` of the model's adapter; empty without one."""
    if model.adapter is None:
        return {}
    return adapter_settings(cast(PeftModel, model.backbone).peft_config[model.adapter])


def save_pretrained(model: ScalarHeadModel, folder: Path, state: Mapping[str, Tensor] | None = None) -> None:
    """Save a model that `AutoModelForSequenceClassification` loads, or an adapter that PEFT loads on such a model.

    `state` is what `ScalarHeadModel.state` returned; None: as the model is now.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if model.adapter is None:
        with torch.no_grad():
            model.bare.get_parameter(HEAD_WEIGHT).copy_(model.head.weight)
        model.bare.save_pretrained(folder)
        return
    config, tensors = to_saved_adapter(model, state)
    config.save_pretrained(str(folder))
    save_file(tensors, folder / _WEIGHTS_FILE)


def to_saved_adapter(model: ScalarHeadModel, state: Mapping[str, Tensor] | None = None) -> SavedAdapter:
    """Return the configuration and the tensors of an adapter for sequence classification, as PEFT names them."""
    assert isinstance(model.backbone, PeftModel) and model.adapter is not None
    config = cast(LoraConfig, copy.deepcopy(model.backbone.peft_config[model.adapter]))
    config.task_type = TaskType.SEQ_CLS
    config.modules_to_save = [HEAD]
    config.inference_mode = True
    if state is None:
        state = model.state()
    return config, {entry: state[name] for name, entry in _saved_names(model).items()}


def load_adapter(folder: str | Path) -> SavedAdapter:
    """Return what `save_pretrained` or PEFT wrote for an adapter."""
    config = cast(LoraConfig, LoraConfig.from_pretrained(str(folder)))
    return config, load_file(Path(folder) / _WEIGHTS_FILE)


def restore_adapter(model: ScalarHeadModel, tensors: Mapping[str, Tensor]) -> None:
    """Give the model the tensors of a saved adapter. Raises ValueError if names or shapes differ."""
    names = {entry: name for name, entry in _saved_names(model).items()}
    state = {names.get(entry, entry): tensor for entry, tensor in tensors.items()}
    model.load(state, f"the saved adapter {model.adapter!r}")


def state_from_policy(model: ScalarHeadModel, policy_state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what `ScalarHeadModel.state` returns, taken from the whole state of the policy that the head joined."""
    state: dict[str, Tensor] = {}
    prefix = _body_prefix(model)
    for name, _ in model.named_parameters():
        entry = f"{prefix}{name}"
        if name == HEAD_WEIGHT:
            entry = f"{POLICY_HEAD}.{model.adapter}.weight"
        state[name] = policy_state[entry].cpu().contiguous()
    return state


def rename_adapter(name: str, adapter: str, other: str) -> str:
    """Return the name of a parameter with another adapter's name in it, or with none if `other` is empty."""
    parts: list[str] = []
    before = ""
    for part in name.split("."):
        if part != adapter or not before.startswith("lora_"):
            parts.append(part)
        elif other:
            parts.append(other)
        before = part
    return ".".join(parts)


def _saved_names(model: ScalarHeadModel) -> dict[str, str]:
    """Return the name of each parameter in the file of PEFT for sequence classification."""
    assert model.adapter is not None
    names: dict[str, str] = {}
    prefix = _body_prefix(model)
    for name, _ in model.named_parameters():
        entry = f"{prefix}{rename_adapter(name, model.adapter, '')}"
        if "lora_magnitude_vector" in entry:  # DoRA's, saved without ".weight"
            entry = entry.removesuffix(".weight")
        names[name] = entry
    names[HEAD_WEIGHT] = f"{_BASE_PREFIX}{HEAD_WEIGHT}"
    return names


def _body_prefix(model: ScalarHeadModel) -> str:
    """Return the text before the name of a parameter of the body in the state of a PEFT model."""
    return f"{_BASE_PREFIX}{model.bare.base_model_prefix}."
