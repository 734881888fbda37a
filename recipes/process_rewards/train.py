"""Rewards for every line or one for the whole answer, with GSPO-token: SmolLM2-135M adds up four numbers.

python recipes/process_rewards/train.py --config recipes/process_rewards/smollm2-135m-process.yaml [--rewards outcome]
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import run, small_model
from common.advantages import advantages_png
from process_rewards import sums
from trl_steady import GRPOConfig, GRPOTrainer

SHOWN = 6  # completions in the picture of advantages
OBJECTIVE = ("loss_type", "step_advantage", "scale_rewards", "beta")


@dataclass
class RecipeArguments(run.RecipeArguments):
    """The arguments of every recipe, with the kind of reward and the starting model."""

    rewards: str = field(
        default="steps",
        metadata={"help": "'steps': every right line; 'outcome': the whole answer.", "choices": list(sums.REWARDS)},
    )
    start: str = field(
        default="outputs/process_rewards/start",
        metadata={"help": "Folder of the model that has seen worked problems; made if it is missing."},
    )


class Picture(run.TrainerCallback):
    """Draw completions of the first rollout with tokens coloured by advantage. Outcome rewards have no picture."""

    def __init__(self, trainer: GRPOTrainer, path: Path) -> None:
        self.trainer, self.path = trainer, path

    def on_step_end(self, args: GRPOConfig, state: Any, control: Any, **_: Any) -> None:
        """Draw different completions to one problem: the problem with the most different completions."""
        completions, size = self.trainer.last_step_advantages, args.num_generations
        if state.global_step != 1 or not completions or not state.is_world_process_zero:
            return
        different: list[Any] = []
        for start in range(0, len(completions), size):
            by_text: dict[str, Any] = {}
            for completion in completions[start : start + size]:
                by_text["".join(text for text, _ in completion)] = completion
            if len(by_text) > len(different):
                different = list(by_text.values())
        advantages_png(different[:SHOWN], self.path, columns=32)


def main(recipe: RecipeArguments, args: GRPOConfig) -> run.Results:
    """Train and report. Return the contents of `results.json`."""

    def callbacks(trainer: GRPOTrainer) -> list[run.TrainerCallback]:
        return [Picture(trainer, Path(args.output_dir) / "advantages.png")]

    task = sums.Sums(recipe.rewards, Path(recipe.start))
    trainer, found = small_model.train(recipe, args, callbacks, task)
    objective = {"rewards": recipe.rewards, **{name: getattr(args, name) for name in OBJECTIVE}}
    return run.finish(trainer, recipe, {"objective": objective, **found})


if __name__ == "__main__":
    run.start(main, RecipeArguments, GRPOConfig)
