"""The models of the parts of `make gpu` that train: SmolLM2 in each precision, or a small one in its place."""

import argparse
import contextlib
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from transformers import TrainerCallback

from benchmarks import measuring
from benchmarks.measuring import CUDA

PRECISIONS = ("bf16", "fp16", "nf4")
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
LORA = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def parser(text: str | None) -> argparse.ArgumentParser:
    """Return a parser of what each part gets."""
    made = measuring.parser(text, "small")
    made.add_argument("--json", type=Path, required=True)
    return made


def save(folder: Path, *, small: bool) -> None:
    """Save SmolLM2-135M-Instruct, or a small model with random weights."""
    measuring.save_model(folder, small, {**SMALL, "num_key_value_heads": 2, "initializer_range": 0.1})


def options(precision: str) -> dict[str, Any]:
    """Return the options of a config for one of `PRECISIONS`."""
    from common import smollm2

    loading: dict[str, Any] = {"dtype": "float32", "attn_implementation": "sdpa"}
    is_bf16 = precision == "bf16" or (precision == "nf4" and takes_bf16())
    if precision == "nf4":
        quantised = smollm2.nf4()
        if not is_bf16:
            quantised.bnb_4bit_compute_dtype = torch.float16
        loading["quantization_config"] = quantised
    found: dict[str, Any] = {"bf16": is_bf16, "fp16": not is_bf16, "model_init_kwargs": loading}
    if precision == "nf4":
        found["adapter_dtype"] = "float32"
    return found


def takes_bf16() -> bool:
    """Return whether the device computes in bf16, and does not only emulate it, as a T4 does."""
    return not CUDA or torch.cuda.get_device_capability() >= (8, 0)


def parts(precision: str) -> dict[str, Any]:
    """Return the arguments of a trainer for one of `PRECISIONS`."""
    return {"peft_config": LoraConfig(**LORA)} if precision == "nf4" else {}


@contextlib.contextmanager
def half_on_cpu() -> Generator[None]:
    """Let a CPU train in fp16, which accelerate leaves out there."""
    from common.half import fp16_on_cpu

    around = contextlib.nullcontext() if CUDA else fp16_on_cpu()
    with around:
        yield


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return the share of even tokens in each answer."""
    return [sum(token % 2 == 0 for token in ids) / max(len(ids), 1) for ids in completion_ids]


class Clock(TrainerCallback):
    """The seconds of each optimizer step, with its rollout."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start."""
        self._started = now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Stop."""
        self.seconds.append(now() - self._started)


def now() -> float:
    """Return the seconds of a clock, once the device has done its work."""
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_bytes() -> int:
    """Return the peak of a GPU's memory since the last call."""
    if not CUDA:
        return 0
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return peak
