"""The optimal token baseline in place of the group's mean."""

# pyright: reportUnknownMemberType=false
# annotations of accelerate are partial

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from trl_steady.config.grpo import GRPOConfig
from trl_steady.core.feature import Feature
from trl_steady.core.types import ForwardPass, LogProbs, Rollout
from trl_steady.functional.advantages import token_baseline
from trl_steady.trl_bridge import models
from trl_steady.trl_bridge.lm_head import energies_as_entropies
from trl_steady.trl_bridge.log_probs import policy_log_probs
from trl_steady.trl_bridge.rollout import log_advantages

_OPTION = 'advantage_baseline="token"'


class TokenBaseline(Feature):
    """Gives each token a baseline of its own, with `advantage_baseline="token"` (arXiv 2602.07078).

    The old policy's pass gives the energies. A rollout without such a pass has one more.
    """

    window_options = (("advantage_baseline", None),)
    args: GRPOConfig
    _energies: Tensor | None = None

    @property
    def _acts(self) -> bool:
        return self.args.METHOD == "GRPO" and self.args.advantage_baseline == "token"

    def on_init_end(self) -> None:
        """Refuse a model whose head cannot be replaced."""
        if self._acts and models.compiles(self.trainer):
            self.refuse(_OPTION, "torch.compile would trace TRL's fused LM head")

    def on_rollout_begin(self, rollout: Rollout) -> None:
        """Forget the energies of an earlier pass."""
        self._energies = None

    def around_forward(self, forward: ForwardPass, call_next: Callable[[ForwardPass], LogProbs]) -> LogProbs:
        """Compute energies in the pass of the old policy, unless a script wants its entropies."""
        if not self._acts or forward.role != "old" or forward.with_entropy:
            return call_next(forward)
        forward.with_entropy = True  # which the energies replace
        with energies_as_entropies():
            logps, self._energies, aux_loss = call_next(forward)
        return logps, None, aux_loss

    def on_rollout_end(self, rollout: Rollout) -> None:
        """Replace the advantages (B,) of groups by those of tokens."""
        if not self._acts:
            return
        trainer, values, is_sampled = self.trainer, rollout.advantages, rollout.is_sampled
        if values.dim() > 1:
            self.refuse(_OPTION, "a reward function returned StepRewards, whose advantages have a baseline of steps")
        if self._energies is None:
            policy_log_probs(trainer, rollout)
        assert self._energies is not None
        is_counted = is_sampled & ~rollout.rewards.isnan().unsqueeze(1)
        energies, self._energies = self._energies.where(is_counted, torch.nan), None
        # the completions of a group may be on several processes
        padded = trainer.accelerator.pad_across_processes(energies, dim=1, pad_index=torch.nan)  # pyright: ignore
        of_all, every = cast(tuple[Tensor, Tensor], trainer.accelerator.gather((values, padded)))
        size = rollout.group_rewards.size(1)
        first = trainer.accelerator.process_index * len(values)
        found = token_baseline(of_all, every, group_size=size)[first : first + len(values), : energies.size(1)]
        rollout.samples["advantages"] = found.clone()  # a view keeps those of all processes alive
        log_advantages(trainer, found, is_sampled)
