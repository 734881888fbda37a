"""One arm of DeepSeekMath's comparison, on a quantised model that is small enough to rerun: RFT, online RFT or GRPO.

python recipes/deepseekmath/train.py --config recipes/deepseekmath/grpo-outcome.yaml [--seed 1] [--output_dir ...]
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import evaluate, run, small_model
from deepseekmath.chain import Chain, result
from stress.samplers import sampled
from trl_steady import GRPOConfig, GRPOTrainer
from trl_steady.core.types import Rollout

METHODS = ("rft", "online_rft", "grpo")


@dataclass
class RecipeArguments(run.RecipeArguments):
    """The arguments of every recipe, with the method, the rewards and the evaluation."""

    method: str = field(
        default="grpo",
        metadata={
            "help": "'rft': the likelihood of the right answers that the starting model gives. 'online_rft': that of "
            "the policy's right answers. 'grpo': GRPO on the policy's answers.",
            "choices": METHODS,
        },
    )
    rewards: str = field(
        default="outcome",
        metadata={"help": "'outcome': the result. 'process': each step.", "choices": ["outcome", "process"]},
    )
    start: str = field(
        default="outputs/deepseekmath/start", metadata={"help": "Folder of the starting model, made if missing."}
    )
    most_samples: int = field(default=64, metadata={"help": "Answers to each problem for pass@K and maj@K."})


class RightAnswers(GRPOTrainer):
    """Rejection-sampling fine-tuning: right answers have weight 1, wrong ones 0.

    With one update per rollout, every ratio is 1, and GRPO's gradient is that of the weighted log-likelihood
    (DeepSeekMath, arXiv 2402.03300, equations 8 to 11).
    """

    def advantages(self, rollout: Rollout) -> Tensor:
        """Return the rewards, (B,) of 0 and 1."""
        return rollout.rewards


@torch.no_grad()
def from_start(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
    """Answer with the starting model, which is the policy without its adapter. This is a `rollout_func`."""
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    with model.disable_adapter():
        return sampled(model, trainer, prompts)


def main(recipe: RecipeArguments, args: GRPOConfig) -> run.Results:
    """Train one arm and evaluate it. Return the contents of `results.json`."""
    task = Chain(Path(recipe.start), recipe.rewards)
    kind = GRPOTrainer if recipe.method == "grpo" else RightAnswers
    sampler = from_start if recipe.method == "rft" else None
    trainer, found = small_model.train(recipe, args, lambda _: (), task, kind=kind, rollout_func=sampler)

    found["arm"] = {name: getattr(recipe, name) for name in ("method", "rewards")}
    problems = {"held out": task.split(recipe.held_out)[1], "large digits": task.large(recipe.held_out)}
    found["scores"] = {
        name: evaluate.evaluate(
            trainer.model,
            trainer.processing_class,
            [task.prompt(problem) for problem in own],
            [str(sum(problem) % 10) for problem in own],
            {name: result},
            samples=recipe.most_samples,
            max_new_tokens=args.max_completion_length,
            batch=640,
        )[name]
        for name, own in problems.items()
    }
    return run.finish(trainer, recipe, found)


if __name__ == "__main__":
    run.start(main, RecipeArguments, GRPOConfig)
