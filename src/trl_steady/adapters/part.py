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
from transformers import TrainerCallback

from trl_steady.adapters.base import Base
from trl_steady.adapters.merging import merged_weights
from trl_steady.adapters.precision import (
    cast_undone,
    keep_gradients_on_cpu,
    keep_in_float32,
    warn_if_steps_round_away,
)
from trl_steady.adapters.serving import adapter_state, needs_adapter, save_adapter, served_rank, why_not_served
from trl_steady.host.engine import NamedWeights, push, whole
from trl_steady.host.lora import AdapterSync
from trl_steady.host.models import REFERENCE_ADAPTER, REWARD_ADAPTER, VALUE_ADAPTER, is_of_lora
from trl_steady.host.names import forget_sync
from trl_steady.host.part import Part, Turn

__all__ = ["BASE_FILE", "AdapterPart"]

BASE_FILE = "trained_base.safetensors"
"""File beside an adapter with the parameters of the base that train and that PEFT does not save."""


class _Ends(TrainerCallback):
    """Lets an engine get the policy when a training begins, whose steps count from 0, and when the best is loaded."""

    def __init__(self, part: "AdapterPart") -> None:
        self._part = part

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        forget_sync(self._part.trainer)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            self._part.load(Path(state.best_model_checkpoint))
        forget_sync(self._part.trainer)


class AdapterPart(Part):
    """Keeps a quantised policy trainable, its adapters in the asked dtype, and its base unchanged by an engine."""

    window_options = (("adapter_dtype", None), ("vllm_adapter_sync", "use_vllm"))

    @contextlib.contextmanager
    def building(self, model: Any, args: Any) -> Iterator[None]:
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
                "the model has no trainable parameter, so that training would change nothing. Set "
                "requires_grad=True on some, or load a PEFT adapter with PeftModel.from_pretrained(..., "
                "is_trainable=True)."
            )
        keep_gradients_on_cpu(model)
        warn_if_steps_round_away(model, args.learning_rate)
        self._warn_of_base()
        trainer.add_callback(_Ends(self))
        if not trainer.use_vllm:
            return
        if not isinstance(model, PeftModel):
            if args.vllm_adapter_sync:
                raise ValueError(
                    "vllm_adapter_sync=True: the policy has no adapter. Give peft_config, or leave it unset."
                )
            return
        if args.vllm_adapter_sync is False and needs_adapter(model, trainer.vllm_mode):
            raise ValueError(
                "vllm_adapter_sync=False: vllm_mode='colocate' quantises the engine like the base, and cannot take "
                "weights with the adapter merged. Leave vllm_adapter_sync unset; or serve the unquantised model with "
                "`vllm serve` and set vllm_mode='server'; or set use_vllm=False."
            )
        if getattr(trainer.vllm_generation, "adapter", None) is None:
            push(trainer.vllm_generation, functools.partial(self._merged, model))

    def adapter_sync(self, args: Any) -> AdapterSync | None:
        """Send the adapter alone, unless the user wants merged weights."""
        asked = args.vllm_adapter_sync
        if not args.use_vllm or asked is False:
            return None
        return AdapterSync(
            option=f"vllm_adapter_sync={asked}",
            is_required=lambda model, mode: asked or needs_adapter(model, mode),
            why_not=why_not_served,
            rank=served_rank,
            state=adapter_state,
            save=save_adapter,
            folder=Path(args.output_dir),
        )

    def _merged(self, model: PeftModel, own: NamedWeights) -> Iterator[tuple[str, Tensor]]:
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
        for name, weight in own():
            others = is_of_lora(name, VALUE_ADAPTER) or is_of_lora(name, REWARD_ADAPTER)
            if REFERENCE_ADAPTER not in name.split(".") and not others:
                yield name, weight

    # parameters of the base that train

    def _unsaved(self) -> dict[str, Tensor]:
        model: Any = self.trainer.accelerator.unwrap_model(self.trainer.model)
        return {**Base(model).unsaved} if isinstance(model, PeftModel) else {}

    def _warn_of_base(self) -> None:
        args, plugin = self.trainer.args, self.trainer.args.deepspeed_plugin
        if not (unsaved := self._unsaved()):
            return
        what = f"{len(unsaved)} parameters of the base train beside the adapter, for example {min(unsaved)}. PEFT does"
        if self.trainer.is_fsdp_enabled or (plugin is not None and plugin.zero_stage == 3):
            why_not = "are sharded. Use DDP"
        elif args.load_best_model_at_end and args.save_only_model:
            why_not = "would not return with load_best_model_at_end=True. Set save_only_model=False"
        else:
            warnings.warn(
                f"{what} not save them: the trainer writes them to {BASE_FILE} beside the adapter. A reference on "
                "this base changes with them. List their modules in modules_to_save of peft_config to avoid both.",
                UserWarning,
                stacklevel=2,
            )
            return
        raise ValueError(f"{what} not save them, and they {why_not}, or list their modules in modules_to_save.")

    @contextlib.contextmanager
    def saving(self, folder: Path | None) -> Iterator[None]:
        """Write the trained parameters of the base beside the adapter."""
        yield
        if folder is not None and self.trainer.args.should_save and (unsaved := self._unsaved()):
            save_file({name: own.detach().cpu().contiguous() for name, own in unsaved.items()}, folder / BASE_FILE)

    def save(self, checkpoint: Path) -> None:
        """Save the trained parameters of the base."""
        with self.saving(checkpoint):
            pass

    def loading(self, checkpoint: Path) -> AbstractContextManager[None]:
        """Refuse a checkpoint of a run that trained other parameters of the base, or of several active adapters."""
        model: Any = self.trainer.accelerator.unwrap_model(self.trainer.model)
        if isinstance(model, PeftModel) and len(model.active_adapters) > 1:
            raise ValueError(
                f"the active adapters of the policy are {model.active_adapters}, and transformers loads the first "
                f"only. Merge the others into the base before you train, or begin a new run from {checkpoint}."
            )
        unsaved, there = self._unsaved(), load_file(file) if (file := checkpoint / BASE_FILE).is_file() else {}
        if other := unsaved.keys() ^ there.keys():
            raise ValueError(
                f"{checkpoint} has {len(there)} trained parameters of the base ({BASE_FILE}), and this run trains "
                f"{len(unsaved)}: they differ in {min(other)}. Train those of that run, or begin a new one."
            )
        return contextlib.nullcontext()

    def load(self, checkpoint: Path) -> None:
        """Restore the trained parameters of the base."""
        if unsaved := self._unsaved():
            for name, tensor in load_file(checkpoint / BASE_FILE).items():
                unsaved[name].data.copy_(tensor)

    def generating(self, turn: Turn) -> AbstractContextManager[None]:
        """Undo TRL's cast of the model for continuous batching, which would change the trained policy."""
        args = self.trainer.args
        is_ours = args.adapter_dtype is not None or args.sync_ref_model
        if is_ours and args.use_transformers_continuous_batching:
            return cast_undone(self.trainer.model)  # old log-probs must be those of the trained policy
        return contextlib.nullcontext()
