"""Take real steps of each trainer: `python -m benchmarks.gpu.steps bf16|fp16|nf4 --json PATH [--small]`.

SmolLM2-135M-Instruct samples with transformers, a reward function scores, AdamW updates: all weights under autocast to
bf16 or fp16, or LoRA on an NF4 base. The file is written after each trainer. One that fails does not stop the others.
"""

import gc
import math
import statistics
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
from tests.tools import tiny

import trl_steady
from benchmarks import measuring
from benchmarks.gpu import models
from benchmarks.gpu.block import Figure

TRAINERS: dict[str, dict[str, Any]] = {
    "GRPO": {"loss_type": "gspo", "beta": 0.04, "sync_ref_model": True, "ref_model_sync_steps": 2},
    "RLOO": {"beta": 0.05},
    "PPO": {"num_generations": 1},
}
"""Options that make each trainer do more than TRL's."""
STEPS, FEW_STEPS = 8, 4  # under fp16, the loss scale may leave out the first ones


def steps(method: str, precision: str, folder: Path, *, small: bool) -> list[Figure]:
    """Train, and return figures.

    Raises:
        RuntimeError: The loss is not finite, or no weight has moved.
    """
    clock = models.Clock()
    options = {
        "per_device_train_batch_size": 2 if small else 8,
        "gradient_accumulation_steps": 2,
        "num_generations": 2 if small else 8,
        "max_completion_length": 4 if small else 32,
        "max_steps": FEW_STEPS if small else STEPS,
        "learning_rate": 1e-5,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        **models.options(precision),
        **TRAINERS[method],
    }
    build = {**models.parts(precision), "callbacks": [clock], "train_dataset": tiny.dataset(64)}
    build["reward_funcs"] = models.reward
    trainer = measuring.build(trl_steady, str(folder), folder / "out", build, method, **options)
    trained = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    before = {name: p.detach().to("cpu", copy=True) for name, p in trained.items()}
    models.peak_bytes()
    trainer.train()
    peak = models.peak_bytes()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    if not all(map(math.isfinite, losses)):
        raise RuntimeError(f"{method}: the losses are {losses}")
    moved = [name for name, old in before.items() if not torch.equal(old, trained[name].detach().cpu())]
    if not moved:
        raise RuntimeError(f"{method}: no weight has moved in {len(losses)} steps")
    left_out = sum(row.get("steps/nonfinite", 0) for row in trainer.state.log_history)
    found = [
        Figure(f"{method}: a step with its rollout", statistics.median(clock.seconds[1:]), "s"),
        Figure(f"{method}: trained tensors that moved, of all", len(moved) / len(before)),
        Figure(f"{method}: steps left out", left_out),
    ]
    if peak:
        found.append(Figure(f"{method}: peak memory", peak / 2**30, "GiB"))
    return found


def main() -> int:
    """Take steps of each trainer, and return the exit status."""
    parser = models.parser(__doc__)
    parser.add_argument("precision", choices=models.PRECISIONS)
    options = parser.parse_args()
    measuring.heading(options)
    figures: list[Figure] = []
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as name, models.half_on_cpu():
        folder = Path(name)
        models.save(folder, small=options.small)
        for method in TRAINERS:
            try:
                figures += steps(method, options.precision, folder, small=options.small)
            except Exception as error:
                traceback.print_exc()
                problems.append(f"{method}: {type(error).__name__}: {error}"[:150])
            measuring.record(options.json, figures, ", ".join(problems))
            gc.collect()  # trainers have cycles
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
