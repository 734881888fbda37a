"""Stability methods that DeepSeek and Qwen published, and PPO with a critic, for the trainers of Hugging Face TRL.

    from trl_steady import GRPOConfig, GRPOTrainer        # was: from trl import GRPOConfig, GRPOTrainer
    args = GRPOConfig(..., loss_type="gspo")

`import trl_steady` does not import trl, transformers or torch. The first use of a public name imports them.
"""

import importlib
import logging
from typing import TYPE_CHECKING, Any

from trl_steady.version import __version__

if TYPE_CHECKING:
    from trl_steady.config.grpo import GRPOConfig
    from trl_steady.config.ppo import PPOConfig
    from trl_steady.config.rloo import RLOOConfig
    from trl_steady.features.reference.callback import ReferenceRefreshCallback
    from trl_steady.features.reward_model.callback import RewardModelRefreshCallback
    from trl_steady.features.reward_model.reward_function import RewardAdapter
    from trl_steady.rewards import GroupReward, StepRewards
    from trl_steady.trainers.grpo import GRPOTrainer
    from trl_steady.trainers.ppo import PPOTrainer
    from trl_steady.trainers.rloo import RLOOTrainer

# bitsandbytes logs this on each import on a recent CPU. The kernel that it misses is optional.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(
    lambda record: not str(record.msg).startswith("Failed to load CPU gemm_4bit_forward")
)

__all__ = [
    "GRPOConfig",
    "GRPOTrainer",
    "GroupReward",
    "PPOConfig",
    "PPOTrainer",
    "RLOOConfig",
    "RLOOTrainer",
    "ReferenceRefreshCallback",
    "RewardAdapter",
    "RewardModelRefreshCallback",
    "StepRewards",
    "__version__",
]
_MODULES = {
    "GRPOConfig": "config.grpo",
    "GRPOTrainer": "trainers.grpo",
    "GroupReward": "rewards",
    "PPOConfig": "config.ppo",
    "PPOTrainer": "trainers.ppo",
    "RLOOConfig": "config.rloo",
    "RLOOTrainer": "trainers.rloo",
    "ReferenceRefreshCallback": "features.reference.callback",
    "RewardAdapter": "features.reward_model.reward_function",
    "RewardModelRefreshCallback": "features.reward_model.callback",
    "StepRewards": "rewards",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        found = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
        if name.endswith("Trainer"):  # not in its module: `trl-steady run` works with any of them
            importlib.import_module(f"{__name__}.trl_bridge").refuse_unsupported(found.__mro__)
        return found
    except AttributeError as inside:  # Python would take it for a missing name
        raise ImportError(f"{name} cannot be imported: {inside}") from inside


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
