"""Train a tiny model with fixed rollouts on however many processes the launcher started; write what came out.

Usage: train.py MODEL OUTPUT LOSS_TYPE GLOBAL_BATCH
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from tests import tiny

torch.set_num_threads(1)


def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Answers that depend on the place in the global batch only."""
    first = trainer.accelerator.process_index * len(prompts)
    answers = [
        [(13 * (first + i) + 5 * t) % 200 + 45 for t in range(1 + (first + i) % 6)] for i in range(len(prompts))
    ]
    return {
        "prompt_ids": [trainer.processing_class(p)["input_ids"] for p in prompts],
        "completion_ids": answers,
        "logprobs": None,
    }


def main(model: Path, output: Path, loss_type: str, global_batch: int) -> None:
    """Groups of the whole global batch, so that with two processes each group lies on both."""
    state = PartialState(cpu=True)
    trainer = tiny.trainer(
        model,
        output,
        loss_type=loss_type,
        epsilon=5e-3,
        epsilon_high=8e-3,
        per_device_train_batch_size=global_batch // state.num_processes,
        num_generations=global_batch,
        steps_per_generation=1,
        num_iterations=2,
        beta=0.1,
        optim="sgd",  # Adam would blow rounding up to the size of an update where the gradient is zero on paper
        learning_rate=0.1,
        gradient_checkpointing=False,
        build={"rollout_func": rollout},
    )
    trainer.train()
    if state.is_main_process:
        torch.save(tiny.parameters(trainer), output / "parameters.pt")
        written = {"processes": state.num_processes, "backend": state.backend, "history": tiny.history(trainer)}
        (output / "history.json").write_text(json.dumps(written))
    # gloo's threads now and then abort or hang in the interpreter's exit, after all that is tested here
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
