"""Advantages divided by the mean reward of their group (MaxRL)."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from trl_steady.core.feature import Feature
from trl_steady.core.types import Rollout
from trl_steady.features.step_rewards.feature import StepRewardsFeature
from trl_steady.functional.advantages import over_mean
from trl_steady.trl_bridge.rollout import without_scale


class MeanScale(Feature):
    """Divides advantages, those of steps too, by the mean reward of the group, with `scale_rewards="mean"`."""

    def on_init_end(self) -> None:
        """Read the option. RLOO does not have it, and PPO's advantages are those of a critic."""
        self.is_on = self.args.METHOD == "GRPO" and self.args.scale_rewards == "mean"

    def around_rollout(self, rollout: Rollout, call_next: Callable[[Rollout], dict[str, Any]]) -> dict[str, Any]:
        """Let TRL leave the advantages undivided, in PPO too, where they are not used."""
        if getattr(self.args, "scale_rewards", None) != "mean":
            return call_next(rollout)
        with without_scale(self.trainer):
            return call_next(rollout)

    def on_rewards(self, rewards: Tensor, completions: list[Any], completion_ids: list[list[int]]) -> None:
        """Refuse rewards whose mean may be 0 or below while some are above."""
        if self.is_on:
            totals = (rewards * self.trainer.reward_weights.to(rewards.device)).nansum(1)
            lowest = totals.min().item()  # of all processes, so all stop
            why = f"a completion has the reward {lowest:.3g}, and the mean of a group is no measure of its scale then"
            self.refuse("scale_rewards='mean'", why if lowest < 0 else None, "Give rewards of 0 or above.")

    def on_rollout_end(self, rollout: Rollout) -> None:
        """Divide the advantages."""
        if self.is_on:
            found = over_mean(rollout.advantages, rollout.group_rewards)
            self.trainer.feature(StepRewardsFeature).replace_advantages(rollout, found)
