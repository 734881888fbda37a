"""The number formats of a vLLM engine and of the trainer's passes, such as "bfloat16"."""

from typing import Any, NamedTuple

from bitsandbytes.nn import Linear4bit

from trl_steady.core.feature import Trainer
from trl_steady.trl_bridge.models import bare

_AUTOCAST = {"bf16": "bfloat16", "fp16": "float16"}  # accelerate's names
_COARSEST_FIRST = ("bfloat16", "float16", "float32")


class Passes(NamedTuple):
    """The number format of the trainer's passes."""

    dtype: str
    """The format that rounds most: of autocast, or else of the weights; and of the products with 4-bit weights."""
    about: str
    """The settings that decide it, such as "weights float32, autocast bfloat16"."""
    is_4bit: bool = False
    """True if weights are 4-bit, so that `bnb_4bit_compute_dtype` counts too."""


def coarser(first: str, second: str) -> str:
    """Return which of two number formats rounds more.

    >>> coarser("float32", "bfloat16")
    'bfloat16'
    """
    for name in _COARSEST_FIRST:
        if name in (first, second):
            return name
    return first


def engine_format(engine: Any) -> str | None:
    """Return the number format in which TRL's vLLM engine computes; None if vLLM does not say it.

    A server says it at /server_info. Only the main process has TRL's client, which asks it.
    """
    try:
        if engine.mode == "server":
            dtype = engine.vllm_client.get_server_info()["model_config"]["dtype"]
        else:
            dtype = engine.llm.llm_engine.model_config.dtype
    except Exception:  # a server that hides this address, or a version of vLLM that has moved the setting
        return None
    return _name(dtype)


def trainer_format(trainer: Trainer) -> Passes:
    """Return the number format of the trainer's passes. An adapter's own format does not count, but its base's."""
    model = bare(trainer, trainer.model)
    weights = _name(model.dtype)
    autocast = _AUTOCAST.get(trainer.accelerator.mixed_precision)
    dtype = autocast or weights
    about = f"autocast {autocast}" if autocast else "no autocast"
    for module in model.modules():
        if isinstance(module, Linear4bit):
            computed = weights  # without a setting, bitsandbytes takes the format of the inputs
            if module.compute_dtype is not None:
                computed = _name(module.compute_dtype)
            return Passes(coarser(dtype, computed), f"4-bit weights computed in {computed}, {about}", is_4bit=True)
    return Passes(dtype, f"weights {weights}, {about}")


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
