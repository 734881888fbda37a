"""The base of a PEFT policy: the one place that knows if it still is its checkpoint, and which part of it trains."""

import copy
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import cast

import torch
from bitsandbytes.functional import quantize_4bit
from peft import LoraConfig, PeftConfig, PeftModel
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import CONFIG_NAME
from transformers.utils.hub import cached_file

from trl_steady.features.adapters.weight_slots import WeightSlot, iter_weight_slots
from trl_steady.trl_bridge import models

Gather = Callable[[Sequence[Tensor]], AbstractContextManager[object]]
"""Returns a context in which parameters are whole on this process, under ZeRO-3 too. All processes enter it."""
_ROWS = 16  # of a weight that are compared with a checkpoint
# what of a configuration does not change what an engine computes
_NOT_OF_AN_ENGINE = re.compile("^_|token_ids?$|dtype|cache|drop|^output_|aux_loss|quantization|architectures|version")
_BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")


def base_changing_init(config: PeftConfig | None) -> str | None:
    """Return the setting with which PEFT changes the base when it makes an adapter of this configuration, or None.

    Such an adapter is right on the changed base only.
    """
    if not isinstance(config, LoraConfig):
        return None
    init = config.init_lora_weights
    if isinstance(init, str) and init.lower().startswith(_BASE_CHANGING_INITS):
        return f"init_lora_weights={init!r} with r={config.r}"
    return "kasa_config" if getattr(config, "kasa_config", None) is not None else None


class BaseModel:
    """The model under the adapters of a policy. Reference, critic and reward model share it; an engine has a copy.

    Args:
        policy: A PEFT model with any adapter.
    """

    def __init__(self, policy: PeftModel) -> None:
        self.model = cast(PreTrainedModel, policy.get_base_model())
        self._policy = policy

    @property
    def is_quantised(self) -> bool:
        """True if the weights are stored in fewer bits than they are computed with."""
        return bool(getattr(self.model, "is_quantized", False))

    @property
    def changing_init(self) -> str | None:
        """The `base_changing_init` of an active adapter, such as PiSSA's; None without any."""
        configs = map(self._policy.peft_config.get, self._policy.active_adapters)
        return next(filter(None, map(base_changing_init, configs)), None)

    @property
    def trained(self) -> dict[str, torch.nn.Parameter]:
        """Parameters of the base that train beside the adapter, by their names in the bare model.

        Copies that PEFT trains in their place (`modules_to_save`, `trainable_token_indices`) are not of the base.
        """
        slots = (slot for slot in iter_weight_slots(self.model) if slot.parameter is slot.original)
        return {slot.name: slot.parameter for slot in slots if slot.parameter.requires_grad}

    def fingerprint(self) -> dict[str, Tensor]:
        """Return the first row of each weight that PEFT has changed; nothing without a `changing_init`.

        An init may depend on the seed or on data, and no other trace of the changed base is in a checkpoint.
        """
        if self.changing_init is None:
            return {}
        adapted = (slot for slot in iter_weight_slots(self.model) if slot.layers and slot.parameter.dim() == 2)
        return {f"{slot.name}[0]": models.whole(slot.parameter)[0].float().cpu() for slot in adapted}

    @property
    def adapted_elsewhere(self) -> list[str]:
        """Adapted parameters outside the language model, as those of a vision tower."""
        config = self.model.config
        if config.get_text_config() is config:
            return []
        parts = (self.model.get_decoder(), self.model.get_output_embeddings())
        inside = {id(module) for part in parts if part is not None for module in part.modules()}
        return [slot.name for slot in iter_weight_slots(self.model) if slot.layers and id(slot.owner) not in inside]

    def why_not_checkpoint(self, gather: Gather) -> str | None:
        """Return why the base is not the checkpoint in `config.name_or_path`, or will not stay so; None if it is.

        The configurations, samples of each weight, and buffers that a configuration decides are compared. A weight
        without an adapter is left out if the checkpoint has it under another name.
        """
        if self.changing_init is not None:
            return f"{self.changing_init}: PEFT has changed the base"
        if self.trained:
            return f"{min(self.trained)} of the base trains beside the adapter"
        path = str(self.model.config.name_or_path)
        files = _files(path)
        for slot in iter_weight_slots(self.model):
            if slot.name in files:
                with safe_open(files[slot.name], "pt") as file, gather([slot.parameter]):
                    if not _is_saved(slot, file):
                        return f"{slot.name} is not that of the checkpoint {path!r}, which the engine loads"
            elif slot.layers:
                return f"{slot.name} cannot be compared: {path!r} has no such tensor in safetensors files"
        configs = (self.model.config, type(self.model.config).from_pretrained(path, local_files_only=True))
        own, saved = (config.get_text_config().to_dict() for config in configs)
        for name in sorted(own.keys() | saved.keys()):
            if own.get(name) != saved.get(name) and not _NOT_OF_AN_ENGINE.search(name):
                return f"its config has {name}={own.get(name)!r}, and that of {path!r} has {saved.get(name)!r}"
        for name, module in self.model.named_modules():  # buffers that no file has, such as those of rotary angles
            if module._non_persistent_buffers_set and not [*module.parameters()]:
                fresh = copy.deepcopy(module)
                self.model._init_weights(fresh)
                if not all(map(torch.allclose, module.buffers(), fresh.buffers())):
                    return f"buffers of {name} are not those that its config gives"
        return None


def _files(path: str) -> dict[str, Path]:
    """Return the file of each tensor of a checkpoint, none if it has no safetensors files."""
    try:
        config = cached_file(path, CONFIG_NAME, local_files_only=True)
    except OSError:  # there is no such folder
        return {}
    found: dict[str, Path] = {}
    for path_of_file in Path(config or "").parent.glob("model*.safetensors"):
        with safe_open(path_of_file, "pt") as file:
            found |= dict.fromkeys(file.keys(), path_of_file)
    return found


def _is_saved(slot: WeightSlot, file: safe_open) -> bool:
    """Return whether samples of a parameter are those of its tensor in a file, quantised as the parameter is.

    They are rows at equal distances, and one entry of every row: a few rows may have been trained.
    """
    parameter, saved = slot.parameter.detach(), file.get_slice(slot.name)
    state = None if saved.get_dtype() == "U8" else slot.quant_state
    shape, unit = saved.get_shape(), 1 if state is None else state.blocksize  # so many rows are whole blocks
    rows = [slice(row, row + unit) for i in range(_ROWS + 1) for row in [(shape[0] - 1) * i // _ROWS // unit * unit]]
    if state is None:
        parts = [*rows, (..., slice(shape[-1] // 2, shape[-1] // 2 + 1))] if len(shape) > 1 else [...]
        same = (torch.equal(parameter[part].cpu(), saved[part].to(parameter.dtype)) for part in parts)
        return [*parameter.shape] == shape and all(same)
    for part in rows:
        values = saved[part].to(parameter.device, state.dtype)
        codes, _ = quantize_4bit(values, blocksize=unit, quant_type=state.quant_type)
        if not torch.equal(parameter.flatten()[part.start * shape[1] // 2 :][: codes.numel()], codes.flatten()):
            return False
    return True
