"""GMPO (arXiv 2507.20673, equation 4): the geometric mean of clipped token ratios, times the advantage."""

import math

from torch import Tensor

from trl_steady.core.types import MicroBatch
from trl_steady.functional.importance import log_geometric_mean_ratio
from trl_steady.losses.loss import ClippedTrainer, Loss


def policy_term(batch: MicroBatch, trainer: ClippedTrainer, is_kept: Tensor | None) -> Tensor:
    """Return the policy term of GMPO, (B, T) equal values for all tokens of a sequence.

    The trainer's clip ranges are those of the log-ratio. `is_kept` (B, T) has the tokens to which
    `top_entropy_quantile` limits the gradient, or is None for all.
    """
    advantages = batch.advantages.view(-1, 1)
    mask = batch.mask if is_kept is None else batch.mask & is_kept.bool()
    log_ratio = log_geometric_mean_ratio(
        batch.logps,
        batch.old_logps,
        advantages,
        mask,
        low=trainer.epsilon_low,
        high=trainer.epsilon_high,
        delta=trainer.args.delta,
    )
    return (-log_ratio.exp() * advantages).expand_as(batch.logps)


def clip_in_ratios(trainer: ClippedTrainer) -> dict[str, float]:
    """Return the clip ranges as distances of the ratio from 1, which TRL's metrics need."""
    high = min(trainer.epsilon_high, 700.0)  # e^709 overflows
    return {"epsilon_low": -math.expm1(-trainer.epsilon_low), "epsilon_high": math.expm1(high)}


GMPO = Loss(
    "sequence_mean",
    clip="log_ratio",
    advantages="sequence",
    name="GMPO",
    level="token",
    epsilon=0.4,  # the clip range (e^-0.4, e^0.4)
    epsilon_high=0.4,
    policy_term=policy_term,
    trl_metric_overrides=clip_in_ratios,
)
