"""A quantised policy keeps its gradients, and its adapters the precision that small learning rates need."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor

__all__ = ["cast_undone", "keep_gradients_on_cpu", "keep_in_float32", "warn_if_steps_round_away"]


def keep_in_float32(model: torch.nn.Module, before: Mapping[str, Tensor], deepspeed_plugin: Any = None) -> None:
    """Undo the rounding of TRL's constructor, which makes the adapters of a quantised base bf16.

    Args:
        model: The policy after the constructor.
        before: The values of an adapter that was loaded, by name, from before the constructor.
        deepspeed_plugin: accelerate's, if DeepSpeed is used.

    Raises:
        ValueError: there is no adapter, or ZeRO-3 needs parameters of one dtype.
    """
    if not isinstance(model, PeftModel):
        raise ValueError(
            "adapter_dtype='float32' would be ignored: the model has no adapter. Leave it unset, or give peft_config."
        )
    if deepspeed_plugin is not None and deepspeed_plugin.zero_stage == 3:
        raise ValueError(
            "adapter_dtype='float32': ZeRO-3 needs parameters of one dtype. Leave it unset, or use ZeRO-2 or FSDP2."
        )
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data = before.get(name, parameter.data).to(parameter.device, torch.float32)


@contextmanager
def cast_undone(model: torch.nn.Module) -> Iterator[None]:
    """Give parameters, gradients and buffers their data back if the code inside casts the model.

    TRL casts the whole model for continuous batching, and does not cast it back. The parameters stay the same objects,
    so the optimizer's references hold.
    """
    before = {name: tensor.detach() for name, tensor in _tensors(model)}
    try:
        yield
    finally:
        own = {id(tensor): before[name] for name, tensor in _tensors(model) if name in before}
        model._apply(lambda tensor: own.get(id(tensor), tensor))  # by torch's own way, which FSDP2 follows


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        yield name, parameter
        if parameter.grad is not None:
            yield f"{name}.grad", parameter.grad
    yield from model.named_buffers()


def warn_if_steps_round_away(model: torch.nn.Module, learning_rate: float) -> None:
    """Say so if a step of the size of the learning rate, as Adam's are, changes less than half of a bf16 adapter.

    Zeros are left out: they take any step, as long as they are zero.
    """
    if not isinstance(model, PeftModel) or learning_rate == 0:
        return
    trained = [p.detach() for p in model.parameters() if p.requires_grad and p.dtype == torch.bfloat16]
    lost = sum(int(((p + learning_rate == p) & (p != 0)).sum()) for p in trained)
    entries = sum(int((p != 0).sum()) for p in trained)
    if lost > entries / 2:
        warnings.warn(
            f"learning_rate={learning_rate:g} rounds away on {lost / entries:.1%} of the adapter's entries other than "
            "0, which are bf16 (TRL makes the adapters of a quantised base so). Set adapter_dtype='float32'.",
            UserWarning,
            stacklevel=4,
        )


def keep_gradients_on_cpu(model: torch.nn.Module) -> None:
    """Keep bitsandbytes from repacking the 4-bit weights of a model that trains on CPU.

    bitsandbytes (seen in 0.50.2) repacks them in the first eval-mode forward on a CPU with AVX512-BF16; a training
    forward through packed weights then passes no gradient to its input, without a word.

    Raises:
        ValueError: they are packed already. Unpacking would not bring the weights back: the scales have been rounded
            to bf16, and without double quantisation they return in another order.
    """
    module: Any
    for name, module in model.named_modules():
        if getattr(module, "support_avx512bf16_for_cpu", False) and module.weight.device.type == "cpu":
            if getattr(module.weight.quant_state, "packing_format_for_cpu", False):
                raise ValueError(
                    f"bitsandbytes has repacked the 4-bit weights of {name} for inference, because the model was used "
                    "in eval mode on CPU; no gradient would pass through them. Load the model again and build the "
                    "trainer before the first eval-mode forward; evaluations after that do no harm."
                )
            module.support_avx512bf16_for_cpu = False
