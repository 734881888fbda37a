"""Adapters and quantised bases as a part: their precision, their gradients, and what is sent to an engine."""

import contextlib
import functools
import itertools
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from accelerate.utils import DistributedType
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from trl_steady.adapters.base import Base
from trl_steady.adapters.merging import merged_weights
from trl_steady.adapters.precision import (
    keep_gradients_on_cpu,
    keep_in_float32,
    warn_if_steps_round_away,
)
from trl_steady.adapters.sending import LoraSync
from trl_steady.adapters.serving import needs_adapter
from trl_steady.host.engine import NamedWeights, push, whole
from trl_steady.host.models import REFERENCE_ADAPTER, REWARD_ADAPTER, VALUE_ADAPTER, is_of_lora
from trl_steady.host.names import forget_sync
from trl_steady.host.part import Part

BASE_FILE = "trained_base.safetensors"
"""File beside an adapter with the parameters of the base that train and that PEFT does not save."""
_ROWS_FILE = "changed_base.safetensors"  # of a checkpoint


class AdapterPart(Part):
    """Keeps a quantised policy trainable, its adapters in the asked dtype, and its base unchanged by an engine."""

    window_options = (("adapter_dtype", None), ("vllm_adapter_sync", "use_vllm"))

    @contextlib.contextmanager
    def building(self, model: object, args: Any) -> Iterator[None]:
        """Keep the values of a loaded adapter, which TRL's constructor casts to bf16."""
        self._loaded = {}
        if args.adapter_dtype is not None and isinstance(model, PeftModel):
            self._loaded = {name: p.data for name, p in model.named_parameters() if p.requires_grad}
        yield

    def built(self) -> None:
        """Set dtypes and gradients of the policy, and refuse what would train nothing."""
        trainer, model, args = self.trainer, self.trainer.model, self.trainer.args
        if args.adapter_dtype is not None:
            keep_in_float32(model, self._loaded, args.deepspeed_plugin)
        self._loaded = {}
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError(
                "the model has no trainable parameter. Set requires_grad=True on some, or load a PEFT adapter with "
                "PeftModel.from_pretrained(..., is_trainable=True)."
            )
        keep_gradients_on_cpu(model)
        warn_if_steps_round_away(model, args.learning_rate)
        self._warn_of_base()
        if not trainer.use_vllm:
            return
        if not isinstance(model, PeftModel):
            if args.vllm_adapter_sync:
                raise ValueError("vllm_adapter_sync=True: the policy has no adapter. Give peft_config.")
            return
        if args.vllm_adapter_sync is False and needs_adapter(model, trainer.vllm_mode):
            raise ValueError(
                "vllm_adapter_sync=False: vllm_mode='colocate' quantises the engine like the base, and cannot take "
                "weights with the adapter merged. Leave vllm_adapter_sync unset; or serve the unquantised model with "
                "`vllm serve` and set vllm_mode='server'; or set use_vllm=False."
            )
        if getattr(trainer.vllm_generation, "adapter", None) is None:
            push(trainer.vllm_generation, functools.partial(self._merged, model))

    def adapter_sync(self, args: Any) -> LoraSync | None:
        """Send the adapter alone, unless the user wants merged weights."""
        asked = args.vllm_adapter_sync
        if not args.use_vllm or asked is False:
            return None
        return LoraSync(asked, Path(args.output_dir))

    def _merged(self, model: PeftModel, trls: NamedWeights) -> Iterator[tuple[str, Tensor]]:
        """Yield merged weights, computed beside the policy.

        TRL merges into the policy's own weights and subtracts again. That leaves rounding errors in a bf16 base, and
        requantises a quantised one. Under FSDP, and for adapters that cannot be merged on the side, TRL does it still.
        """
        trainer, is_quantised = self.trainer, Base(model).is_quantised
        if is_quantised or trainer.accelerator.distributed_type != DistributedType.FSDP:
            with whole(trainer.vllm_generation, list(model.parameters())):
                try:
                    weights = merged_weights(model)
                    first = next(weights)
                except ValueError as error:
                    if is_quantised:
                        raise
                    warnings.warn(
                        f"each push to vLLM changes the policy's base by rounding: {error}", UserWarning, stacklevel=2
                    )
                else:
                    weights = itertools.chain(iter([first]), weights)
                    del first  # or it would stay on the GPU until all weights are sent
                    yield from weights
                    return
        for name, weight in trls():
            others = is_of_lora(name, VALUE_ADAPTER) or is_of_lora(name, REWARD_ADAPTER)
            if REFERENCE_ADAPTER not in name.split(".") and not others:
                yield name, weight

    # a base that trains, or that a start has changed

    @property
    def _base(self) -> Base | None:
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        return Base(model) if isinstance(model, PeftModel) else None

    def _warn_of_base(self) -> None:
        args, plugin = self.trainer.args, self.trainer.args.deepspeed_plugin
        if self._base is None or not (trained := self._base.trained):
            return
        what = f"{len(trained)} parameters of the base train beside the adapter, for example {min(trained)}."
        instead = "list their modules in modules_to_save of peft_config"
        if unsaved := self._base.unsaved:
            what += f" PEFT does not save {len(unsaved)} of them,"
            is_sharded = self.trainer.is_fsdp_enabled or (plugin is not None and plugin.zero_stage == 3)
            if is_sharded or args.save_only_model:
                raise ValueError(f"{what} nor does FSDP, ZeRO-3 or save_only_model=True. Use neither, or {instead}.")
            what += f" so the trainer writes them to {BASE_FILE} beside it."
        if args.has_reference:
            what += " A reference on this base changes with them."
        warnings.warn(f"{what} To avoid this, {instead}.", UserWarning, stacklevel=2)

    def beginning(self) -> None:
        """Let the engine get the policy, because the steps of a training count from 0 again."""
        forget_sync(self.trainer)

    def ending(self, best: Path | None) -> None:
        """Load the base of the best checkpoint, and let the engine get the policy."""
        if best is not None:
            self.load(best)
        forget_sync(self.trainer)

    @contextlib.contextmanager
    def saving(self, folder: Path | None) -> Iterator[None]:
        """Write the trained parameters of the base beside the adapter."""
        yield
        if folder is not None and self.trainer.args.should_save and self._base is not None:
            unsaved = {name: value.detach().cpu().contiguous() for name, value in self._base.unsaved.items()}
            if unsaved:
                save_file(unsaved, folder / BASE_FILE)

    def save(self, checkpoint: Path) -> None:
        """Save the trained parameters of the base, and how to know a changed base again."""
        with self.saving(checkpoint):
            pass
        rows = {} if self._base is None else self._base.rows  # on all processes, which gather them
        if rows and self.trainer.args.should_save:
            save_file(rows, checkpoint / _ROWS_FILE)

    def loading(self, checkpoint: Path) -> AbstractContextManager[None]:
        """Refuse a checkpoint of a run on another base, or of several active adapters."""
        if (base := self._base) is None:
            return contextlib.nullcontext()
        reasons: list[str] = []
        if len(active := self.trainer.accelerator.unwrap_model(self.trainer.model).active_adapters) > 1:
            reasons.append(
                f"the active adapters of the policy are {active}, and transformers loads the first only. Merge the "
                "others into the base before you train"
            )
        rows = base.rows
        for kind, tensors, name in (("train", base.unsaved, BASE_FILE), ("were changed", rows, _ROWS_FILE)):
            saved = load_file(file) if (file := checkpoint / name).is_file() else {}
            if other := tensors.keys() ^ saved.keys():
                reasons.append(
                    f"{checkpoint} has {len(saved)} parameters of the base that {kind} ({name}), and this run has "
                    f"{len(tensors)}: they differ in {min(other)}"
                )
            elif name == _ROWS_FILE:
                # another machine rounds otherwise, by less than this
                far = [key for key, row in rows.items() if (row - saved[key]).abs().max() > 0.02 * row.abs().max()]
                if far:
                    reasons.append(
                        f"{base.start}: PEFT has made another base than in {checkpoint}, for example {far[0]}. Its "
                        "start is random. Set a seed before you make the adapter"
                    )
        if reasons:
            raise ValueError(f"{reasons[0]}. Give the model and the peft_config of that run, or begin a new run.")
        return contextlib.nullcontext()

    def load(self, checkpoint: Path) -> None:
        """Restore the trained parameters of the base."""
        if self._base is not None and (unsaved := self._base.unsaved):
            saved = load_file(checkpoint / BASE_FILE)
            for name, parameter in unsaved.items():
                parameter.data.copy_(saved[name])
