"""The reference as a second adapter named `ref` on the policy's own base model."""

import copy
from typing import Any

import torch
from peft import PeftModel

from trl_steady.adapters.base import Base
from trl_steady.host.adapters import base_kept, parameters_kept
from trl_steady.reference.tensors import POLICY, REFERENCE, adapter_pairs, move

__all__ = ["add_reference_adapter", "refuse_unmovable"]

MOVABLE = ("LORA", "LOHA", "LOKR", "IA3")


def add_reference_adapter(model: PeftModel) -> None:
    """Add the reference to a PEFT model as an adapter `ref` that equals the current policy.

    Nothing else in the model changes. If TRL has already made an adapter `ref` from a loaded adapter, it is kept and
    gets the policy's dtype.

    Raises:
        ValueError: the adapter cannot be moved. The message names it and says what to do.
    """
    refuse_unmovable(model)
    if REFERENCE not in model.peft_config:
        config = copy.deepcopy(model.peft_config[POLICY])
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        # keep the random state, so that rollouts are the same as without a reference adapter
        with parameters_kept(model), base_kept(config), torch.random.fork_rng(devices=devices):
            model.add_adapter(REFERENCE, config)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout) and REFERENCE in name.split("."):
            module.p = 0.0  # no dropout in the reference; TRL's full one is in eval mode
    pairs = adapter_pairs(model)
    for pair in pairs:
        pair.reference.requires_grad_(False)
    move(pairs, alpha=1)


def refuse_unmovable(model: PeftModel) -> None:
    """Raise on adapters whose copy cannot follow the policy.

    Raises:
        ValueError: the active adapter is not exactly one named `default`, or it uses prompt learning, AdaLoRA, another
            kind that has not been checked, trained biases, KaSA or replicated layers.
    """
    active = list(model.active_adapters)
    if active != [POLICY]:
        raise ValueError(
            f"the active adapters are {active}, but the reference can follow only one, named {POLICY!r}. Load the "
            f"adapter with PeftModel.from_pretrained(..., adapter_name={POLICY!r}, is_trainable=True)."
        )
    config: Any = model.peft_config[POLICY]
    kind = getattr(config.peft_type, "value", str(config.peft_type))
    if kind not in MOVABLE:
        why = {
            "ADALORA": ": its ranks change while it trains",
            "XLORA": ": a classifier mixes its adapters",
        }.get(kind, ": the prompt is not an adapter of the weights" if config.is_prompt_learning else "")
        raise ValueError(
            f"peft_type={kind!r} cannot follow the policy as a reference{why}. Use one of {', '.join(MOVABLE)} "
            "(LoraConfig and its relatives), or full fine-tuning, or sync_ref_model=False."
        )
    if trained := Base(model).trained:
        raise ValueError(
            f"{len(trained)} parameters of the base train beside the adapter, for example {min(trained)}, and policy "
            "and reference share them. Set bias='none' in peft_config, and list modules that should train in "
            "modules_to_save; or set sync_ref_model=False."
        )
    for option in ("kasa_config", "layer_replication"):
        value = getattr(config, option, None)
        if value is not None:
            raise ValueError(
                f"{option}={value!r} changes the base model whenever an adapter is added, and the reference is an "
                f"added adapter. Use LoRA without {option}, or sync_ref_model=False."
            )
