"""The reference as a second adapter named `ref` on the policy's own base model."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftModel

from trl_steady.reference.tensors import POLICY, REFERENCE, adapter_pairs, move

__all__ = ["add_reference_adapter", "base_kept", "parameters_kept", "refuse_unmovable"]

MOVABLE = ("LORA", "LOHA", "LOKR", "IA3")


def add_reference_adapter(model: PeftModel) -> None:
    """Put the reference on a PEFT model, equal to the policy as it stands; nothing else of the model changes.

    An adapter `ref` that TRL has made of a loaded adapter is kept, and brought to the policy's dtype.

    Raises:
        ValueError: an adapter that cannot be moved, by name, with the way out.
    """
    refuse_unmovable(model)
    if REFERENCE not in model.peft_config:
        config = copy.deepcopy(model.peft_config[POLICY])
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        # rollouts are drawn as without a reference adapter
        with parameters_kept(model), base_kept(config), torch.random.fork_rng(devices=devices):
            model.add_adapter(REFERENCE, config)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout) and REFERENCE in name.split("."):
            module.p = 0.0  # a reference drops nothing out; TRL's full one is in eval mode
    pairs = adapter_pairs(model)
    for pair in pairs:
        pair.reference.requires_grad_(False)
    move(pairs, alpha=1)


@contextmanager
def base_kept(config: Any) -> Iterator[None]:
    """Adapters of this configuration are added without writing into the base, as PiSSA's and OLoRA's starts do."""
    start = getattr(config, "init_lora_weights", None)
    if not isinstance(start, str):
        yield
        return
    config.init_lora_weights = True
    try:
        yield
    finally:
        config.init_lora_weights = start


@contextmanager
def parameters_kept(model: torch.nn.Module) -> Iterator[None]:
    """The parameters' dtypes and `requires_grad` survive what happens inside.

    PEFT makes every parameter of an adapter trainable when it switches adapters, and float32 when it loads one.
    """
    before = {name: (parameter.dtype, parameter.requires_grad) for name, parameter in model.named_parameters()}
    try:
        yield
    finally:
        for name, parameter in model.named_parameters():
            dtype, requires_grad = before.get(name, (parameter.dtype, parameter.requires_grad))
            if parameter.dtype != dtype:
                parameter.data = parameter.data.to(dtype)
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)


def refuse_unmovable(model: PeftModel) -> None:
    """Refuse adapters of which a copy cannot follow the policy.

    Raises:
        ValueError: another adapter than one named `default`, prompt learning, AdaLoRA or another kind that has not
            been checked, trained biases, KaSA, replicated layers.
    """
    active = list(model.active_adapters)
    if active != [POLICY]:
        raise ValueError(
            f"the active adapters are {active}, and a reference can follow one named {POLICY!r} only. Load the "
            f"adapter with PeftModel.from_pretrained(..., adapter_name={POLICY!r}, is_trainable=True)."
        )
    config: Any = model.peft_config[POLICY]
    kind = getattr(config.peft_type, "value", str(config.peft_type))
    if kind not in MOVABLE:
        why = {
            "ADALORA": ": its ranks change while it trains",
            "XLORA": ": its adapters are mixed by a classifier",
        }.get(kind, ": the prompt is not an adapter of the weights" if config.is_prompt_learning else "")
        raise ValueError(
            f"peft_type={kind!r} cannot follow the policy as a reference{why}. Use one of {', '.join(MOVABLE)} "
            "(LoraConfig and its relatives), or full fine-tuning, or sync_ref_model=False."
        )
    bias = getattr(config, "bias", "none")
    if bias != "none":
        raise ValueError(
            f"bias={bias!r} trains the biases of the base model, of which there is one set for policy and reference. "
            "Set bias='none', or name the modules whose biases shall train in modules_to_save."
        )
    for option in ("kasa_config", "layer_replication"):
        value = getattr(config, option, None)
        if value is not None:
            raise ValueError(
                f"{option}={value!r} changes the base model whenever an adapter is added, the reference too. Use LoRA "
                f"without {option}, or sync_ref_model=False."
            )
