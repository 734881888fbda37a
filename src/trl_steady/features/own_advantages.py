"""A script's own advantages: what the method `advantages` of its trainer returns."""

# pyright: reportUnknownMemberType=false
# annotations of torch are partial

from typing import Any, Protocol

import torch
from torch import Tensor

from trl_steady.config.shared import SharedOptions
from trl_steady.core.feature import Feature, Trainer
from trl_steady.core.types import Rollout
from trl_steady.features.step_rewards.feature import StepRewardsFeature
from trl_steady.trl_bridge.overrides import overrides
from trl_steady.trl_bridge.rollout import log_advantages


class _Trainer(Trainer, Protocol):
    why_one_advantage: str | None

    def advantages(self, rollout: Rollout) -> Any: ...


class OwnAdvantages(Feature):
    """Trains on the advantages that a script's `advantages` returns, if it has this method."""

    trainer: _Trainer
    args: SharedOptions

    def on_rollout_end(self, rollout: Rollout) -> None:
        """Replace the advantages, those of steps and of a critic too. Later features read the new ones."""
        if not (names := overrides(self.trainer, "advantages")):  # the same on all processes
            return
        found = self._checked(names[0], self.trainer.advantages(rollout), rollout)
        rollout.samples["advantages"] = found
        log_advantages(self.trainer, found, rollout.is_sampled)
        steps = self.trainer.feature(StepRewardsFeature)
        if steps.has_steps:
            steps.keep_advantages(rollout, found.view(len(found), -1) * rollout.is_sampled)

    def _checked(self, name: str, returned: Any, rollout: Rollout) -> Tensor:
        """Return what the method `name` returned, as (B,) or (B, T) constants like those of the trainer."""
        mask, like = rollout.is_sampled, rollout.advantages
        (count, width), why = mask.shape, self.trainer.why_one_advantage
        try:
            found = torch.as_tensor(returned, dtype=like.dtype, device=like.device).detach()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{name} returned a {type(returned).__name__}, not numbers: {error}") from error
        if found.shape not in ((count,), (count, width)):
            raise ValueError(
                f"{name} returned shape {tuple(found.shape)}. Return ({count},), one advantage for each completion of "
                f"this process, or ({count}, {width}), one for each token."
            )
        if found.dim() == 2 and why is not None:
            raise ValueError(f"{name} returned one advantage per token, but {why} or return shape ({count},).")
        found = found.where(mask, 0) if found.dim() == 2 else found
        if not found.isfinite().all():
            row = (~found.isfinite()).nonzero()[0, 0].item()
            raise ValueError(
                f"{name} returned nan or an infinite number for completion {row} of this process. A reward is nan if "
                "its function returned None. Return 0 to leave a completion out."
            )
        return found
