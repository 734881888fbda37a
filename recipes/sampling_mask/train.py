"""GRPO with top-p sampling and four updates per rollout: log-probs over the kept tokens, or over all tokens.

python recipes/sampling_mask/train.py --config recipes/sampling_mask/digits-top-p.yaml [--keep_sampling_mask true]
"""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import report, run, small_model
from common import task as larger
from moe import digits
from sampling_mask import sampler
from trl_steady import GRPOConfig, GRPOTrainer

OBJECTIVE = ("loss_type", "epsilon", "epsilon_high", "beta", "temperature", "top_p", "top_k", "min_p")


@dataclass
class RecipeArguments(run.RecipeArguments):
    """The arguments of every recipe, with the task, the starting model and one more evaluation."""

    task: str = field(
        default="digits",
        metadata={"help": "'digits': sort them; 'max': the larger of two, SmolLM2.", "choices": ["digits", "max"]},
    )
    start: str = field(
        default="outputs/sampling_mask/start",
        metadata={"help": "Folder of the small model after its warm start; made if it is missing."},
    )
    asked_top_p: float = field(
        default=0.9,
        metadata={"help": "Also answer held-out problems with this top_p, in every variant."},
    )


@contextlib.contextmanager
def asked_with(model: Any, top_p: float) -> Iterator[None]:
    """Set this top_p in the model's generation config while the context is open."""
    settings = model.generation_config
    own = settings.do_sample, settings.top_p
    settings.do_sample, settings.top_p = True, top_p  # transformers warns of a top_p without do_sample
    try:
        yield
    finally:
        settings.do_sample, settings.top_p = own


class Truncated(run.TrainerCallback):
    """Answer held-out problems with a top_p before and after training, without changing the run's random numbers."""

    def __init__(self, trainer: GRPOTrainer, recipe: RecipeArguments, task: small_model.Task) -> None:
        self.trainer, self.recipe, self.task = trainer, recipe, task
        self.right: list[np.ndarray] = []

    @property
    def name(self) -> str:
        """The key in the results."""
        return f"sampled with top_p {self.recipe.asked_top_p:g}, {self.recipe.samples} each"

    def found(self) -> dict[str, Any]:
        """Return the results before and after, in the format of `small_model.train`."""
        before, after = self.right
        counts = {"before": small_model.counts(before), "after": small_model.counts(after)}
        return {
            "accuracy": {self.name: report.difference(before, after)._asdict()},
            "right answers to each held-out problem": {self.name: counts},
        }

    def on_train_begin(self, args: GRPOConfig, state: Any, control: Any, **_: Any) -> None:
        """Answer before training."""
        self._ask(args.seed)

    def on_train_end(self, args: GRPOConfig, state: Any, control: Any, **_: Any) -> None:
        """Answer after training."""
        self._ask(args.seed)

    def _ask(self, seed: int) -> None:
        _, held_out = self.task.split(self.recipe.held_out)
        with torch.random.fork_rng(), asked_with(self.trainer.model, self.recipe.asked_top_p):
            torch.manual_seed(seed)
            asked = partial(small_model.right_answers, self.trainer, held_out, samples=self.recipe.samples)
            self.right.append(asked(task=self.task))


def main(recipe: RecipeArguments, args: GRPOConfig) -> run.Results:
    """Train and report. Return the contents of `results.json`."""
    task: Any = digits.Digits(Path(recipe.start)) if recipe.task == "digits" else larger
    truncated: list[Truncated] = []

    def callbacks(trainer: GRPOTrainer) -> Sequence[run.TrainerCallback]:
        truncated.append(Truncated(trainer, recipe, task))
        return [sampler.Sampler(trainer), *truncated]

    trainer, found = small_model.train(recipe, args, callbacks, task)
    for name, own in truncated[0].found().items():
        found[name] |= own
    found["objective"] = {name: getattr(args, name) for name in (*OBJECTIVE, "keep_sampling_mask")}
    off_one, off_mass = sampler.first_updates(trainer.state.log_history)
    print(f"first updates: ratios are within {off_one:.2g} of 1, within {off_mass:.2g} of the kept mass", flush=True)
    return run.finish(trainer, recipe, found)


if __name__ == "__main__":
    run.start(main, RecipeArguments, GRPOConfig)
