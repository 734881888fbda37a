"""GRPO: the parts of its trainer, and the methods that a script may read or override."""

import functools
from typing import Any

import trl
from torch import Tensor

from trl_steady.adapters.part import AdapterPart
from trl_steady.config.grpo import GRPOConfig
from trl_steady.functional import masks
from trl_steady.losses.old_pass import OldPassPart
from trl_steady.losses.part import LossPart
from trl_steady.losses.table import LOSSES
from trl_steady.padding.part import PaddingPart
from trl_steady.padding.weights import WeightsPart
from trl_steady.reference.part import ReferencePart
from trl_steady.reward_model.part import RewardModelPart
from trl_steady.rewards.dynamic import DynamicSamplingPart
from trl_steady.rewards.part import RewardsPart, StepAdvantagesPart
from trl_steady.routing.part import RoutingPart
from trl_steady.sampling.agreement import EngineCheckPart
from trl_steady.sampling.ahead import AheadPart
from trl_steady.sampling.part import SamplingPart
from trl_steady.trainers.base import SteadyTrainer
from trl_steady.trainers.report import ReportPart
from trl_steady.trainers.training_report import TrainingReportPart


class GRPOTrainer(SteadyTrainer, trl.GRPOTrainer):
    """`trl.GRPOTrainer` with more losses, a moving reference and checkpoints that resume exactly.

    The constructor is the same. With no option of trl-steady set and `trim_padding=False`, this trainer trains bit for
    bit as TRL's does. The exceptions are listed in `docs/compatibility.md`.

    Args:
        model: As in TRL.
        reward_funcs: As in TRL. For a completion, a function may also return `StepRewards`.
        args: A `trl_steady.GRPOConfig`.
        *positional: TRL's other arguments, in TRL's order.
        **keywords: TRL's other arguments, by name.

    Raises:
        ValueError: `args` is not a `trl_steady.GRPOConfig`, an option does not work with the model, the adapter or the
            engine, or the data set is smaller than a rollout. Before the first optimizer step, a subclass overrides a
            method in which an option acts, without calling `super()`.

    Warns:
        UserWarning: An option has no effect, or steps of the learning rate's size round away in a bf16 adapter.
    """

    PARTS = (
        RoutingPart,
        SamplingPart,
        RewardModelPart,
        PaddingPart,  # around all before: they score packed tokens
        AdapterPart,
        ReferencePart,
        RewardsPart,
        StepAdvantagesPart,
        OldPassPart,
        DynamicSamplingPart,
        AheadPart,  # around dynamic sampling: only the first round is asked ahead
        LossPart,
        WeightsPart,  # after all that set advantages
        EngineCheckPart,
        ReportPart,
        TrainingReportPart,  # last: it reads what the others have made
    )
    CONFIG = GRPOConfig
    args: GRPOConfig

    @functools.wraps(trl.GRPOTrainer.__init__, assigned=())  # other tools pass what they find in its signature
    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        *positional: Any,
        **keywords: Any,
    ) -> None:
        super().__init__(model, reward_funcs, args, *positional, **keywords)

    @property
    def has_step_rewards(self) -> bool:
        """True if a rollout had `StepRewards`, on any process."""
        return bool(self.part(RewardsPart).last_rollout)

    @property
    def last_step_advantages(self) -> list[list[tuple[str, float]]]:
        """Pairs of text and advantage of the loss tokens, by completion, of the last rollout with step rewards."""
        return self.part(RewardsPart).last_step_advantages

    @property
    def loss_reduction(self) -> str:
        """How the values of tokens become a loss: see `trl_steady.host.loss.token_weights`."""
        return LOSSES[self.loss_type].reduction

    @property
    def why_one_advantage(self) -> str | None:
        """Reason why the loss takes one advantage per sequence, with a fix; None if it takes one per token."""
        loss_type, level = self.loss_type, self.importance_sampling_level
        if LOSSES[loss_type].takes_token_advantages(level):
            return None
        return (
            f"with loss_type={loss_type!r} and importance_sampling_level={level!r} only the mean of a sequence's "
            "advantages would count. Set loss_type='gspo_token', which keeps the sequence's ratio,"
        )

    @staticmethod
    def get_off_policy_mask(
        advantages: Tensor,
        per_token_logps: Tensor,
        sampling_per_token_logps: Tensor,
        mask: Tensor,
        off_policy_threshold: float,
    ) -> Tensor:
        """Return TRL's off-policy mask, with one decision for each sequence, by the sign of its mean advantage.

        DeepSeek-V3.2 (arXiv 2512.02556, section 3.1) masks sequences. TRL's own method decides token by token if the
        advantages are (B, T).

        Returns:
            (B, 1) in the dtype of `mask`, as in TRL: 1 = keep, 0 = drop.
        """
        statistic = masks.off_policy_statistic(per_token_logps, sampling_per_token_logps, mask.bool())
        keep = masks.off_policy_mask(advantages, statistic, mask.bool(), threshold=off_policy_threshold)
        return keep.to(mask.dtype)
