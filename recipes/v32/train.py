"""DeepSeek-V3.2's KL, mask and advantages with token ratios: a small model on any device, or a 7B on a GPU.

python recipes/v32/train.py --config recipes/v32/smollm2-135m-v32.yaml [--seed 1] [--output_dir ...]
"""

import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import run, tasks
from common.tasks import RecipeArguments
from trl_steady import GRPOConfig

OBJECTIVE = ("loss_type", "beta", "use_bias_correction_kl", "kl_ratio_denominator", "scale_rewards", "epsilon")


def objective(args: GRPOConfig) -> dict[str, Any]:
    """Return the objective's options for `results.json`. An infinite threshold, which JSON lacks, becomes None."""
    threshold = args.off_policy_mask_threshold
    finite = threshold is not None and math.isfinite(threshold)
    return {name: getattr(args, name) for name in OBJECTIVE} | {
        "off_policy_mask_threshold": threshold if finite else None
    }


def main(recipe: RecipeArguments, args: GRPOConfig) -> run.Results:
    """Train and report. Return the contents of `results.json`."""
    trainer, found = tasks.train(recipe, args, lambda _: [])
    return run.finish(trainer, recipe, {"objective": objective(args), **found})


if __name__ == "__main__":
    run.start(main, RecipeArguments, GRPOConfig)
