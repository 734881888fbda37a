"""A run on a small model and a small task, by default `common.task`: evaluate, train, evaluate."""

import copy
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from datasets import Dataset
from transformers import TrainerCallback

from common import report, run
from common import task as larger
from trl_steady import GRPOConfig, GRPOTrainer, PPOConfig, PPOTrainer

BATCH = 200  # answers generated at once in an evaluation
Problem = tuple[int, ...]


class Task(Protocol):
    """The interface of a task. A module with these names is enough.

    All prompts must have the same number of tokens.
    """

    PREAMBLE: str  # the beginning of every prompt
    STOP: str  # a token that ends an answer, in addition to the end-of-sequence token; may be empty

    def prompt(self, problem: Any) -> str:
        """Return the prompt of a problem."""
        ...

    def is_right(self, problem: Any, completion: str) -> bool:
        """Return True if the completion is the right answer. Its text includes special tokens."""
        ...

    def reward(self, completions: list[str], problem: list[list[int]], **_: Any) -> list[Any]:
        """Return the rewards for training. The texts have no special tokens."""
        ...

    def load(self, folder: Path, quantised: bool) -> Any:
        """Load the starting model and its tokenizer. `folder` is for the base weights that an adapter refers to."""
        ...

    def split(self, held_out: int) -> tuple[Sequence[Problem], Sequence[Problem]]:
        """Return the training problems and the held-out problems."""
        ...


@torch.no_grad()
def right_answers(
    trainer: GRPOTrainer, problems: Sequence[Problem], *, samples: int, task: Task = larger
) -> np.ndarray:
    """Return (problems, samples) of 0 and 1. `samples=0` decodes once, greedily.

    The model reads the preamble once, and every answer starts from its cache.
    """
    model, tokenizer, args = trainer.model.eval(), trainer.processing_class, trainer.args
    asked = [problem for problem in problems for _ in range(max(samples, 1))]
    how = {"do_sample": True, "temperature": args.temperature, "top_k": 0} if samples else {"do_sample": False}
    preamble = tokenizer(task.PREAMBLE, return_tensors="pt").to(model.device)
    read = model(**preamble, use_cache=True).past_key_values
    scores: list[bool] = []
    for start in range(0, len(asked), BATCH):
        batch = asked[start : start + BATCH]
        inputs = tokenizer([task.prompt(problem) for problem in batch], return_tensors="pt").to(model.device)
        cache = copy.deepcopy(read)
        cache.batch_repeat_interleave(len(batch))
        answers = model.generate(**inputs, past_key_values=cache, max_new_tokens=args.max_completion_length, **how)
        texts = tokenizer.batch_decode(answers[:, inputs["input_ids"].size(1) :])
        scores += [task.is_right(problem, text) for problem, text in zip(batch, texts, strict=True)]
        if len(asked) > BATCH:
            print(f"           {len(scores)} of {len(asked)} answers", flush=True)
    model.train()
    return np.array(scores, dtype=float).reshape(len(problems), -1)


def counts(right: np.ndarray) -> str:
    """Return one digit per problem: the number of its right samples, at most nine. Use it to compare runs."""
    return "".join(str(int(n)) for n in right.sum(axis=1))


class Checks(TrainerCallback):
    """Measure greedy accuracy on held-out problems every `rollouts` rollouts. The history survives a resume."""

    NAME = "held-out greedy accuracy"

    def __init__(self, trainer: GRPOTrainer, problems: Sequence[Problem], task: Task, rollouts: int) -> None:
        self.trainer, self.problems, self.task, self.rollouts = trainer, problems, task, rollouts

    def on_log(self, args: GRPOConfig, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Check after the last update of every `rollouts`-th rollout."""
        updates = self.rollouts * run.updates_per_rollout(args)
        if not logs or "loss" not in logs or state.global_step % updates:
            return
        share = float(right_answers(self.trainer, self.problems, samples=0, task=self.task).mean())
        print(f"           held out, greedy: {share:.1%} of {len(self.problems)} right", flush=True)
        state.log_history.append({"step": state.global_step, self.NAME: share})


def build(
    recipe: run.RecipeArguments,
    args: GRPOConfig,
    task: Task = larger,
    *,
    reward: Any = None,
    kind: type[GRPOTrainer] | None = None,
    **keywords: Any,
) -> GRPOTrainer:
    """Return a trainer with the model, the task and the adapters. A `PPOConfig` gives a trainer with a critic.

    `reward` replaces the task's reward, and `kind` the class. `keywords` are arguments of the trainer.
    """
    print("Loading the model" + (" and quantising it to NF4" if recipe.quantised else ""), flush=True)
    model, tokenizer = task.load(Path(args.output_dir) / "base", recipe.quantised)
    stop = tokenizer.encode(task.STOP, add_special_tokens=False)
    model.generation_config.eos_token_id = [*stop, tokenizer.eos_token_id]
    problems, _ = task.split(recipe.held_out)
    kind = kind or (PPOTrainer if isinstance(args, PPOConfig) else GRPOTrainer)
    return kind(
        model,
        reward or task.reward,
        args,
        Dataset.from_list([{"prompt": task.prompt(problem), "problem": list(problem)} for problem in problems]),
        processing_class=tokenizer,
        peft_config=recipe.adapter,
        **keywords,
    )


def train(
    recipe: run.RecipeArguments,
    args: GRPOConfig,
    callbacks: run.Callbacks,
    task: Task = larger,
    **keywords: Any,
) -> tuple[GRPOTrainer, run.Results]:
    """Evaluate, train, evaluate again, and print the table. `keywords` are those of `build`."""
    started = time.monotonic()
    trainer, (problems, test) = build(recipe, args, task, **keywords), task.split(recipe.held_out)
    run.rehearse(trainer)
    checked = test[: len(test) // 2]
    loaded = time.monotonic()

    print(f"Before: {len(test)} held-out problems, {recipe.samples} samples each, and greedily", flush=True)
    torch.manual_seed(args.seed)
    names = {recipe.samples: f"sampled at temperature {args.temperature:g}, {recipe.samples} each", 0: "greedy"}

    def measured() -> dict[int, np.ndarray]:
        found = {}
        for samples, name in names.items():
            found[samples] = right_answers(trainer, test, samples=samples, task=task)
            print(f"           held out, {name}: {found[samples].mean():.1%} right", flush=True)
        return found

    before = measured()
    evaluated = time.monotonic()
    print(f"Training: {args.max_steps} updates, {run.updates_per_rollout(args)} for each rollout", flush=True)
    run.train(trainer, [*callbacks(trainer), Checks(trainer, checked, task, recipe.check_every)])
    trained = time.monotonic()
    print("After", flush=True)
    after = measured()

    rows = {name: report.difference(before[n], after[n]) for n, name in names.items()}
    print(f"\n{report.table(rows)}\n", flush=True)
    checks = zip(*report.series(trainer.state.log_history, Checks.NAME), strict=True)
    return trainer, {
        "problems": {"training": len(problems), "held out": len(test)},
        "accuracy": {name: row._asdict() for name, row in rows.items()},
        "right answers to each held-out problem": {
            name: {"before": counts(before[n]), "after": counts(after[n])} for n, name in names.items()
        },
        "seconds": {
            "loading": round(loaded - started),
            "evaluation before": round(evaluated - loaded),
            "training": round(trained - evaluated),
            "in all": round(time.monotonic() - started),
        },
        "held-out greedy accuracy by step": {0: float(before[0][: len(checked)].mean()), **dict(checks)},
    }
