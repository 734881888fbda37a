"""The tasks that a config can name: the larger of two numbers on the small model, or GSM8K on a model from the hub."""

from dataclasses import dataclass, field

from common import gsm8k, run, small_model
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


def train(recipe: RecipeArguments, args: GRPOConfig, callbacks: run.Callbacks) -> tuple[GRPOTrainer, run.Results]:
    """Train on the task that `recipe` names. Return the trainer and the measurements of the task."""
    return TASKS[recipe.task](recipe, args, callbacks)
