"""PPO with a critic on SmolLM2-135M-Instruct in NF4: policy, critic and reference are adapters on one base.

python recipes/ppo/train.py --config recipes/ppo/smollm2-135m-ppo.yaml [--seed 1] [--output_dir ...]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import run, small_model
from common.run import RecipeArguments
from trl_steady import GRPOConfig, PPOConfig

OBJECTIVE = (
    "loss_type",
    "epsilon",
    "beta",
    "kl_coef",
    "gamma",
    "lam",
    "value_lam",
    "cliprange_value",
)
OBJECTIVE += ("learning_rate", "value_learning_rate", "value_warmup_steps", "num_generations")


def main(recipe: RecipeArguments, args: GRPOConfig) -> run.Results:
    """Train with PPO, or with GRPO if `args` is a plain `GRPOConfig`. Return the contents of `results.json`."""
    objective = {name: getattr(args, name) for name in OBJECTIVE if hasattr(args, name)}
    objective["method"] = "PPO" if isinstance(args, PPOConfig) else "GRPO"
    trainer, found = small_model.train(recipe, args, lambda _: [])
    return run.finish(trainer, recipe, {"objective": objective, **found})


if __name__ == "__main__":
    run.start(main, RecipeArguments, PPOConfig)
