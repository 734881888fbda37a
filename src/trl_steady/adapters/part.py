"""Adapters and quantised bases as a part: their precision, their gradients, and what is sent to an engine."""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from peft import PeftModel

from trl_steady.adapters.merging import merged_weights
from trl_steady.adapters.precision import (
    cast_undone,
    keep_gradients_on_cpu,
    keep_in_float32,
    warn_if_steps_round_away,
)
from trl_steady.host.engine import push
from trl_steady.host.models import REFERENCE_ADAPTER
from trl_steady.host.part import Part, Turn

__all__ = ["AdapterPart"]


class AdapterPart(Part):
    """Keeps a quantised policy trainable, its adapters in the asked dtype, and its base unchanged by an engine."""

    window_options = (("adapter_dtype", None),)

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
        if trainer.use_vllm and isinstance(model, PeftModel):
            self._leave_base_alone(model)

    def _leave_base_alone(self, model: PeftModel) -> None:
        """Keep a push to vLLM from changing a quantised base, and from sending the modules of the reference."""
        quantised = getattr(model.get_base_model(), "is_quantized", False)
        if quantised and self.trainer.vllm_mode == "colocate":
            raise ValueError(
                "vllm_mode='colocate' quantises the engine like the base, and cannot take weights with the adapter "
                "merged. Serve the unquantised model with `vllm serve` and set vllm_mode='server', or "
                "use_vllm=False."
            )
        if quantised:
            push(self.trainer.vllm_generation, lambda own: merged_weights(model))
        elif self.trainer.args.sync_ref_model:
            push(
                self.trainer.vllm_generation,
                lambda own: (pair for pair in own() if REFERENCE_ADAPTER not in pair[0].split(".")),
            )

    def generating(self, turn: Turn) -> AbstractContextManager[None]:
        """Undo TRL's cast of the model for continuous batching, which would change the trained policy."""
        args = self.trainer.args
        is_ours = args.adapter_dtype is not None or args.sync_ref_model
        if is_ours and args.use_transformers_continuous_batching:
            return cast_undone(self.trainer.model)  # old log-probs must be those of the trained policy
        return contextlib.nullcontext()
