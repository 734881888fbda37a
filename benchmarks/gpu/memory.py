"""Compare peaks of memory with the formula of `--dry-run`: `python -m benchmarks.gpu.memory --json PATH [--small]`.

SmolLM2-135M-Instruct in bf16 autocast: all weights, LoRA, and LoRA on an NF4 base, two optimizer steps each. A
`rollout_func` gives answers of the greatest length after prompts of one token, for which the formula computes.
"""

import gc
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from tests.tools import tiny

import trl_steady
from benchmarks import measuring, padding
from benchmarks.gpu import models
from benchmarks.gpu.block import Figure
from benchmarks.measuring import CUDA
from trl_steady.cli import device_memory

MODES = ("all weights", "LoRA", "LoRA on NF4")


def build(mode: str, folder: Path, *, small: bool) -> Any:
    """Return a trainer whose answers all have the greatest length."""
    batch, length = (2, 16) if small else (8, 512)

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = [[(7 * i + j) % 200 + 50 for i in range(length)] for j in range(len(prompts))]
        return {"prompt_ids": [[60]] * len(prompts), "completion_ids": ids, "logprobs": None}

    parts: dict[str, Any] = {"rollout_func": rollout, "train_dataset": tiny.dataset(64)}
    options = models.options("nf4" if mode == MODES[2] else "bf16")
    if mode != MODES[0]:
        parts["peft_config"] = LoraConfig(**models.LORA)
        options["model_init_kwargs"]["dtype"] = "bfloat16"  # that of the base, as in docs/memory.md
    return measuring.build(
        trl_steady,
        str(folder),
        folder / "out",
        parts,
        **options,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=2,
        num_generations=batch,
        max_completion_length=length,
        max_steps=2,
        save_strategy="no",
        disable_tqdm=True,
    )


def peak(trainer: Any) -> int:
    """Train, and return the peak of all tensors' bytes."""
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
        trainer.train()
        return torch.cuda.max_memory_allocated()
    resident = sum(p.nbytes for p in trainer.model.parameters())
    return resident + padding.peak_bytes(trainer.train)[1]


def main() -> int:
    """Compare all modes, and return the exit status."""
    options = models.parser(__doc__).parse_args()
    measuring.heading(options)
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models.save(folder, small=options.small)
        for mode in MODES:
            trainer = build(mode, folder, small=options.small)
            computed = sum(device_memory.memory(trainer).values())
            measured = peak(trainer)
            figures.append(Figure(f"{mode}: computed", computed / 1e9, "GB"))
            figures.append(Figure(f"{mode}: measured, of computed", measured / computed))
            measuring.record(options.json, figures)
            del trainer
            gc.collect()  # trainers have cycles
    return 0


if __name__ == "__main__":
    sys.exit(main())
