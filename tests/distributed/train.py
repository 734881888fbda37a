"""Train tiny models on however many processes the launcher started; each process writes what came out.

Usage: train.py MODEL OUTPUT RUN [RUN ...]
"""

import contextlib
import math
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from accelerate import PartialState

from tests import resumable, tiny
from trl_steady import StepRewards
from trl_steady import sampled as sampled_trainer
from trl_steady.host import HostTrainer
from trl_steady.sampling.kept import KeptTokens

GLOBAL_BATCH = 8


def partly_in_steps(completion_ids: list[list[int]], **_: Any) -> list[Any]:
    """Steps in the first half of the global batch, all of it on the first of two processes; two of no verdict."""
    rewards: list[Any] = []
    for ids in completion_ids:
        place = (ids[0] - 45) // 13 % GLOBAL_BATCH
        half = max(1, len(ids) // 2)
        ends = sorted({half, len(ids)})
        steps = StepRewards.at_tokens([place / 3, 1.0 - place][: len(ends)], ends)
        rewards.append(None if place in (3, 6) else steps if place < GLOBAL_BATCH // 2 else float(place))
    return rewards


MOVING: dict[str, Any] = {
    "beta": 0.04,
    "sync_ref_model": True,
    "ref_model_mixup_alpha": 1.0,
    "ref_model_sync_steps": 2,
    "num_iterations": 3,  # a window is 3 steps
    "max_steps": 11,
}
FIXED: dict[str, dict[str, Any]] = {
    "gspo": {"loss_type": "gspo"},
    "gspo_token": {"loss_type": "gspo_token"},
    "engine": {
        "loss_type": "dapo",
        "kl_ratio_denominator": "sampler",
        "geometric_mask_range": (0.5, 2.0),
        "off_policy_mask_threshold": 0.2,
    },
    "tokens": {
        "loss_type": "dapo",
        "token_budget": 24,
        "gradient_accumulation_steps": 4,
        "steps_per_generation": 4,
        "max_steps": 4,
    },
    "kept": {"loss_type": "dapo", "keep_sampling_mask": True, "top_p": 0.9, "build": {"rollout_func": None}},
    "steps": {"loss_type": "gspo_token", "build": {"reward_funcs": partly_in_steps}},
    "full": {**MOVING, "learning_rate": 0.02},
    "lora": {**MOVING, "lora": True},
    "kl": {
        **MOVING,
        "lora": True,
        "ref_model_mixup_alpha": 0.6,
        "ref_model_sync_steps": 7,
        "ref_model_sync_kl": 0.1,
        "max_steps": 16,
    },
}
"""Runs whose rollouts are those of any number of processes."""

ROUTED: dict[str, dict[str, Any]] = {
    "R2": {
        "loss_type": "dapo",
        "router_replay": "R2",
        "router_replay_reference": True,
        "log_level": "debug",  # of one process, while the other's loggers stay at their level
        "router_aux_loss_coef": 0.0,  # a mean over each process' tokens
        "num_iterations": 4,
        "max_steps": 8,
    },
}
ROUTED["budget"] = {
    **ROUTED["R2"],
    "token_budget": 24,
    "gradient_accumulation_steps": 4,
    "steps_per_generation": 4,
    "max_steps": 4,
}
"""The same, on a mixture of experts."""

SAMPLED = {"sampled_full": "full", "sampled_lora": "lora"}
"""Runs that draw their rollouts, and are resumed from `INSIDE`."""
INSIDE = "checkpoint-7"


class Witness(transformers.TrainerCallback):
    """The reference of each step, as this process has it."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps.append({pair.name: pair.reference.detach().clone() for pair in self.trainer._reference.pairs()})


class Invented:
    """Stands in for the recording of what was kept: up to 4 tokens, or all, by the token that was sampled."""

    def of(self, completions: list[list[int]]) -> KeptTokens:
        tokens = (token for completion in completions for token in completion)
        return KeptTokens.of({token, *range(token - token % 5, token)} if token % 5 else [] for token in tokens)

    def listening(self, model: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def answers_of(count: int, trainer: Any) -> list[list[int]]:
    """Answers that depend on the place in the global batch only."""
    first = trainer.accelerator.process_index * count
    return [[(13 * (first + i) + 5 * t) % 200 + 45 for t in range(1 + (first + i) % 6)] for i in range(count)]


def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """These answers, and log-probs of an engine."""
    first, answers = trainer.accelerator.process_index * len(prompts), answers_of(len(prompts), trainer)
    # an engine that disagrees by up to 1.5 nats a token, in the one run that looks at it
    logprobs = [[-5.5 + 1.5 * math.sin(first + i + t) for t in range(len(a))] for i, a in enumerate(answers)]
    return {
        "prompt_ids": [trainer.processing_class(p)["input_ids"] for p in prompts],
        "completion_ids": answers,
        "logprobs": logprobs if trainer.args.sampler_options else None,
    }


def fixed(run: str, model: Path, output: Path) -> dict[str, Any]:
    """Groups of the whole global batch, so that with two processes each group lies on both."""
    state = PartialState()
    options: dict[str, Any] = {
        "epsilon": 5e-3,
        "epsilon_high": 8e-3,
        "per_device_train_batch_size": GLOBAL_BATCH // state.num_processes,
        "num_generations": GLOBAL_BATCH,
        "steps_per_generation": 1,
        "num_iterations": 2,
        "beta": 0.1,
        "optim": "sgd",  # Adam would blow rounding up to the size of an update where the gradient is zero on paper
        "learning_rate": 0.1,
        "gradient_checkpointing": False,
        **(FIXED | ROUTED)[run],
    }
    options["build"] = {"rollout_func": rollout, **options.get("build", {})}
    torch.manual_seed(0)  # the adapter of one process and of two
    trainer: Any = tiny.trainer(model, output, **options)
    witness = Witness(trainer)
    if trainer._reference:
        trainer.add_callback(witness)
    # of "kept", the one run without a rollout_func
    generate = lambda own, prompt_ids, *_, **__: (answers_of(len(prompt_ids), own), None)
    with patch.object(HostTrainer, "generate", generate), patch.object(sampled_trainer, "Recording", Invented):
        trainer.train()
    return {
        "processes": state.num_processes,
        "backend": state.backend,
        "parameters": tiny.parameters(trainer),
        "history": tiny.history(trainer),
        "step advantages": trainer.last_step_advantages,
        "table": {
            "advantages": list(trainer._logs["advantages"]),
            **{name: list(column) for name, column in trainer._logs["extra"].items()},
        },
        "references": witness.steps,
        "refreshes": [tuple(refresh) for refresh in trainer.reference_refreshes],
    }


def sampled(run: str, model: Path, output: Path) -> dict[str, Any]:
    """The end of a run, and of one that resumes it."""
    ends = {}
    for name, checkpoint in (("whole", None), ("resumed", str(output / "whole" / INSIDE))):
        torch.manual_seed(PartialState().process_index)  # a new adapter differs between processes until DDP evens it
        trainer = build_sampled(run, model, output / name)
        trainer.train(resume_from_checkpoint=checkpoint)
        ends[name] = resumable.state(trainer)
    return ends


def build_sampled(run: str, model: Path, output: Path) -> Any:
    """A window is 4 steps, the reference moves after 4 and 8, and what it was goes into what it becomes."""
    options = {"ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 3}
    options |= {"max_steps": 10, "save_steps": 7, "build": None}
    return resumable.build(SAMPLED[run], model, output, **options)


def main(model: Path, output: Path, runs: list[str]) -> None:
    torch.set_num_threads(1)
    state = PartialState(cpu=True)
    for run in runs:
        written = (sampled if run in SAMPLED else fixed)(run, model, output / run)
        torch.save(written, output / run / f"rank_{state.process_index}.pt")
    state.wait_for_everyone()
    # gloo's threads now and then abort or hang in the interpreter's exit, after all that is tested here
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
