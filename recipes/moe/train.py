"""GRPO on a small mixture of experts with four updates per rollout, with or without replay of the routes.

python recipes/moe/train.py --config recipes/moe/qwen3-moe-digits.yaml [--router_replay R2] [--loss_type gspo]
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import gsm8k, run, small_model
from moe import digits, probe
from trl_steady import GRPOConfig, GRPOTrainer

PROBED = 100  # held-out problems


@dataclass
class RecipeArguments(run.RecipeArguments):
    """The arguments of every recipe, with the task and the starting model."""

    task: str = field(
        default="digits", metadata={"help": "'digits': sort them; 'gsm8k': GSM8K.", "choices": ["digits", "gsm8k"]}
    )
    model_name: str | None = field(default=None, metadata={"help": "Model for gsm8k: a hub name or a folder."})
    start: str = field(
        default="outputs/moe/start",
        metadata={"help": "Folder of the small model after its warm start; made if it is missing."},
    )


def main(recipe: RecipeArguments, args: GRPOConfig) -> run.Results:
    """Train and report. Return the contents of `results.json`."""
    objective = {name: getattr(args, name) for name in ("loss_type", "epsilon", "epsilon_high", "router_replay")}
    if recipe.task == "gsm8k":
        trainer, found = gsm8k.train(recipe, args, lambda _: [])
        return run.finish(trainer, recipe, {"objective": objective, **found})
    task = digits.Digits(Path(recipe.start))
    _, held_out = task.split(recipe.held_out)

    def callbacks(trainer: GRPOTrainer) -> list[run.TrainerCallback]:
        return [probe.Probe(trainer, held_out[:PROBED], task)]

    trainer, found = small_model.train(recipe, args, callbacks, task)
    return run.finish(trainer, recipe, {"objective": objective, **found})


if __name__ == "__main__":
    run.start(main, RecipeArguments, GRPOConfig)
