"""The models of a trainer without their wrappers, and the role that each plays."""

from itertools import pairwise
from typing import Any, Literal, cast

import torch
from accelerate.utils import DynamoBackend
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

__all__ = [
    "REFERENCE_ADAPTER",
    "REWARD_ADAPTER",
    "VALUE_ADAPTER",
    "Scorer",
    "bare",
    "compiles",
    "is_of_lora",
    "role_of",
    "text_tokenizer",
]

REFERENCE_ADAPTER = "ref"
"""Name of the adapter that TRL uses as the reference."""
REWARD_ADAPTER = "reward"
"""Name of the reward model's adapter."""
VALUE_ADAPTER = "value"
"""Name of the critic's adapter."""


class Scorer:
    """A model that scores tokens by other means than an LM head. It is called as TRL's scoring method calls a policy.

    Args:
        backbone: The model that it runs.
    """

    def __init__(self, backbone: torch.nn.Module) -> None:
        self.backbone = backbone

    def __call__(self, **batch: Any) -> Any:
        """Return outputs with one number per token as `log_probs`."""
        raise NotImplementedError


def bare(trainer: Any, model: torch.nn.Module | Scorer) -> PreTrainedModel:
    """Return the transformers model in `model`, without wrappers."""
    model = model.backbone if isinstance(model, Scorer) else model
    # keeping torch.compile's wrapper would change it: it would lose the wrapper of DDP inside
    inner = trainer.accelerator.unwrap_model(model, keep_torch_compile=False)
    return cast(PreTrainedModel, inner.get_base_model() if isinstance(inner, PeftModel) else inner)


def role_of(trainer: Any, model: Any, *, in_rollout: bool) -> Literal["old", "reference", "policy", "other"]:
    """Return the role of a model that TRL scores: see `ScoringPass`."""
    if model is trainer.ref_model and model is not None:
        return "reference"
    if not isinstance(model, torch.nn.Module) or bare(trainer, model) is not bare(trainer, trainer.model):
        return "other"
    layer = next((module for module in model.modules() if isinstance(module, BaseTunerLayer)), None)
    if layer is not None and (layer.disable_adapters or REFERENCE_ADAPTER in layer.active_adapters):
        return "reference"
    return "old" if in_rollout else "policy"


def is_of_lora(name: str, adapter: str) -> bool:
    """Return True if a parameter of this name belongs to a LoRA adapter.

    A module of the model may have the adapter's name too, as the projection `value` in many models' attention.

    >>> is_of_lora("attention.value.lora_A.value.weight", "value"), is_of_lora("attention.value.weight", "value")
    (True, False)
    """
    return any(own == adapter and before.startswith("lora_") for before, own in pairwise(name.split(".")))


def compiles(trainer: Any) -> bool:
    """Return True if the model goes through torch.compile."""
    dynamo = trainer.accelerator.state.dynamo_plugin
    return trainer.args.torch_compile or (dynamo is not None and dynamo.backend != DynamoBackend.NO)


def text_tokenizer(trainer: Any) -> PreTrainedTokenizerBase:
    """Return the tokenizer, which is part of the processor if the model reads more than text."""
    processor = trainer.processing_class
    return processor.tokenizer if isinstance(processor, ProcessorMixin) else processor
