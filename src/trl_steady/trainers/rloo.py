"""RLOO: the features of its trainer. Its loss is TRL's own."""

import functools
from typing import Any

import trl

from trl_steady.config.rloo import RLOOConfig
from trl_steady.features.critic.feature import Critic
from trl_steady.features.generate_ahead import GenerateAhead
from trl_steady.features.policy_loss import PolicyLoss
from trl_steady.features.pretraining_loss import PretrainingLoss
from trl_steady.features.teacher.feature import Teacher
from trl_steady.trainers.base import SteadyTrainer
from trl_steady.trainers.order import without


class RLOOTrainer(SteadyTrainer, trl.RLOOTrainer):  # pyright: ignore[reportIncompatibleMethodOverride]
    """`trl.RLOOTrainer` with a moving reference and checkpoints that resume exactly.

    The constructor is the same. With no option of trl-steady set and `trim_padding=False`, this trainer trains bit for
    bit as TRL's does. The exceptions are listed in `docs/compatibility.md`.

    Args:
        model: As in TRL.
        reward_funcs: As in TRL, or a `GroupReward`. `StepRewards` are refused: RLOO has one advantage per sequence.
        args: A `trl_steady.RLOOConfig`.
        *positional: TRL's other arguments, in TRL's order.
        **keywords: TRL's other arguments, by name.

    Raises:
        ValueError: As for `trl_steady.GRPOTrainer`, except for what concerns losses and engines' log-probs.
    """

    FEATURES = without(Critic, PretrainingLoss, Teacher, GenerateAhead, PolicyLoss)
    CONFIG = RLOOConfig
    args: RLOOConfig

    @functools.wraps(trl.RLOOTrainer.__init__, assigned=())  # other tools pass what they find in its signature
    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: RLOOConfig | None = None,
        *positional: Any,
        **keywords: Any,
    ) -> None:
        super().__init__(model, reward_funcs, args, *positional, **keywords)

    @property
    def why_one_advantage(self) -> str:
        """Reason why the loss takes one advantage per sequence, with a fix."""
        return "RLOO has one ratio and one advantage per sequence. Train with GRPOTrainer and a loss of tokens,"
