"""A model with a scalar head in float32: an adapter on the policy's own base, or a model of its own.

The critic and the reward model are both one. This file knows how the model computes values and what of it is trained.
It knows no file and no option of a run.
"""

import contextlib
import functools
from collections.abc import Generator, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from types import SimpleNamespace
from typing import Any, cast

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor
from transformers import PreTrainedModel

from trl_steady.core.tensor_file import refuse_other_shapes
from trl_steady.core.types import Scorer
from trl_steady.trl_bridge import models
from trl_steady.trl_bridge.lm_head import per_token
from trl_steady.trl_bridge.models import is_lora_parameter
from trl_steady.trl_bridge.patching import patched

HEAD = "score"  # the name in transformers' models for sequence classification
HEAD_WEIGHT = f"{HEAD}.weight"
POLICY_HEAD = f"lora_{HEAD}"  # the head's name inside the PEFT policy; PEFT names what belongs to LoRA so


class ScalarHeadModel(Scorer):
    """A model that TRL's method for log-probs can call in place of a policy, with or without padding.

    The value of a token is that of the state in which it is chosen: the prompt and all tokens before it.

    Args:
        backbone: The transformers model, or the PEFT model around it, whose last hidden state the head reads.
        head: (1, H) float32, without bias.
        adapter: Name of the adapter on `backbone` with which values are computed. None: `backbone` is the model's own,
            and all of it is trained.
    """

    def __init__(self, backbone: torch.nn.Module, head: torch.nn.Linear, adapter: str | None) -> None:
        super().__init__(backbone)
        self.head, self.adapter = head, adapter
        # found once, because a model has hundreds of layers
        self._adapter_layers = [
            layer for layer in backbone.modules() if isinstance(layer, BaseTunerLayer | AuxiliaryTrainingWrapper)
        ]
        self._linear_layers = [layer for layer in self._adapter_layers if _is_linear(layer, adapter)]

    @property
    def bare(self) -> PreTrainedModel:
        """The transformers model without an adapter around it."""
        if isinstance(self.backbone, PeftModel):
            return cast(PreTrainedModel, self.backbone.get_base_model())
        return cast(PreTrainedModel, self.backbone)

    @property
    def is_fresh(self) -> bool:
        """True if nobody has trained it."""
        return not self.head.weight.any()

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield the trained parameters: those of the adapter, or of the whole model, and the head.

        Under FSDP2 these are shards, and every process must call this method.
        """
        models.reshard(self.backbone)
        body: torch.nn.Module = self.bare.base_model
        for name, parameter in body.named_parameters():
            if self.adapter is None or is_lora_parameter(name, self.adapter):
                yield name, parameter
        yield HEAD_WEIGHT, cast(torch.nn.Parameter, self.head.weight)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The trained parameters."""
        return [parameter for _, parameter in self.named_parameters()]

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, *, labels: Tensor, fused_lm_head: bool = True, **inputs: Any
    ) -> SimpleNamespace:
        """Return the values (b, l - 1) of the tokens after the first that have a label, as `log_probs`."""
        if self.adapter is None:
            hidden = self.bare.base_model(**inputs, use_cache=False).last_hidden_state
            values = self._values(hidden[:, :-1])
        else:  # run the whole model, which FSDP2 may shard
            with self._adapter_active(), ExitStack() as stack:
                for context in self._recomputation_contexts():
                    stack.enter_context(context)
                values = per_token(self.backbone, lambda head: self._values(head.hidden), labels=labels, **inputs)
        return SimpleNamespace(log_probs=values, entropy=None, aux_loss=None)

    def _values(self, hidden: Tensor) -> Tensor:
        """Return the values (...) of hidden states (..., H)."""
        with torch.autocast(hidden.device.type, enabled=False):
            dtype = torch.promote_types(self.head.weight.dtype, torch.float32)  # FSDP2 may cast the weight
            weight = self.head.weight.to(hidden.device, dtype)  # a model may be split over several GPUs
            return torch.nn.functional.linear(hidden.to(dtype), weight).squeeze(-1)

    @contextlib.contextmanager
    def _adapter_active(self) -> Generator[None]:
        """Activate the model's adapter. PEFT's own switch would change which parameters are trained."""
        before = [(layer, layer._active_adapter, layer._disable_adapters) for layer in self._adapter_layers]
        try:
            for layer in self._adapter_layers:
                layer._active_adapter = [self.adapter]
                # a layer without LoRA has no part in the adapter, and runs what it wraps only while it is disabled
                layer._disable_adapters = not isinstance(layer, LoraLayer)
            for layer in self._linear_layers:
                vars(layer)["_cast_input_dtype"] = _cast_outside_autocast
            yield
        finally:
            for layer, active_adapter, is_disabled in before:
                layer._active_adapter = active_adapter
                layer._disable_adapters = is_disabled
            for layer in self._linear_layers:
                vars(layer).pop("_cast_input_dtype", None)

    def _recomputation_contexts(self) -> Iterator[AbstractContextManager[None]]:
        """Yield contexts that let gradient checkpointing recompute layers with the model's adapter in backward."""
        name = "_gradient_checkpointing_func"

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return contextlib.nullcontext(), self._adapter_active()  # of the forward, and of its recomputation

        if not torch.is_grad_enabled():
            return
        for layer in self.bare.modules():
            if name in vars(layer):
                checkpoint = functools.partial(vars(layer)[name], use_reentrant=False, context_fn=contexts)
                yield patched(layer, {name: checkpoint})

    # its parameters

    def state(self) -> dict[str, Tensor]:
        """Return the trained parameters by name, whole and on the CPU. Under FSDP2 every process must call this."""
        return {name: models.whole(parameter).cpu().contiguous() for name, parameter in self.named_parameters()}

    def load(self, state: Mapping[str, Tensor], source: str) -> None:
        """Restore what `state` returned, or raise a ValueError. Under FSDP2 every process must call this."""
        parameters = dict(self.named_parameters())
        refuse_other_shapes(state, {name: parameter.shape for name, parameter in parameters.items()}, source)
        for name, parameter in parameters.items():
            models.assign(parameter, state[name])

    def join_policy(self) -> None:
        """Make the head a module of the PEFT policy, under a name of the adapter. FSDP2 then shards it."""
        assert self.adapter is not None
        self.backbone.add_module(POLICY_HEAD, torch.nn.ModuleDict({self.adapter: self.head}))


def _is_linear(layer: torch.nn.Module, adapter: str | None) -> bool:
    """Return True if the adapter in a layer is two products, without dropout or a variant of LoRA such as DoRA."""
    if adapter is None or not isinstance(layer, LoraLayer) or adapter in layer.lora_variant:
        return False
    if adapter not in layer.lora_A or not isinstance(layer.lora_A[adapter], torch.nn.Linear):
        return False
    return isinstance(layer.lora_dropout[adapter], torch.nn.Identity)


def _cast_outside_autocast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the input of an adapter as PEFT does, without the float32 copy that autocast would cast back."""
    if torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(dtype)
