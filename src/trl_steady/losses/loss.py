"""The description of a loss: its formula, its defaults, and how TRL's loss computes the rest of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from trl_steady.core.types import MicroBatch

Reduction = Literal["sequence_mean", "sequence_sum", "micro_batch_tokens", "step_tokens", "constant"]
"""How the values of tokens become a loss: see `trl_steady.trl_bridge.loss.trl_token_weights`."""


class _LossOptions(Protocol):
    delta: float | None


class ClippedTrainer(Protocol):
    """A trainer with clip ranges, which a callback may anneal."""

    epsilon_low: float
    epsilon_high: float

    @property
    def args(self) -> _LossOptions:
        """The config."""
        ...


@dataclass(frozen=True)
class Loss:
    """One value of `loss_type`. All code that depends on the loss reads it here."""

    reduction: Reduction
    """That of `trl_loss`, or of TRL's loss itself."""
    clip: Literal["ratio", "log_ratio", "cap", None] = "ratio"
    """Meaning of `epsilon` and `epsilon_high`: the distance of the ratio from 1, the distance of its log from 0, a cap
    of the ratio itself (`epsilon_high` only), or nothing."""
    advantages: Literal["by_level", "token", "sequence"] = "by_level"
    """Which advantages count: those of tokens, the mean of a sequence, or tokens only if the ratio is per token."""

    # The rest is for losses that TRL does not have.
    name: str = ""
    """Name of the method; "" for TRL's own losses."""
    trl_loss: str = "grpo"
    """TRL's loss that runs in its place, with the same reduction."""
    level: Literal["sequence", "token", None] = None
    """`importance_sampling_level`; None if the user chooses it."""
    epsilon: float | None = None
    """Default of `epsilon`; None for TRL's."""
    epsilon_high: float | None = None
    """Default of `epsilon_high` if `epsilon` is unset too."""
    rewrite: Callable[[MicroBatch], MicroBatch] | None = None
    """Changes the micro-batch so that TRL's loss on token ratios becomes this one."""
    policy_term: Callable[[MicroBatch, ClippedTrainer, Tensor | None], Tensor] | None = None
    """Computes the policy term (B, T) itself, as `losses.gmpo` does. TRL's loss adds its other terms.

    It gets the micro-batch, with 0 outside the mask; the trainer, whose clip ranges and `delta` it must apply; and the
    tokens (B, T) to which `top_entropy_quantile` limits the gradient, or None. Advantages are (B,), (B, 1) or (B, T);
    with `advantages="sequence"` there is one for each sequence.
    """
    trl_metric_overrides: Callable[[ClippedTrainer], Mapping[str, float]] | None = None
    """Clip ranges of the trainer as TRL's metrics need them, if they mean something else."""

    @property
    def is_ours(self) -> bool:
        """True if TRL does not have this loss."""
        return bool(self.name)

    def takes_token_advantages(self, importance_sampling_level: str) -> bool:
        """Return True if the gradient of each token carries the advantage of that token."""
        return self.advantages == "token" or (self.advantages == "by_level" and importance_sampling_level == "token")
