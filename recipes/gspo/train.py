"""GSPO with LoRA on SmolLM2-135M-Instruct in NF4, on CPU or GPU.

python recipes/gspo/train.py --config recipes/gspo/smollm2-135m-comparison.yaml [--seed 1] [--output_dir ...]
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trl import TrlParser

sys.path.insert(0, str(Path(__file__).parents[1]))

from matplotlib.axes import Axes

from common import report, run, small_model
from common.run import RecipeArguments
from trl_steady import GRPOConfig


def describe(logs: Mapping[str, Any]) -> str:
    """Describe one update in the progress line."""
    return (
        f"  ratio {logs['ratio/sequence_min']:.4f} .. {logs['ratio/sequence_max']:.4f}"
        f"  clipped {logs['clip_ratio/region_mean']:.0%}"
    )


def ratios(axis: Axes, results: Mapping[str, Any]) -> None:
    """Draw the sequence ratio: smallest, mean, largest."""
    for name, style in (("max", ":"), ("mean", "-"), ("min", ":")):
        axis.plot(*report.series(results["history"], f"ratio/sequence_{name}"), style, color="tab:purple", label=name)
    axis.set(title="Sequence ratio $s_i$", yscale="log")
    axis.legend()


def clips(axis: Axes, results: Mapping[str, Any]) -> None:
    """Draw the share of sequences clipped."""
    steps, shares = report.series(results["history"], "clip_ratio/region_mean")
    axis.plot(steps, shares, "o-", color="tab:red", markersize=3)
    axis.set(title="Share of sequences clipped", ylim=(0, 1))


def main(recipe: RecipeArguments, args: GRPOConfig) -> run.Results:
    """Evaluate, train, evaluate and report. Return the contents of `results.json`."""
    trainer, found = small_model.train(recipe, args, lambda _: [run.Progress(describe)])
    return run.finish(trainer, recipe, found, ((report.rewards, report.accuracies), (ratios, clips)))


if __name__ == "__main__":
    main(*TrlParser((RecipeArguments, GRPOConfig)).parse_args_and_config())
