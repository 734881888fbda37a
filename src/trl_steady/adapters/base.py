"""The base of a PEFT policy: the one place that knows if it still is its checkpoint, and which part of it trains."""

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import cast

import torch
from bitsandbytes.functional import quantize_4bit
from peft import LoraConfig, PeftConfig, PeftModel
from peft.utils.save_and_load import get_peft_model_state_dict
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.hub import cached_file

from trl_steady.adapters.merging import Site, sites
from trl_steady.host import models

Gather = Callable[[Sequence[Tensor]], AbstractContextManager[object]]
"""Returns a context in which parameters are whole on this process, under ZeRO-3 too. All processes enter it."""
_STARTS = ("pissa", "olora", "corda", "loftq", "lora_ga")
_INDEX, _ALONE = "model.safetensors.index.json", "model.safetensors"


def start_of(config: PeftConfig) -> str | None:
    """Return the setting with which PEFT changes the base when it makes an adapter of this configuration, or None.

    Such an adapter is right on the changed base only.
    """
    if not isinstance(config, LoraConfig):
        return None
    start = config.init_lora_weights
    if isinstance(start, str) and start.lower().startswith(_STARTS):
        return f"init_lora_weights={start!r} with r={config.r}"
    return "kasa_config" if getattr(config, "kasa_config", None) is not None else None


class Base:
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
    def start(self) -> str | None:
        """The setting of an active adapter with which PEFT has changed the base, such as PiSSA's; None without any."""
        return next(filter(None, (start_of(self._policy.peft_config[name]) for name in self._active)), None)

    @property
    def trained(self) -> dict[str, torch.nn.Parameter]:
        """Parameters of the base that train beside the adapter, by their names in the bare model.

        Copies that PEFT trains in their place (`modules_to_save`, `trainable_token_indices`) are not of the base.
        """
        found: dict[int, tuple[str, torch.nn.Parameter]] = {}
        for site in sites(self.model, self.model):
            if site.parameter is site.original and site.parameter.requires_grad:
                found.setdefault(id(site.parameter), (site.name, site.parameter))  # a tied one once
        return dict(found.values())

    @property
    def unsaved(self) -> dict[str, torch.nn.Parameter]:
        """Those parameters of `trained` that PEFT leaves out of the adapter's file."""
        if not (trained := self.trained):
            return {}
        saved = get_peft_model_state_dict(self._policy, adapter_name=self._active[0], save_embedding_layers=False)
        names = {name.removeprefix("base_model.model.").replace(".base_layer.", ".") for name in saved}
        return {name: value for name, value in trained.items() if name not in names}

    @property
    def rows(self) -> dict[str, Tensor]:
        """The first row of each weight that a start has changed, by which a resume knows the base again."""
        if self.start is None:
            return {}
        adapted = (site for site in sites(self.model, self.model) if site.layers and site.parameter.dim() == 2)
        return {f"{site.name}[0]": models.whole(site.parameter)[0].float().cpu() for site in adapted}

    @property
    def adapted_elsewhere(self) -> list[str]:
        """Adapted parameters outside the language model, as those of a vision tower."""
        config = self.model.config
        if config.get_text_config() is config:
            return []
        parts = (self.model.get_decoder(), self.model.get_output_embeddings())
        inside = {id(module) for part in parts if part is not None for module in part.modules()}
        return [site.name for site in sites(self.model, self.model) if site.layers and id(site.owner) not in inside]

    def why_not_checkpoint(self, gather: Gather) -> str | None:
        """Return why the base is not the checkpoint in `config.name_or_path`, or will not stay so; None if it is.

        The shape and the first row of each weight are compared. A weight without an adapter is left out if the
        checkpoint has it under another name.
        """
        if self.start is not None:
            return f"{self.start}: PEFT has changed the base"
        if self.trained:
            return f"{min(self.trained)} of the base trains beside the adapter"
        path = str(self.model.config.name_or_path)
        files = _files(path)
        if not files:
            return f"the policy's base cannot be compared with the engine's: {path!r} has no safetensors files"
        for site in sites(self.model, self.model):
            if site.name not in files:
                if site.layers:
                    return f"{site.name} has another name in the checkpoint {path!r}, so that it cannot be compared"
                continue
            with safe_open(files[site.name], "pt") as file, gather([site.parameter]):
                saved = file.get_slice(site.name)
                is_sized = site.quant_state is not None or [*site.parameter.shape] == saved.get_shape()
                if not (is_sized and _begins_with(site, saved[:1])):
                    return f"{site.name} is not that of the checkpoint {path!r}, which the engine loads"
        return None

    @property
    def _active(self) -> list[str]:
        return [name for name in self._policy.active_adapters if name in self._policy.peft_config]


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
        first = parameter[:1]
        return first.shape == row.shape and torch.equal(first, row.to(first.device, first.dtype))
    if row.numel() % state.blocksize:
        return False
    codes, _ = quantize_4bit(
        row.to(parameter.device, state.dtype), blocksize=state.blocksize, quant_type=state.quant_type
    )
    return torch.equal(parameter.flatten()[: codes.numel()], codes.flatten())
