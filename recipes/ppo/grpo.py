"""GRPO on the model and the task of PPO's recipe, to compare the two.

python recipes/ppo/grpo.py --config recipes/ppo/smollm2-135m-grpo.yaml [--seed 1] [--output_dir ...]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import run
from common.run import RecipeArguments
from ppo.train import main
from trl_steady import GRPOConfig

if __name__ == "__main__":
    run.start(main, RecipeArguments, GRPOConfig)
