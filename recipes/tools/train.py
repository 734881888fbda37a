"""Rewards for turns or for the outcome, with groups and with one completion per prompt: a small model calls a tool.

python recipes/tools/train.py recipes/tools/drawers.yaml [--seeds 0] [--arms outcome turns] [--jobs 2]

The other arguments are those of recipes/stress/experiment.py.
"""

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from datasets import Dataset

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import run
from stress import experiment
from tools import drawers
from trl_steady import GRPOConfig, GRPOTrainer, PPOConfig, PPOTrainer

START = "start-drawers"
CHECKED = {"eval_right": "accuracy", "eval_right_turns": "turns"}
LOGGED = (
    "right",
    "right_turns",
    "grad_norm",
    "frac_reward_zero_std",
    "value/explained_variance",
    "tools/call_frequency",
)


@dataclass(frozen=True)
class Arm:
    """The settings of one arm. The YAML file has these keys."""

    options: Mapping[str, Any]
    """Options of `GRPOConfig`, or of `PPOConfig`."""
    rewards: str = "outcome"
    """A key of `drawers.REWARDS`."""
    critic: bool = False
    """Train with PPO."""


def build(arm: Arm, seed: int, folder: Path, output: str, measured: Mapping[str, Any]) -> GRPOTrainer:
    """Return the arm's trainer. Its environment gives each completion a chest of drawers."""
    config, kind = (PPOConfig, PPOTrainer) if arm.critic else (GRPOConfig, GRPOTrainer)
    args = config(output_dir=output, seed=seed, **arm.options)
    model, tokenizer = drawers.load(folder / START)
    training, held_out, _ = drawers.split(measured["held_out"])
    data = [
        Dataset.from_list([{"prompt": drawers.ask(question), "question": question} for question in questions])
        for questions in (training, held_out)
    ]
    return kind(
        *(model, drawers.reward(arm.rewards), args, *data),
        processing_class=tokenizer,
        environment_factory=drawers.Drawers,
    )


def train(arm: Arm, seed: int, folder: Path, measured: Mapping[str, Any]) -> dict[str, Any]:
    """Train one arm with one seed, and return its figures.

    Args:
        arm: The arm.
        seed: Seed of the run.
        folder: Has the starting model, or gets it.
        measured: `held_out`, the number of held-out questions.
    """
    began = time.monotonic()
    with TemporaryDirectory() as output:
        trainer = build(arm, seed, folder, output, measured)
        trainer.remove_callback(run.PrinterCallback)
        trainer.train()
    history = trainer.state.log_history
    figures: dict[str, Any] = {}
    for key, name in CHECKED.items():
        figures[name] = {row["step"]: round(row[key], 6) for row in history if key in row}
    figures |= run.logged(history, LOGGED)
    figures["seconds"] = round(time.monotonic() - began)
    return figures


def prepare(_: Arm, folder: Path) -> None:
    """Make the starting model."""
    drawers.load(folder / START)


if __name__ == "__main__":
    experiment.main(kind=experiment.Kind(Arm, prepare, train))
