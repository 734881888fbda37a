"""GRPO on the model and the task of PPO's recipe, to compare the two.

python recipes/ppo/grpo.py --config recipes/ppo/smollm2-135m-grpo.yaml [--seed 1] [--output_dir ...]
"""

import sys
from pathlib import Path

from trl import TrlParser

sys.path.insert(0, str(Path(__file__).parents[1]))

from common.run import RecipeArguments
from ppo.train import main
from trl_steady import GRPOConfig

if __name__ == "__main__":
    main(*TrlParser((RecipeArguments, GRPOConfig)).parse_args_and_config())
