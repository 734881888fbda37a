"""The tasks a config can name: the larger of two numbers on the small model, or GSM8K on one from the hub."""

from dataclasses import dataclass, field

from common import gsm8k, run, small_model
from trl_steady import GRPOConfig, GRPOTrainer

TASKS = {"max": small_model.train, "gsm8k": gsm8k.train}


@dataclass
class RecipeArguments(run.RecipeArguments):
    """With the task."""

    task: str = field(
        default="max",
        metadata={"help": "'max': the larger of two numbers, SmolLM2-135M; 'gsm8k': GSM8K.", "choices": list(TASKS)},
    )
    model_name: str | None = field(default=None, metadata={"help": "Model of the task gsm8k, on the hub or a folder."})


def train(recipe: RecipeArguments, args: GRPOConfig, callbacks: run.Callbacks) -> tuple[GRPOTrainer, run.Results]:
    """On the task that `recipe` names; returns the trainer and what the task has measured."""
    return TASKS[recipe.task](recipe, args, callbacks)
