"""GSPO with LoRA on SmolLM2-135M-Instruct in NF4, on CPU or GPU.

python recipes/gspo/train.py --config recipes/gspo/smollm2-135m-comparison.yaml [--seed 1] [--output_dir ...]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import run, small_model
from common.run import RecipeArguments
from trl_steady import GRPOConfig


def main(recipe: RecipeArguments, args: GRPOConfig) -> run.Results:
    """Evaluate, train, evaluate and report. Return the contents of `results.json`."""
    trainer, found = small_model.train(recipe, args, lambda _: [])
    return run.finish(trainer, recipe, found)


if __name__ == "__main__":
    run.start(main, RecipeArguments, GRPOConfig)
