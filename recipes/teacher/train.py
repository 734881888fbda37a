"""A teacher beside rewards: a small model sorts digits, and a trained model or its own start with the solution helps.

python recipes/teacher/train.py recipes/teacher/digits.yaml [--seeds 0] [--arms rewards "self, weight"] [--jobs 2]

The other arguments are those of recipes/stress/experiment.py.
"""

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import torch
from datasets import Dataset

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import run
from moe import digits
from moe.digits import BEGIN, Digits, Problem, answer
from stress import experiment
from stress.checks import Checks
from trl_steady import GRPOConfig, GRPOTrainer

START, TRAINED = "start-solved", "trained"
HELD_OUT = 200
TEACHER_STEPS = 500  # of the trained teacher's warm start
LOGGED = ("reward", "grad_norm", "teacher/kl", "teacher/agreement")


@dataclass
class SolvedDigits(Digits):
    """The task, for a dense model whose warm start also reads prompts with the solution in them."""

    dense: bool = True

    def solved_prompt(self, problem: Problem) -> str:
        """Return the solution, a colon, and the prompt."""
        solution = answer(problem).removesuffix(digits.END)
        return f"{BEGIN}{solution}:{self.prompt(problem).removeprefix(BEGIN)}"

    def worked(self) -> list[tuple[str, str]]:
        """Return batches of plain prompts and of prompts with the solution, in turn. A batch has one length."""
        examples: list[tuple[str, str]] = []
        problems = digits.draw(digits.WORKED_STEPS * digits.WORKED_BATCH)
        for start in range(0, len(problems), digits.WORKED_BATCH):
            batch = problems[start : start + digits.WORKED_BATCH]
            examples += [(self.prompt(problem), answer(problem)) for problem in batch]
            examples += [(self.solved_prompt(problem), answer(problem)) for problem in batch]
        return examples


@dataclass
class TeacherDigits(Digits):
    """The task, for a dense model that reads more worked examples, all of them plain. It is the trained teacher."""

    dense: bool = True

    def worked(self) -> list[tuple[str, str]]:
        """Return worked examples of problems that follow the policy's: the worked, the held-out and its training's."""
        known = digits.WORKED_STEPS * digits.WORKED_BATCH + HELD_OUT + digits.TRAINING
        problems = digits.draw(known + TEACHER_STEPS * digits.WORKED_BATCH)[known:]
        return [(self.prompt(problem), answer(problem)) for problem in problems]


@dataclass(frozen=True)
class Arm:
    """The settings of one arm. The YAML file has these keys."""

    options: Mapping[str, Any]
    """Options of `GRPOConfig`."""
    teacher: Literal["trained", "self"] | None = None
    """A model that has read more worked examples, or the reference, which reads the solution; None: no teacher."""
    rewards: bool = True
    """False: all rewards are 0, so that the teacher is alone."""


def no_reward(completions: list[str], **_: Any) -> list[float]:
    """Return 0 for each completion."""
    return [0.0] * len(completions)


def teacher_options(arm: Arm, folder: Path) -> dict[str, Any]:
    """Return the options that name the arm's teacher."""
    if arm.teacher == "trained":
        return {"teacher": str(folder / TRAINED)}
    if arm.teacher == "self":
        return {"teacher": "reference", "teacher_prompt": "solved"}
    return {}


def build(arm: Arm, seed: int, folder: Path, output: str, task: SolvedDigits, held_out: int) -> GRPOTrainer:
    """Return the arm's trainer. Each row has the prompt with the solution too."""
    model, tokenizer = task.load(Path(output), quantised=False)
    is_cpu = not torch.cuda.is_available()  # transformers refuses bf16 on a CPU that the script does not name
    options = {**arm.options, **teacher_options(arm, folder)}
    args = GRPOConfig(output_dir=output, seed=seed, use_cpu=is_cpu, **options)
    reward = task.reward
    if not arm.rewards:
        reward = no_reward
    rows: list[dict[str, Any]] = []
    for problem in task.split(held_out)[0]:
        prompts = {"prompt": task.prompt(problem), "solved": task.solved_prompt(problem)}
        rows.append({**prompts, "problem": list(problem)})
    return GRPOTrainer(model, reward, args, Dataset.from_list(rows), processing_class=tokenizer)


def train(arm: Arm, seed: int, folder: Path, measured: Mapping[str, Any]) -> dict[str, Any]:
    """Train one arm with one seed, and return its figures.

    Args:
        arm: The arm.
        seed: Seeds the order of the problems and the answers. All arms begin with the same rollout.
        folder: Folder of the starting models.
        measured: Arguments of `Checks`.
    """
    began = time.monotonic()
    task = SolvedDigits(folder / START)
    with TemporaryDirectory() as output:
        trainer = build(arm, seed, folder, output, task, measured["held_out"])
        trainer.remove_callback(run.PrinterCallback)
        checks = Checks(trainer, task, **measured)
        trainer.add_callback(checks)
        trainer.train()
    figures = {**checks.found, **run.logged(trainer.state.log_history, LOGGED)}
    figures["seconds"] = round(time.monotonic() - began)
    return figures


def prepare(arm: Arm, folder: Path) -> None:
    """Make the starting model, and the trained teacher if the arm has it."""
    SolvedDigits(folder / START).load(folder, quantised=False)
    if arm.teacher == "trained":
        TeacherDigits(folder / TRAINED).load(folder, quantised=False)


def answers_table(plan: Mapping[str, Any], runs: experiment.Runs) -> str:
    """Return a table in Markdown: after how many answers an arm is as good as the baseline at its end.

    The accuracy is the mean over seeds, and runs on a straight line between two checks.
    """
    curves = {arm: _mean_accuracy(of_seeds) for arm, of_seeds in runs.items()}
    level = curves[plan["baseline"]][-1][1]
    per_update = plan["options"]["per_device_train_batch_size"]
    lines = ["| arm | updates | answers |", "|---|---|---|"]
    for arm, curve in curves.items():
        updates = _updates_to(level, curve)
        if updates is None:
            lines.append(f"| {arm} | not reached | |")
        else:
            lines.append(f"| {arm} | {updates:.0f} | {updates * per_update:,.0f} |")
    return "\n".join(lines)


def _mean_accuracy(of_seeds: Mapping[int, Mapping[str, Any]]) -> list[tuple[int, float]]:
    """Return the updates of the checks, and the mean accuracy of the seeds."""
    checks = [figures["accuracy"] for figures in of_seeds.values()]
    return [(int(update), float(np.mean([own[update] for own in checks]))) for update in checks[0]]


def _updates_to(level: float, curve: list[tuple[int, float]]) -> float | None:
    """Return after how many updates a curve first reaches a level; None if it does not."""
    for (before, low), (after, high) in pairwise(curve):
        if high >= level:
            return before + (after - before) * max(level - low, 0) / (high - low)
    return None


if __name__ == "__main__":
    results = experiment.main(kind=experiment.Kind(Arm, prepare, train))
    print(answers_table(results["settings"], results["runs"]))
