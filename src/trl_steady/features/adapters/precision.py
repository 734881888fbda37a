"""Keep the gradients of a quantised policy, and the precision that its adapters need at small learning rates."""

from collections.abc import Iterable, Mapping

import torch
from accelerate import DeepSpeedPlugin
from bitsandbytes.nn import Linear4bit
from peft import PeftModel
from torch import Tensor
from torch.amp.grad_scaler import GradScaler


def keep_in_float32(
    model: torch.nn.Module, before: Mapping[str, Tensor], deepspeed_plugin: DeepSpeedPlugin | None
) -> None:
    """Bring the adapters of a quantised base back to float32 after TRL's constructor has cast them to bf16.

    `before` has the values of a loaded adapter by name, from before the constructor. Raises a ValueError if the model
    has no adapter, or if ZeRO-3 is used, which needs parameters of one dtype.
    """
    if not isinstance(model, PeftModel):
        raise ValueError("adapter_dtype='float32' needs an adapter. Leave it unset, or give peft_config.")
    if deepspeed_plugin is not None and deepspeed_plugin.zero_stage == 3:
        raise ValueError("adapter_dtype='float32' does not work with ZeRO-3. Use ZeRO-2 or FSDP2, or leave it unset.")
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data = before.get(name, parameter.data).to(parameter.device, torch.float32)


def refuse_unscalable(parameters: Iterable[tuple[str, torch.nn.Parameter]], device: torch.device) -> None:
    """Raise a ValueError if a loss scaler cannot unscale the gradients of a parameter that is trained.

    torch would raise at the first step, after a rollout. It takes no float16, and on CUDA (seen in 2.11) no bfloat16,
    which TRL makes of each adapter of a quantised base.
    """
    examples: dict[torch.dtype, str] = {}
    for name, parameter in parameters:
        examples.setdefault(parameter.dtype, name)
    for dtype, name in examples.items():
        if _can_unscale(dtype, device):
            continue
        raise ValueError(
            f"fp16=True cannot train {name}, which is {dtype}: torch does not unscale such gradients. Load it in "
            "float32 (model_init_kwargs={'dtype': 'float32'}), or set adapter_dtype='float32' for the adapter of a "
            "quantised base. The passes compute in fp16 all the same."
        )


def _can_unscale(dtype: torch.dtype, device: torch.device) -> bool:
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=dtype, device=device))
    parameter.grad = torch.zeros_like(parameter)
    scaler = GradScaler(device.type)
    scaler.scale(torch.zeros((), device=device))  # makes its tensors
    try:
        scaler.unscale_(torch.optim.SGD([parameter]))
    except (ValueError, RuntimeError):
        return False
    return True


def lost_to_rounding(model: torch.nn.Module, learning_rate: float) -> str | None:
    """Return a warning if a step of the size of the learning rate, as in Adam, changes less than half of an adapter.

    Only bf16 adapters are looked at. Entries that are 0 are left out, because any step changes them.
    """
    if not isinstance(model, PeftModel) or learning_rate == 0:
        return None
    lost = 0
    entries = 0
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype == torch.bfloat16:
            values = parameter.detach()
            is_lost = (values + learning_rate == values) & (values != 0)
            lost += int(is_lost.sum())
            entries += int((values != 0).sum())
    if lost <= entries / 2:
        return None
    return (
        f"a step of learning_rate={learning_rate:g} is lost to rounding on {lost / entries:.1%} of the adapter's "
        "non-zero entries, which are bf16. Set adapter_dtype='float32'."
    )


def keep_cpu_weights_unpacked(model: torch.nn.Module) -> None:
    """Keep bitsandbytes from repacking the 4-bit weights of a model that trains on CPU.

    bitsandbytes (seen in 0.50.2) repacks them in the first eval-mode forward on a CPU with AVX512-BF16. A training
    forward through packed weights then passes no gradient to its input, without an error or a warning. Raises a
    ValueError if they are packed already. Unpacking would not restore them, because the scales have been rounded.
    """
    for name, module in model.named_modules():
        if isinstance(module, Linear4bit) and module.weight.device.type == "cpu":
            if getattr(getattr(module.weight, "quant_state", None), "packing_format_for_cpu", False):
                raise ValueError(
                    f"bitsandbytes has repacked the 4-bit weights of {name} in an eval-mode forward on CPU, and no "
                    "gradient would pass through them. Load the model again and build the trainer first."
                )
            module.support_avx512bf16_for_cpu = False
