"""Iterative GRPO as in DeepSeekMath, with a KL reference that moves: a small model on any device, or a 7B on a GPU.

python recipes/iterative_grpo/train.py --config recipes/iterative_grpo/smollm2-135m.yaml [--seed 1] [--output_dir ...]
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import run, tasks
from common.tasks import RecipeArguments
from trl_steady import GRPOConfig, GRPOTrainer


class Refreshes(run.TrainerCallback):
    """Print one line per refresh of the reference, before the first update with it."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self.trainer, self.told = trainer, 0

    def on_train_begin(self, args: GRPOConfig, state: Any, control: Any, **_: Any) -> None:
        """Skip the refreshes from before a resume."""
        self.told = len(self.trainer.reference_refreshes)

    def on_step_end(self, args: GRPOConfig, state: Any, control: Any, **_: Any) -> None:
        """Print the new refreshes, before the trainer prints its log."""
        if not state.is_world_process_zero:
            return
        for refresh in self.trainer.reference_refreshes[self.told :]:
            self.told += 1
            kl = "" if refresh.kl is None else f", KL {refresh.kl:.4f} before"
            text = f"-- refresh {self.told} after update {refresh.step} ({refresh.rule}): reference = policy{kl}"
            print(text, flush=True)


def main(recipe: RecipeArguments, args: GRPOConfig) -> run.Results:
    """Train and report. Return the contents of `results.json`."""
    trainer, found = tasks.train(recipe, args, lambda trainer: [Refreshes(trainer)])
    found["refreshes"] = [refresh._asdict() for refresh in trainer.reference_refreshes]
    return run.finish(trainer, recipe, found)


if __name__ == "__main__":
    run.start(main, RecipeArguments, GRPOConfig)
