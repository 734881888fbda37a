"""RLOO: the parts of its trainer. Its loss is TRL's own."""

import functools
from typing import Any

import trl

from trl_steady.adapters.part import AdapterPart
from trl_steady.config.rloo import RLOOConfig
from trl_steady.losses.old_pass import OldPassPart
from trl_steady.padding.part import PaddingPart
from trl_steady.padding.weights import WeightsPart
from trl_steady.reference.part import ReferencePart
from trl_steady.reward_model.part import RewardModelPart
from trl_steady.rewards.dynamic import DynamicSamplingPart
from trl_steady.rewards.part import RewardsPart
from trl_steady.routing.part import RoutingPart
from trl_steady.sampling.agreement import EngineCheckPart
from trl_steady.sampling.part import SamplingPart
from trl_steady.trainers.base import SteadyTrainer
from trl_steady.trainers.report import ReportPart
from trl_steady.trainers.training_report import TrainingReportPart


class RLOOTrainer(SteadyTrainer, trl.RLOOTrainer):
    """`trl.RLOOTrainer` with a moving reference and checkpoints that resume exactly.

    The constructor is the same. With no option of trl-steady set and `trim_padding=False`, this trainer trains bit for
    bit as TRL's does.

    Args:
        model: As in TRL.
        reward_funcs: As in TRL. `StepRewards` are refused: RLOO has one advantage per sequence.
        args: A `trl_steady.RLOOConfig`.
        *positional: TRL's other arguments, in TRL's order.
        **keywords: TRL's other arguments, by name.

    Raises:
        ValueError: As for `trl_steady.GRPOTrainer`, except for what concerns losses and engines' log-probs.
    """

    PARTS = (
        RoutingPart,
        SamplingPart,
        RewardModelPart,
        PaddingPart,  # around all before: they score packed tokens
        AdapterPart,
        ReferencePart,
        RewardsPart,
        OldPassPart,
        WeightsPart,
        DynamicSamplingPart,
        EngineCheckPart,
        ReportPart,
        TrainingReportPart,  # last: it reads what the others have made
    )
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
