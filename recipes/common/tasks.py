"""The tasks that a config can name: the larger of two numbers on the small model, or GSM8K on a model from the hub."""

from dataclasses import dataclass, field
from typing import Any

from common import gsm8k, run, small_model, task
from trl_steady import GRPOConfig, GRPOTrainer

TASKS = {"max": small_model.train, "gsm8k": gsm8k.train}


@dataclass
class RecipeArguments(run.RecipeArguments):
    """The arguments of every recipe, with the task."""

    task: str = field(
        default="max",
        metadata={"help": "'max': the larger of two numbers, SmolLM2-135M; 'gsm8k': GSM8K.", "choices": list(TASKS)},
    )
    model_name: str | None = field(default=None, metadata={"help": "Model for gsm8k: a hub name or a folder."})


def rule(recipe: RecipeArguments) -> Any:
    """Return the reward function of the task that `recipe` names: 1 for a right answer, and 0 for a wrong one."""
    return task.reward if recipe.task == "max" else gsm8k.accuracy_reward


def train(
    recipe: RecipeArguments, args: GRPOConfig, callbacks: run.Callbacks, *, reward: Any = None
) -> tuple[GRPOTrainer, run.Results]:
    """Train on the task that `recipe` names. Return the trainer and the measurements of the task.

    `reward` replaces the task's reward.
    """
    return TASKS[recipe.task](recipe, args, callbacks, reward=reward)
