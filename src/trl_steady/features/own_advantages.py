"""A script's own advantages: what the method `advantages` of its trainer returns."""

import torch
from torch import Tensor

from trl_steady.core.feature import Feature
from trl_steady.core.types import Rollout
from trl_steady.features.step_rewards.feature import StepRewardsFeature
from trl_steady.trl_bridge.overrides import overrides


class OwnAdvantages(Feature):
    """Trains on the advantages that a script's `advantages` returns, if it has this method."""

    def on_rollout_end(self, rollout: Rollout) -> None:
        """Replace the advantages, those of steps and of a critic too. Later features read the new ones."""
        if not (names := overrides(self.trainer, "advantages")):  # the same on all processes
            return
        found = self._checked(names[0], self.trainer.advantages(rollout), rollout)
        self.trainer.feature(StepRewardsFeature).replace_advantages(rollout, found)

    def _checked(self, name: str, returned: object, rollout: Rollout) -> Tensor:
        """Return what the method `name` returned, as (B,) or (B, T) constants like those of the trainer."""
        mask, like, why = rollout.is_sampled, rollout.advantages, self.trainer.why_one_advantage
        (count, width), found = mask.shape, torch.empty(0)
        try:
            found = torch.as_tensor(returned, dtype=like.dtype, device=like.device).detach()
            error = f"shape {tuple(found.shape)}"
        except (TypeError, ValueError, RuntimeError):
            error = f"a {type(returned).__name__}, which is no tensor of numbers"
        if found.shape not in ((count,), (count, width)):
            fix = f"Return ({count},), one for each completion of this process, or ({count}, {width}), for each token."
        elif found.dim() == 2 and why is not None:
            error, fix = "one advantage per token", f"But {why} or return shape ({count},)."
        elif not (found := found.where(mask, 0) if found.dim() == 2 else found).isfinite().all():
            error, fix = "nan or an infinite number", "A reward is nan if its function returned None: return 0 there."
        else:
            return found
        raise ValueError(f"{name} returned {error}. {fix}")
