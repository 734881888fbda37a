"""The reference as a second adapter named `ref` on the policy's own base model."""

import copy

import torch
from peft import PeftModel

from trl_steady.features.adapters.base_model import BaseModel
from trl_steady.features.reference.tensors import paired, refresh
from trl_steady.trl_bridge.models import (
    POLICY_ADAPTER,
    REFERENCE_ADAPTER,
    keep_base,
    keep_dtypes_and_trainability,
    keep_random_state,
)

_REFRESHABLE = ("LORA", "LOHA", "LOKR", "IA3")


def add_reference_adapter(model: PeftModel) -> None:
    """Add the reference to a PEFT model as an adapter `ref` that equals the current policy.

    TRL's rollout scores the reference with the adapter of this name. Nothing else in the model changes. If TRL has
    already made an adapter `ref` from a loaded adapter, it is kept and gets the policy's dtype.
    """
    refuse_unsupported_adapters(model)
    if REFERENCE_ADAPTER not in model.peft_config:
        config = copy.deepcopy(model.peft_config[POLICY_ADAPTER])
        # PiSSA would change the base again, and other random numbers would change the rollouts
        with keep_dtypes_and_trainability(model), keep_base(config), keep_random_state():
            model.add_adapter(REFERENCE_ADAPTER, config)
    end_dropout(model)
    pairs = paired(model)
    for pair in pairs:
        pair.reference.requires_grad_(False)
    refresh(pairs, alpha=1)


def end_dropout(model: PeftModel) -> None:
    """Switch off the dropout of the reference's adapter, which TRL's trainers run in training mode."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout) and REFERENCE_ADAPTER in name.split("."):
            module.p = 0.0


def refuse_several(model: PeftModel) -> None:
    """Raise a ValueError if the policy is not exactly one adapter of the name that TRL and the reference know."""
    if list(model.active_adapters) != [POLICY_ADAPTER]:
        raise ValueError(
            f"the active adapters are {list(model.active_adapters)}, and the reference is made from one named "
            f"{POLICY_ADAPTER!r}. Load one adapter under that name, or train without a KL."
        )


def refuse_unsupported_adapters(model: PeftModel) -> None:
    """Raise a ValueError on adapters whose copy could not follow the policy."""
    refuse_several(model)
    config = model.peft_config[POLICY_ADAPTER]
    changing = [option for option in ("kasa_config", "layer_replication") if getattr(config, option, None) is not None]
    # AdaLoRA changes its ranks while it trains, and prompts are not adapters of the weights
    if config.peft_type not in _REFRESHABLE or changing:
        raise ValueError(
            f"{changing or config.peft_type} in peft_config cannot follow the policy as a reference. Use one of "
            f"{', '.join(_REFRESHABLE)} without it, full fine-tuning, or sync_ref_model=False."
        )
    if trained := BaseModel(model).trained:
        raise ValueError(
            f"{len(trained)} parameters of the base train beside the adapter, for example {min(trained)}, and policy "
            "and reference share them. Set bias='none' in peft_config, and list modules that should train in "
            "modules_to_save; or set sync_ref_model=False."
        )
