"""The advantages of a rollout: of groups, steps or a critic, their scale and baseline, a script's own, a teacher's.

Read `Advantages.on_rollout_end`. A new way to make advantages is a branch there, and an option.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor

from trl_steady.config.grpo import GRPOConfig
from trl_steady.config.shared import SharedOptions
from trl_steady.core.feature import Feature
from trl_steady.core.processes import own_rows
from trl_steady.core.types import ForwardPass, LogProbs, Rollout
from trl_steady.features.step_rewards.feature import StepRewardsFeature
from trl_steady.features.teacher.feature import Teacher
from trl_steady.functional import advantages
from trl_steady.trl_bridge import models
from trl_steady.trl_bridge.lm_head import energies_as_entropies
from trl_steady.trl_bridge.log_probs import policy_log_probs
from trl_steady.trl_bridge.overrides import overrides
from trl_steady.trl_bridge.rollout import log_advantages, without_scale

_TOKEN_BASELINE = 'advantage_baseline="token"'


class Advantages(Feature):
    """Decides the advantage of each token of a rollout. A critic has written its advantages before.

    `scale_rewards="mean"` is MaxRL (arXiv 2602.02710), and `advantage_baseline="token"` the optimal token baseline
    (arXiv 2602.07078). Its energies come from the old policy's pass. A rollout without this pass has one more.
    """

    args: SharedOptions
    _energies: Tensor | None = None
    # GRPO's options: PPO warns that they have no effect, and RLOO does not have them
    _step_formula: str | None = None
    _is_mean_scale = False
    _divides_by_mean = False
    _has_token_baseline = False
    _has_teacher = False

    def on_init_end(self) -> None:
        """Read the options. Refuse a token baseline on a model whose head cannot be replaced."""
        args = self.args
        self._is_mean_scale = getattr(args, "scale_rewards", None) == "mean"
        if args.METHOD == "GRPO":
            assert isinstance(args, GRPOConfig)
            self._step_formula = args.step_advantage
            self._divides_by_mean = self._is_mean_scale
            self._has_token_baseline = args.advantage_baseline == "token"
        self._has_teacher = isinstance(args, GRPOConfig) and args.teacher is not None
        if self._has_token_baseline and models.compiles(self.trainer):
            self.refuse(_TOKEN_BASELINE, "torch.compile would trace TRL's fused LM head")

    # before the rollout is complete

    def on_rollout_begin(self, rollout: Rollout) -> None:
        """Forget the energies of an earlier pass."""
        self._energies = None

    def around_rollout(self, rollout: Rollout, call_next: Callable[[Rollout], dict[str, Any]]) -> dict[str, Any]:
        """Let TRL leave the advantages undivided with `scale_rewards="mean"`, which TRL would refuse in PPO too."""
        scaling: AbstractContextManager[None] = nullcontext()
        if self._is_mean_scale:
            scaling = without_scale(self.trainer)
        with scaling:
            return call_next(rollout)

    def on_rewards(self, rewards: Tensor, completions: list[Any], completion_ids: list[list[int]]) -> None:
        """Refuse rewards whose mean may be 0 or below while some are above."""
        if not self._divides_by_mean:
            return
        totals = advantages.total_rewards(rewards, self.trainer.reward_weights)
        lowest = totals.nan_to_num().min().item()  # of all processes, so all stop
        if lowest < 0:
            self.refuse(
                "scale_rewards='mean'",
                f"a completion has the reward {lowest:.3g}, and the mean of a group is no measure of its scale then",
                "Give rewards of 0 or above.",
            )

    def around_forward(self, forward: ForwardPass, call_next: Callable[[ForwardPass], LogProbs]) -> LogProbs:
        """Compute energies in the pass of the old policy, unless a script wants its entropies."""
        if not self._has_token_baseline or forward.role != "old" or forward.with_entropy:
            return call_next(forward)
        forward.with_entropy = True  # which the energies replace
        with energies_as_entropies():
            logps, self._energies, aux_loss = call_next(forward)
        return logps, None, aux_loss

    # the advantages

    def on_rollout_end(self, rollout: Rollout) -> None:
        """Write the advantages of the rollout, and log them once if they are not TRL's."""
        before = rollout.advantages
        steps = self.trainer.feature(StepRewardsFeature)
        # any_steps() communicates. RLOO has refused steps before, so it need not ask
        has_steps = self.args.METHOD != "RLOO" and steps.any_steps()

        if self._step_formula is not None and has_steps:
            rollout.samples["advantages"] = steps.group_advantages(rollout, self._step_formula)
        if self._divides_by_mean:
            rollout.samples["advantages"] = advantages.over_mean(rollout.advantages, rollout.group_rewards)
        if self._has_token_baseline:
            rollout.samples["advantages"] = self._with_token_baseline(rollout)
        own_methods = overrides(self.trainer, "advantages")  # the same on all processes
        if own_methods:
            returned = self.trainer.advantages(rollout)
            rollout.samples["advantages"] = self._checked(own_methods[0], returned, rollout)
        if self._has_teacher:
            rollout.samples["advantages"] = self.trainer.feature(Teacher).taught(rollout)

        if rollout.advantages is not before or self.args.METHOD == "PPO":
            log_advantages(self.trainer, rollout.advantages, rollout.is_sampled)
        if has_steps:
            steps.keep_advantages(rollout)
        elif self._step_formula == "process":
            steps.warn_without_steps(self._step_formula)

    def _with_token_baseline(self, rollout: Rollout) -> Tensor:
        """Return the advantages (B,) with a baseline for each token in place of the group's, (B, T)."""
        accelerator = self.trainer.accelerator
        of_process = rollout.advantages
        if of_process.dim() > 1:
            why = "a reward function returned StepRewards, whose advantages have a baseline of steps"
            self.refuse(_TOKEN_BASELINE, why)
        if self._energies is None:
            policy_log_probs(self.trainer, rollout)
        assert self._energies is not None
        is_counted = rollout.is_sampled & ~rollout.rewards.isnan().unsqueeze(1)
        energies = self._energies.where(is_counted, torch.nan)
        self._energies = None
        # the completions of a group may be on several processes
        padded = cast(Any, accelerator).pad_across_processes(energies, dim=1, pad_index=torch.nan)
        all_advantages, all_energies = cast(tuple[Tensor, Tensor], accelerator.gather((of_process, padded)))
        group_size = rollout.group_rewards.size(1)
        with_baseline = advantages.token_baseline(all_advantages, all_energies, group_size=group_size)
        # a view would keep those of all processes alive
        return with_baseline[own_rows(accelerator, len(of_process)), : energies.size(1)].clone()

    def _checked(self, name: str, returned: object, rollout: Rollout) -> Tensor:
        """Return what a script's method `name` returned, as (B,) or (B, T) constants like those of the trainer."""
        mask = rollout.is_sampled
        like = rollout.advantages
        count, width = mask.shape
        shapes = f"Return ({count},), one for each completion of this process, or ({count}, {width}), for each token."
        try:
            constants = torch.as_tensor(returned, dtype=like.dtype, device=like.device).detach()
        except (TypeError, ValueError, RuntimeError):
            kind = type(returned).__name__
            raise ValueError(f"{name} returned a {kind}, which is no tensor of numbers. {shapes}") from None
        if constants.shape not in ((count,), (count, width)):
            raise ValueError(f"{name} returned shape {tuple(constants.shape)}. {shapes}")
        if constants.dim() == 2:
            why = self.trainer.why_one_advantage
            if why:
                raise ValueError(f"{name} returned one advantage per token. But {why} or return shape ({count},).")
            constants = constants.where(mask, 0)
        if not constants.isfinite().all():
            raise ValueError(
                f"{name} returned nan or an infinite number. A reward is nan if its function returned None: return 0 "
                "there."
            )
        return constants
