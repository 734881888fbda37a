"""Adapters and quantised bases: their precision, their gradients, and what is sent to an engine."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from accelerate.utils import DistributedType
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils.peft_utils import ADAPTER_CONFIG_NAME

from trl_steady.config.shared import SharedOptions
from trl_steady.core.engine import NamedWeights
from trl_steady.core.feature import Feature
from trl_steady.core.types import Construction
from trl_steady.features.adapters.base_model import BaseModel
from trl_steady.features.adapters.merging import merged_weights
from trl_steady.features.adapters.precision import (
    keep_cpu_weights_unpacked,
    keep_in_float32,
    lost_to_rounding,
    refuse_unscalable,
)
from trl_steady.features.adapters.saved import refuse_other_adapter, unsaved_parameters
from trl_steady.features.adapters.vllm_sync import LoraSync, needs_adapter
from trl_steady.trl_bridge.models import REFERENCE_ADAPTER
from trl_steady.trl_bridge.trl_state import request_weight_sync

_FINGERPRINT_FILE = "changed_base.safetensors"  # in a checkpoint


class Adapters(Feature):
    """Keeps a quantised policy trainable, its adapters in the asked dtype, and its base unchanged by an engine."""

    args: SharedOptions
    _why_not_saved: str | None = None
    """Why a checkpoint does not hold the adapter that trains; None if it does."""

    def around_init(self, construction: Construction, call_next: Callable[[Construction], None]) -> None:
        """Keep the values of a loaded adapter, which TRL's constructor casts to bf16."""
        model = construction.model
        self._loaded: dict[str, Tensor] = {}
        if self.args.adapter_dtype is not None and isinstance(model, PeftModel):
            self._loaded = {name: p.data for name, p in model.named_parameters() if p.requires_grad}
        call_next(construction)

    def on_init_end(self) -> None:
        """Set dtypes and gradients of the policy, and refuse what would train nothing."""
        trainer = self.trainer
        model = trainer.model
        args = self.args
        if args.adapter_dtype is not None:
            keep_in_float32(model, self._loaded, args.deepspeed_plugin)
        self._loaded = {}
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError(
                "the model has no trainable parameter. Set requires_grad=True on some, or load the adapter with "
                "is_trainable=True."
            )
        if trainer.accelerator.scaler is not None and not trainer.is_fsdp_enabled:  # accelerate casts them for FSDP
            trained = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
            refuse_unscalable(trained, trainer.accelerator.device)
        keep_cpu_weights_unpacked(model)
        if message := lost_to_rounding(model, args.learning_rate):
            self.warn(message)
        if isinstance(model, PeftModel):
            self._active = list(model.active_adapters)
            self._check_base(model)
            self._check_saved(model)
        elif trainer.use_vllm and args.vllm_adapter_sync:
            self.refuse("vllm_adapter_sync=True", "the policy has no adapter", "Give peft_config.")
        if not trainer.use_vllm or not isinstance(model, PeftModel):
            return
        if args.vllm_adapter_sync is False and needs_adapter(model, trainer.vllm_mode):
            raise ValueError(
                "vllm_adapter_sync=False: vllm_mode='colocate' quantises the engine like the base, and it cannot take "
                "merged weights. Leave it unset, or serve the unquantised model and set vllm_mode='server'."
            )
        sync = getattr(trainer.vllm_generation, "active_sync", None)
        if sync is None:  # the engine has not taken the adapter
            trainer.vllm_generation.replace_weights(functools.partial(self._merged, model))

    def make_adapter_sync(self, args: SharedOptions) -> LoraSync | None:
        """Return how the adapter is sent alone, or None if the user wants merged weights.

        The engine, `SteadyGeneration` in `trl_bridge/vllm.py`, calls what this method returns.
        """
        asked = args.vllm_adapter_sync
        if not args.use_vllm or asked is False:
            return None
        return LoraSync(asked, Path(args.output_dir or ""))

    def _merged(self, model: PeftModel, trl_weights: NamedWeights) -> Iterator[tuple[str, Tensor]]:
        """Yield merged weights, computed beside the policy.

        Under FSDP, and for adapters that cannot be merged on the side, TRL merges into the policy's own weights.
        """
        trainer = self.trainer
        is_quantised = BaseModel(model).is_quantised
        if is_quantised or trainer.accelerator.distributed_type != DistributedType.FSDP:
            with trainer.vllm_generation.gathered(list(model.parameters())):
                try:
                    weights = merged_weights(model)
                except ValueError as error:
                    if is_quantised:  # TRL cannot merge into its weights either
                        raise
                    self.warn(f"each push to vLLM changes the policy's base by rounding: {error}")
                else:
                    yield from weights
                    return
        for name, weight in trl_weights():
            if REFERENCE_ADAPTER not in name.split("."):
                yield name, weight

    # a base that trains, or that PEFT has changed

    def _check_base(self, model: PeftModel) -> None:
        """Warn of biases that train beside the adapter, and refuse other parameters, which PEFT does not save."""
        trained = BaseModel(model).trained
        if not trained:
            return
        finding = f"{len(trained)} parameters of the base train beside the adapter, for example {min(trained)}"
        instead = "list their modules in modules_to_save of peft_config"
        saves_biases = getattr(model.active_peft_config, "bias", "none") != "none"
        if not saves_biases or not all(name.endswith("bias") for name in trained):
            raise ValueError(f"{finding}, and PEFT does not save them. Freeze them, or {instead}.")
        self.warn(f"{finding}. A reference on this base changes with them. To avoid this, {instead}.")

    def _check_saved(self, model: PeftModel) -> None:
        """Warn of a kind of adapter that cannot be resumed, because PEFT does not save all that it trains."""
        if self.trainer.is_deepspeed_enabled:  # which saves every parameter that trains
            return
        unsaved = unsaved_parameters(model)
        if not unsaved:
            return
        kind = getattr(model.active_peft_config.peft_type, "value", None)  # of an enumeration
        self._why_not_saved = (
            f"PEFT does not save {len(unsaved)} of the parameters that {kind} trains, for example {min(unsaved)}"
        )
        if self.args.load_best_model_at_end:
            self.refuse("load_best_model_at_end=True", self._why_not_saved, "Leave it unset, or train another kind.")
        if self.args.save_strategy != "no":
            self.warn(
                f"{self._why_not_saved}. This run cannot be resumed. To be able to, train another kind, as LoRA."
            )

    def on_train_begin(self) -> None:
        """Let the engine get the policy, because the steps of a training count from 0 again."""
        request_weight_sync(self.trainer)

    def on_train_end(self, best: Path | None) -> None:
        """Let the engine get the policy, which may be the best one now. Refuse a best one of another adapter."""
        if best is not None and isinstance(model := self._policy, PeftModel):
            refuse_other_adapter(model, best)
        request_weight_sync(self.trainer)

    def save_state(self, checkpoint: Path) -> None:
        """Save how to know a changed base again, and the adapter's configuration, which FSDP's shards lack."""
        fingerprint = self._fingerprint()
        model = self._policy
        if fingerprint and self.args.should_save:
            save_file(fingerprint, checkpoint / _FINGERPRINT_FILE)
        has_config = any(checkpoint.glob(f"**/{ADAPTER_CONFIG_NAME}"))
        if isinstance(model, PeftModel) and self.args.should_save and not has_config:
            model.peft_config[model.active_adapters[0]].save_pretrained(str(checkpoint))

    def load_state(self, checkpoint: Path) -> None:
        """Refuse a checkpoint of a run on another base, of another adapter, or of several active adapters."""
        model = self._policy
        if self._why_not_saved is not None:
            raise ValueError(
                f"{checkpoint} cannot be resumed: {self._why_not_saved}. Begin a new run, with another kind, as LoRA."
            )
        if isinstance(model, PeftModel) and model.active_adapters != self._active:
            raise ValueError(
                f"the active adapters of the policy were {self._active}, and transformers keeps the first only. Merge "
                "the others into the base before you train."
            )
        if not self._has_base_of(checkpoint / _FINGERPRINT_FILE):
            raise ValueError(
                f"PEFT has made another base than in {checkpoint}, as init_lora_weights asks it to. Give the same "
                "peft_config, and set the same seed before you make the adapter; or begin a new run."
            )
        if isinstance(model, PeftModel):
            refuse_other_adapter(model, checkpoint)

    @property
    def _policy(self) -> torch.nn.Module:
        return self.trainer.accelerator.unwrap_model(self.trainer.model, keep_torch_compile=False)

    def _fingerprint(self) -> dict[str, Tensor]:
        """Return the base's fingerprint, on all processes, which gather it."""
        model = self._policy
        if not isinstance(model, PeftModel):
            return {}
        return BaseModel(model).fingerprint()

    def _has_base_of(self, fingerprint_file: Path) -> bool:
        now = self._fingerprint()
        before: dict[str, Tensor] = {}
        if fingerprint_file.is_file():
            before = load_file(fingerprint_file)
        if now.keys() != before.keys():
            return False
        # another machine rounds otherwise, by less than this
        return not any((row - before[name]).abs().max() > 0.02 * row.abs().max() for name, row in now.items())
