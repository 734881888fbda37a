"""Is a saved adapter the one that a run trains? PEFT loads any other as far as its tensors have the same names."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from peft import PeftConfig, PeftModel
from peft.utils.save_and_load import get_peft_model_state_dict
from safetensors import safe_open
from torch import Tensor
from transformers.utils import CONFIG_NAME
from transformers.utils.peft_utils import ADAPTER_CONFIG_NAME, ADAPTER_SAFE_WEIGHTS_NAME

from trl_steady.core.json_values import as_json
from trl_steady.core.user_warning import warn_user
from trl_steady.features.adapters.base_model import BaseModel, base_changing_init
from trl_steady.trl_bridge.models import is_lora_parameter, keep_random_state

# fields of a configuration that act when PEFT makes an adapter, or never
_OF_THE_START = re.compile(
    "init_|(corda|eva|loftq|lora_ga)_config|auto_mapping|base_model|inference_mode|peft_version|revision|task_type"
)
# fields that say no more than the names and shapes of tensors do: a list and a pattern may mean the same modules
_OF_NAMES = re.compile("(target|exclude)_modules|layers_|modules_to_save|rank_pattern")


def adapter_settings(config: PeftConfig) -> dict[str, Any]:
    """Return as JSON what a configuration says about the meaning of an adapter's tensors."""
    acting = {name: value for name, value in config.to_dict().items() if not _OF_THE_START.match(name)}
    return as_json({**acting, "init": base_changing_init(config)})


def refuse_other_settings(
    before: Mapping[str, Any], now: Mapping[str, Any], source: Path, *, same_names: bool = True
) -> None:
    """Raise a ValueError if `adapter_settings` differ from those in `source`. Dropout may: say so."""
    changed: list[str] = []
    changed_dropout: list[str] = []
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) == now.get(name) or (same_names and _OF_NAMES.match(name)):
            continue
        line = f"\n  {name}={before.get(name)!r}; this run has {name}={now.get(name)!r}"
        if "dropout" in name:
            changed_dropout.append(line)
        else:
            changed.append(line)
    if changed:
        raise ValueError(
            f"{source} holds an adapter with{''.join(changed)}\nGive the configuration of the run that wrote it "
            "(peft_config, value_peft_config), or begin a new run from its adapter."
        )
    if changed_dropout:
        PartialState().print(f"{source} holds an adapter with{''.join(changed_dropout)}", flush=True)


def refuse_other_adapter(model: PeftModel, checkpoint: Path) -> None:
    """Raise a ValueError if a checkpoint's policy is not the model's active adapter."""
    adapter = model.active_adapters[0]  # transformers loads one
    folder = checkpoint / adapter
    if not (folder / ADAPTER_CONFIG_NAME).is_file():
        folder = checkpoint
    if not (folder / ADAPTER_CONFIG_NAME).is_file():
        if (checkpoint / CONFIG_NAME).is_file():  # DeepSpeed and FSDP would load nothing
            raise ValueError(
                f"{checkpoint} holds a whole model, and this run trains an adapter. Give the trainer the model and "
                "the peft_config that the run had."
            )
        return
    before = adapter_settings(PeftConfig.from_pretrained(str(folder)))
    now = adapter_settings(model.peft_config[adapter])
    tensors = model.state_dict()
    saved_names = set[str]()
    own_names = set[str]()
    if (folder / ADAPTER_SAFE_WEIGHTS_NAME).is_file():
        with safe_open(folder / ADAPTER_SAFE_WEIGHTS_NAME, "pt") as saved:
            saved_names = set(saved.keys())
    if saved_names:  # FSDP and DeepSpeed may have saved them in files of their own
        own_names = set(get_peft_model_state_dict(model, tensors, adapter, save_embedding_layers=False))
    # embeddings that were resized are saved too, and loaded into the base
    differing = (own_names ^ saved_names) - tensors.keys()
    before["tensors"] = sorted(differing & saved_names)[:2]
    now["tensors"] = sorted(differing & own_names)[:2]
    same_names = bool(saved_names) and own_names == saved_names
    refuse_other_settings(before, now, checkpoint, same_names=same_names)


def warn_of_other_base(config: PeftConfig, base: BaseModel, name: str) -> None:
    """Warn if an adapter was trained on a base of another name or path than the policy's."""
    trained_on = config.base_model_name_or_path
    base_path = base.model.config.name_or_path
    if trained_on and base_path and Path(trained_on).resolve() != Path(base_path).resolve():
        warn_user(
            f"the adapter {name!r} was trained on {trained_on!r}, and the base of the policy is {base_path!r}. If "
            "that is another model, its values mean nothing."
        )


def unsaved_parameters(model: PeftModel) -> list[str]:
    """Return the names of parameters that the active adapter trains, and that PEFT does not save as they are.

    PEFT saves what the networks of P-tuning give, for example, and not the networks.
    """
    adapter = model.active_adapters[0]
    others = [name for name in model.peft_config if name != adapter]
    with keep_random_state(), torch.no_grad():  # a network may have dropout
        saved = list(get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False).values())
    in_place = {(tensor.data_ptr(), tensor.shape) for tensor in saved}
    unsaved: list[str] = []
    for name, parameter in model.named_parameters():
        is_of_another = any(is_lora_parameter(name, other) for other in others)
        if not parameter.requires_grad or is_of_another or (parameter.data_ptr(), parameter.shape) in in_place:
            continue
        if not any(_ends_with(tensor, parameter) for tensor in saved):
            unsaved.append(name)
    return unsaved


def _ends_with(saved: Tensor, parameter: Tensor) -> bool:
    """Return True if a saved copy holds a parameter, perhaps behind frozen rows as a CARTRIDGE's."""
    if saved.dim() == 0 or saved.shape[1:] != parameter.shape[1:] or len(saved) < len(parameter):
        return False
    return torch.equal(saved[len(saved) - len(parameter) :].detach().cpu(), parameter.detach().cpu())
