"""Training with a colocated engine in a process of its own, which writes down its answers, and may be killed."""

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers
from trl.generation import vllm_generation

from tests.tools import tiny
from tests.vllm import cpu

ANSWERS = "answers.jsonl"
# a window is two steps: a rollout of 16 answers begins at steps 0, 2, 4
OPTIONS: dict[str, Any] = {
    **{
        "use_vllm": True,
        "vllm_request_seeds": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.1,
        "vllm_max_model_length": 128,
    },
    **{"per_device_train_batch_size": 8, "steps_per_generation": 2, "max_steps": 6, "max_completion_length": 16},
    **{"shuffle_dataset": False},  # the same prompts with each seed
    **{"generation_kwargs": {"ignore_eos": True}, "save_strategy": "steps", "save_steps": 2},
    "build": {"train_dataset": tiny.dataset(8)},
}


class Killed(transformers.TrainerCallback):
    """Kills the process when a checkpoint has been written."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def train(model: Path, output: Path, kill_after: int | None, resume: bool, options: dict[str, Any]) -> None:
    """Train in this process."""
    import vllm

    # of an engine in the process that started this one
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)

    def engine(**asked: Any) -> Any:
        of_cpu = {"dtype": "float32", "enforce_eager": True, "block_size": 32, "num_gpu_blocks_override": 64}
        # vLLM on CPU cannot sample with seeds when a prompt comes in pieces
        return vllm.LLM(**{**asked, **of_cpu, "max_num_batched_tokens": 512, "max_num_seqs": 16})

    answers = output / ANSWERS

    def reward(completion_ids: list[list[int]], trainer_state: Any, **_: Any) -> list[float]:
        with answers.open("a") as file:
            file.write(json.dumps([trainer_state.global_step, completion_ids]) + "\n")
        return tiny.reward(completion_ids)

    cpu.take_weights()
    vllm_generation.LLM = engine
    merged = {**OPTIONS, **options}
    build = {**merged.pop("build"), "reward_funcs": reward}
    trainer = tiny.trainer(model, output, build=build, **merged)
    if kill_after is not None:
        trainer.add_callback(Killed(kill_after))
    trainer.train(resume_from_checkpoint=resume or None)


def run(
    model: Path, output: Path, *, kill_after: int | None = None, resume: bool = False, **options: Any
) -> list[tuple[int, list[list[int]]]]:
    """Train in a process of its own, and return its answers: for each rollout its step and the tokens, row by row."""
    output.mkdir(exist_ok=True)
    (output / ANSWERS).unlink(missing_ok=True)
    target: Callable[..., None] = train
    process = multiprocessing.get_context("spawn").Process(
        target=target, args=(model, output, kill_after, resume, options)
    )
    process.start()
    process.join()
    assert process.exitcode == (0 if kill_after is None else -signal.SIGKILL)
    return [tuple(json.loads(line)) for line in (output / ANSWERS).read_text().splitlines()]
