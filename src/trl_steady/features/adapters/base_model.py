"""The base of a PEFT policy: the one place that knows if it still is its checkpoint, and which part of it trains."""

import copy
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

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
    if getattr(config, "kasa_config", None) is not None:
        return "kasa_config"
    return None


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
        for name in self._policy.active_adapters:
            if init := base_changing_init(self._policy.peft_config.get(name)):
                return init
        return None

    @property
    def trained(self) -> dict[str, torch.nn.Parameter]:
        """Parameters of the base that train beside the adapter, by their names in the bare model.

        Copies that PEFT trains in their place (`modules_to_save`, `trainable_token_indices`) are not of the base.
        """
        trained: dict[str, torch.nn.Parameter] = {}
        for slot in iter_weight_slots(self.model):
            if slot.parameter is slot.original and slot.parameter.requires_grad:
                trained[slot.name] = slot.parameter
        return trained

    def fingerprint(self) -> dict[str, Tensor]:
        """Return the first row of each weight that PEFT has changed; nothing without a `changing_init`.

        An init may depend on the seed or on data, and no other trace of the changed base is in a checkpoint.
        """
        if self.changing_init is None:
            return {}
        first_rows: dict[str, Tensor] = {}
        for slot in iter_weight_slots(self.model):
            if slot.layers and slot.parameter.dim() == 2:
                first_rows[f"{slot.name}[0]"] = models.whole(slot.parameter)[0].float().cpu()
        return first_rows

    @property
    def adapted_elsewhere(self) -> list[str]:
        """Adapted parameters outside the language model, as those of a vision tower."""
        config = self.model.config
        if config.get_text_config() is config:
            return []
        inside = set[int]()
        for part in (self.model.get_decoder(), self.model.get_output_embeddings()):
            if part is not None:
                inside.update(map(id, part.modules()))
        return [slot.name for slot in iter_weight_slots(self.model) if slot.layers and id(slot.owner) not in inside]

    def why_not_checkpoint(self, gather: Gather) -> str | None:
        """Return why the base is not the checkpoint in `config.name_or_path`, or will not stay so; None if it is.

        The configurations, samples of each weight, and buffers that a configuration decides are compared. A weight
        without an adapter is left out if the checkpoint has it under another name.

        The engine check would not find all of them: a first rollout shows neither new tokens nor a rotary scaling
        that acts on long contexts only.
        """
        if self.changing_init is not None:
            return f"{self.changing_init}: PEFT has changed the base"
        if self.trained:
            return f"{min(self.trained)} of the base trains beside the adapter"
        path = str(self.model.config.name_or_path)
        return self._changed_weight(path, gather) or self._changed_setting(path) or self._changed_buffers()

    def _changed_weight(self, path: str, gather: Gather) -> str | None:
        files = _files(path)
        for slot in iter_weight_slots(self.model):
            if slot.name in files:
                with safe_open(files[slot.name], "pt") as file, gather([slot.parameter]):
                    if not _is_saved(slot, file):
                        return f"{slot.name} is not that of the checkpoint {path!r}, which the engine loads"
            elif slot.layers:
                return f"{slot.name} cannot be compared: {path!r} has no such tensor in safetensors files"
        return None

    def _changed_setting(self, path: str) -> str | None:
        checkpoint = type(self.model.config).from_pretrained(path, local_files_only=True)
        ours = self.model.config.get_text_config().to_dict()
        saved = checkpoint.get_text_config().to_dict()
        for name in sorted(ours.keys() | saved.keys()):
            if ours.get(name) != saved.get(name) and not _NOT_OF_AN_ENGINE.search(name):
                return f"its config has {name}={ours.get(name)!r}, and that of {path!r} has {saved.get(name)!r}"
        return None

    def _changed_buffers(self) -> str | None:
        """Compare buffers that no file has, such as those of rotary angles, with fresh ones."""
        for name, module in self.model.named_modules():
            if not module._non_persistent_buffers_set or list(module.parameters()):
                continue
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
    files: dict[str, Path] = {}
    folder = Path(config or "").parent
    for file in folder.glob("model*.safetensors"):
        with safe_open(file, "pt") as tensors:
            files |= dict.fromkeys(tensors.keys(), file)
    return files


def _is_saved(slot: WeightSlot, file: safe_open) -> bool:
    """Return whether samples of a parameter are those of its tensor in a file.

    They are rows at equal distances, and one entry of every row: a few rows may have been trained.
    """
    saved = file.get_slice(slot.name)
    if slot.quant_state is not None and saved.get_dtype() != "U8":  # the file holds the unquantised weight
        return _is_quantised_from(slot, saved)
    parameter = slot.parameter.detach()
    shape = saved.get_shape()
    if list(parameter.shape) != shape:
        return False
    if len(shape) < 2:
        return torch.equal(parameter.cpu(), saved[...].to(parameter.dtype))
    for row in _sampled_rows(shape[0]):
        if not torch.equal(parameter[row : row + 1].cpu(), saved[row : row + 1].to(parameter.dtype)):
            return False
    middle = shape[-1] // 2
    column = (..., slice(middle, middle + 1))
    return torch.equal(parameter[column].cpu(), saved[column].to(parameter.dtype))


def _is_quantised_from(slot: WeightSlot, saved: Any) -> bool:
    """Return whether samples of a 4-bit parameter are those of an unquantised tensor, quantised in the same way."""
    parameter = slot.parameter.detach()
    state = slot.quant_state
    rows = state.blocksize  # so many rows are whole blocks
    width = saved.get_shape()[1]
    for row in _sampled_rows(saved.get_shape()[0], rows):
        values = saved[row : row + rows].to(parameter.device, state.dtype)
        codes, _ = quantize_4bit(values, blocksize=state.blocksize, quant_type=state.quant_type)
        first_byte = row * width // 2  # two codes a byte
        stored = parameter.flatten()[first_byte : first_byte + codes.numel()]
        if not torch.equal(stored, codes.flatten()):
            return False
    return True


def _sampled_rows(rows: int, unit: int = 1) -> list[int]:
    """Return rows at equal distances, from the first to the last, at multiples of `unit`."""
    return [(rows - 1) * sample // _ROWS // unit * unit for sample in range(_ROWS + 1)]
