"""GRPO on a small mixture of experts with four updates per rollout, with or without replay of the routes.

python recipes/moe/train.py --config recipes/moe/qwen3-moe-digits.yaml [--router_replay R2] [--loss_type gspo]
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from trl import TrlParser

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import gsm8k, report, run, small_model
from moe import digits, probe, variants
from trl_steady import GRPOConfig, GRPOTrainer

PROBED = 100  # held-out problems
PICTURE = ((report.rewards, report.accuracies), (variants.ratios, variants.routes))
LOGGED = {"mismatch/kl": "KL of engine and trainer, nats a token", "routing/changed": "Experts that a replay changes"}
PICTURE_GSM8K = (
    (report.rewards, report.accuracies),
    [partial(variants.logged, name=name, title=title) for name, title in LOGGED.items()],
)


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


def describe(logs: Mapping[str, Any]) -> str:
    """Describe one update in the progress line."""
    shown = {"ratio min": "ratio/sequence_min", "max": "ratio/sequence_max", "clipped": "clip_ratio/region_mean"}
    shown |= {"routes changed": "routing/changed"}
    return "".join(f"  {label} {logs[name]:.3g}" for label, name in shown.items() if name in logs)


def main(recipe: RecipeArguments, args: GRPOConfig) -> run.Results:
    """Train and report. Return the contents of `results.json`."""
    objective = {name: getattr(args, name) for name in ("loss_type", "epsilon", "epsilon_high", "router_replay")}
    if recipe.task == "gsm8k":
        trainer, found = gsm8k.train(recipe, args, lambda _: [run.Progress(describe)])
        return run.finish(trainer, recipe, {"objective": objective, **found}, PICTURE_GSM8K)
    task = digits.Digits(Path(recipe.start))
    _, held_out = task.split(recipe.held_out)

    def callbacks(trainer: GRPOTrainer) -> list[run.TrainerCallback]:
        return [run.Progress(describe), probe.Probe(trainer, held_out[:PROBED], task)]

    trainer, found = small_model.train(recipe, args, callbacks, task)
    return run.finish(trainer, recipe, {"objective": objective, **found}, PICTURE)


if __name__ == "__main__":
    main(*TrlParser((RecipeArguments, GRPOConfig)).parse_args_and_config())
