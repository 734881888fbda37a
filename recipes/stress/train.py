"""One run of an experiment: GRPO on the digit-sorting task, with a sampler that is not the policy.

`experiment.py` starts these runs.
"""

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PrinterCallback, TrainerCallback

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import run, small_model
from moe.digits import Digits
from stress.samplers import Sampler
from trl_steady import GRPOConfig, GRPOTrainer

__all__ = ["Arm", "Stressed", "train"]

OUTSIDE = 0.2  # a ratio is far off if it is not within this of 1
LOGGED = ("reward", "grad_norm", "clip_ratio/region_mean", "kl", "ratio/sequence_max")


@dataclass(frozen=True)
class Arm:
    """The settings of one arm. The YAML file of an experiment has these keys."""

    options: Mapping[str, Any]
    """Options of `GRPOConfig`."""
    sampler: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `Sampler`."""
    correction: str | None = None
    """TRL's `vllm_importance_sampling_mode`, with its default limit; None: no correction for the engine."""
    old: str = "policy"
    """The model that gives the old log-probs: the "policy", which scores each rollout again, or the "sampler"."""


class Stressed(GRPOTrainer):
    """A trainer whose rollouts come from a `Sampler`. It notes how far sampler and policy are apart.

    TRL corrects for an engine only with `use_vllm`. There is no vLLM here, so this class switches `use_vllm` on after
    the completions were made, where TRL reads it to compute the correction.
    """

    def __init__(self, arm: Arm, *arguments: Any, **keywords: Any) -> None:
        self.arm, self.sampler = arm, Sampler(**arm.sampler)
        self.apart: list[dict[str, float]] = []
        """For each rollout: `outside`, the share of tokens whose ratio of policy to sampler is not in 0.8 to 1.2, and
        `ess`, the effective sample size of the answers' ratios, as a share of their number."""
        super().__init__(*arguments, rollout_func=self._sampled, **keywords)
        if arm.correction is not None:
            self.vllm_importance_sampling_mode = arm.correction

    def _sampled(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        completions = self.sampler(prompts, trainer)
        self.use_vllm = self.arm.correction is not None
        return completions

    def rollout(self, inputs: Any) -> dict[str, Any]:
        """Make a rollout with the sampler."""
        self.use_vllm = False  # TRL would send weights to vLLM
        samples = super().rollout(inputs)
        old, sampler = samples["old_per_token_logps"], samples["sampling_per_token_logps"]
        self.apart.append(_apart((old - sampler).double(), samples["completion_mask"].bool()))
        if self.arm.old == "sampler":
            samples["old_per_token_logps"] = sampler
        return samples


def _apart(log_ratios: Tensor, is_token: Tensor) -> dict[str, float]:
    ratios = log_ratios[is_token].exp()
    weights = (log_ratios * is_token).sum(dim=1).exp()
    return {
        "outside": ((ratios - 1).abs() > OUTSIDE).double().mean().item(),
        "ess": (weights.sum().square() / weights.square().sum() / len(weights)).item(),
    }


class Checks(TrainerCallback):
    """Sample answers to held-out problems with the policy itself, without changing the run's random numbers."""

    def __init__(self, trainer: GRPOTrainer, task: Digits, held_out: int, samples: int, every: int) -> None:
        self.trainer, self.task, self.samples, self.every = trainer, task, samples, every
        _, self.problems = task.split(held_out)
        self.accuracies: dict[int, float] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Check the untrained policy."""
        self._check(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Check after every `every` updates."""
        if state.global_step % self.every == 0:
            self._check(state.global_step)

    def _check(self, step: int) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(self.trainer.args.seed)
            right = small_model.right_answers(self.trainer, self.problems, samples=self.samples, task=self.task)
        self.accuracies[step] = float(right.mean())


def train(arm: Arm, seed: int, start: Path, measured: Mapping[str, int]) -> dict[str, Any]:
    """Train one arm with one seed, and return its figures.

    Args:
        arm: The arm.
        seed: Seeds the order of the problems and the answers. Arms with the same sampler begin with the same rollout.
        start: Folder of the starting model.
        measured: Numbers of `held_out` problems, of `samples` of each, and of updates between two checks (`every`).
    """
    began, task = time.monotonic(), Digits(start, dense=True)
    problems, _ = task.split(measured["held_out"])
    with TemporaryDirectory() as output:
        model, tokenizer = task.load(Path(output), quantised=False)
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        args = GRPOConfig(output_dir=output, seed=seed, **arm.options)
        rows = [{"prompt": task.prompt(problem), "problem": list(problem)} for problem in problems]
        trainer = Stressed(arm, model, task.reward, args, Dataset.from_list(rows), processing_class=tokenizer)
        trainer.remove_callback(PrinterCallback)
        checks = Checks(trainer, task, **measured)
        trainer.add_callback(checks)
        trainer.train()
    history = [row for row in trainer.state.log_history if "loss" in row]
    names = [name for name in LOGGED if any(name in row for row in history)]
    each = run.updates_per_rollout(args)
    return {
        "accuracy": {step: round(share, 6) for step, share in checks.accuracies.items()},
        **{name: _rounded([row.get(name) for row in history][each - 1 :: each]) for name in names},
        **{name: _rounded([own[name] for own in trainer.apart]) for name in ("outside", "ess")},
        "seconds": round(time.monotonic() - began),
    }


def _rounded(values: list[Any]) -> list[Any]:
    """Four digits, to keep the files small. The last update of each rollout is enough for a curve."""
    return [None if value is None else float(f"{value:.4g}") for value in values]
