"""All losses of GRPO in one table: what each one is, and what options mean under it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from trl_steady.core.types import MicroBatch
from trl_steady.losses import objective


@dataclass(frozen=True)
class Loss:
    """One value of `loss_type`. All code that depends on the loss reads it here."""

    reduction: Literal["sequence_mean", "sequence_sum", "micro_batch_tokens", "step_tokens", "constant"]
    """How the values of tokens become a loss: see `trl_steady.trl_bridge.loss.token_weights`."""
    clip: Literal["ratio", "log_ratio", "cap", None] = "ratio"
    """Meaning of `epsilon` and `epsilon_high`: the distance of the ratio from 1, the distance of its log from 0, a cap
    of the ratio itself (`epsilon_high` only), or nothing."""
    advantages: Literal["by_level", "token", "sequence"] = "by_level"
    """Which advantages count: those of tokens, the mean of a sequence, or tokens only if the ratio is per token."""

    # The rest is for losses that TRL does not have.
    name: str = ""
    """Name of the method; "" for TRL's own losses."""
    host: str = "grpo"
    """TRL's loss that runs in its place, with the same reduction."""
    level: Literal["sequence", "token", None] = None
    """`importance_sampling_level`; None if the user chooses it."""
    epsilon: float | None = None
    """Default of `epsilon`; None for TRL's."""
    epsilon_high: float | None = None
    """Default of `epsilon_high` if `epsilon` is unset too."""
    rewrite: Callable[[MicroBatch], MicroBatch] | None = None
    """Changes the micro-batch so that TRL's loss on token ratios becomes this one."""
    policy_term: Callable[[MicroBatch, objective.ClippedTrainer, Tensor | None], Tensor] | None = None
    """Computes the policy term itself, as `objective.gmpo` does. TRL's loss adds its other terms."""
    trl_metric_overrides: Callable[[objective.ClippedTrainer], Mapping[str, float]] | None = None
    """Translates clip ranges of the trainer for the metrics of TRL's loss."""

    @property
    def is_ours(self) -> bool:
        """True if TRL does not have this loss."""
        return bool(self.name)

    def takes_token_advantages(self, importance_sampling_level: str) -> bool:
        """Return True if the gradient of each token carries the advantage of that token."""
        return self.advantages == "token" or (self.advantages == "by_level" and importance_sampling_level == "token")


LOSSES = {
    "grpo": Loss("sequence_mean"),
    "bnpo": Loss("micro_batch_tokens"),
    "dr_grpo": Loss("constant"),
    "dapo": Loss("step_tokens"),
    # a sequence's ratio gives all tokens the same gradient, unless it is only a weight, as in cispo and vespo
    "cispo": Loss("step_tokens", clip="cap", advantages="token"),
    "sapo": Loss("sequence_mean", clip=None),
    "luspo": Loss("sequence_sum"),
    "vespo": Loss("step_tokens", clip=None, advantages="token"),
    "gmpo": Loss(
        "sequence_mean",
        clip="log_ratio",
        advantages="sequence",
        name="GMPO",
        level="token",
        epsilon=0.4,  # the clip range (e^-0.4, e^0.4)
        epsilon_high=0.4,
        policy_term=objective.gmpo,
        trl_metric_overrides=objective.gmpo_clip_in_ratios,
    ),
    "gspo": Loss(
        "sequence_mean",
        advantages="sequence",
        name="GSPO",
        level="sequence",
        epsilon=3e-4,  # section 5.1: left and right clipping range
        epsilon_high=4e-4,
    ),
    "gspo_token": Loss(
        "sequence_mean",
        advantages="token",
        name="GSPO-token",
        level="sequence",
        epsilon=3e-4,
        epsilon_high=4e-4,
        rewrite=objective.as_gspo_token,
    ),
}
"""`loss_type` -> what the loss is. TRL's losses come first."""
