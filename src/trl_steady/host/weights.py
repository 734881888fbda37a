"""Checks of the model in a checkpoint, and of the names under which transformers saves a model."""

import json
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

__all__ = ["not_loaded", "refuse_another_model", "saved_otherwise"]


def saved_otherwise(model: torch.nn.Module) -> list[str]:
    """Return the tensors of a transformers model that transformers saves under other names or in other shapes.

    transformers 5 fuses experts when it loads a model, and splits them when it saves it. The Trainer, however, loads a
    checkpoint by the names in memory. This function converts only names and shapes, and copies no tensor.
    """
    tensors = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    plain: Any = model
    saved = revert_weight_conversion(plain, {name: tensor.to("meta") for name, tensor in tensors.items()})
    same = {name for name in tensors.keys() & saved.keys() if tensors[name].shape == saved[name].shape}
    return not_loaded(tensors, same)


def not_loaded(tensors: dict[str, Tensor], loaded: set[str]) -> list[str]:
    """Return the names of the tensors that are neither loaded nor tied to a loaded tensor."""
    pointers = {tensors[name].data_ptr() for name in loaded}
    return [name for name, tensor in tensors.items() if name not in loaded and tensor.data_ptr() not in pointers]


def refuse_another_model(checkpoint: Path, model: torch.nn.Module) -> None:
    """Refuse to resume an adapter with a whole model, a whole model with an adapter, or another architecture.

    Raises:
        ValueError: The message names the models of the checkpoint and of this run.
    """
    # PEFT saves an adapter that is not named "default" in a folder of that name
    patterns = ("adapter_config.json", "config.json", "*/adapter_config.json")
    file = next((file for pattern in patterns for file in checkpoint.glob(pattern)), None)
    if file is None:  # shards of FSDP, which FSDP's loader compares with the model
        return
    adapter = file.name == "adapter_config.json"
    config = json.loads(file.read_text())
    is_adapted = isinstance(model, PeftModel)
    bare = model.get_base_model() if is_adapted else model
    here = type(bare).__name__.removeprefix("FSDP")  # FSDP2 adds this prefix to the name of a class
    if adapter:
        base = (config.get("auto_mapping") or {}).get("base_model_class", "").removeprefix("FSDP")
        there = base or here  # an adapter with a task_type does not name its base
        if not is_adapted:
            raise ValueError(
                f"{checkpoint} holds an adapter ({config.get('peft_type')} on {base or 'a base'}), but this run "
                f"trains the whole {here}. Give the trainer the peft_config that the run started with, or start a new "
                "run whose model is the base with the adapter merged into it."
            )
    else:
        there = ", ".join(config.get("architectures") or [here])
        if is_adapted:
            raise ValueError(
                f"{checkpoint} holds a whole model ({there}), but this run trains an adapter on {here}, whose base "
                "would keep its initial weights. Leave peft_config unset as in the run that wrote it, or start a new "
                "run with the checkpoint as its model and this peft_config."
            )
    if there != here:
        kind = "an adapter on" if adapter else "a whole"
        raise ValueError(
            f"{checkpoint} holds {kind} {there}, but the model of this run is a {here}. Give the trainer the model "
            "that the run started with, or start a new run."
        )
