"""Adapt a micro-batch to the objective of the config: the ratio that TRL uses, the KL, the masks and their metrics."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from trl_steady.functional import importance, kl, masks
from trl_steady.host.loss import MicroBatch
from trl_steady.host.metrics import Masked

if TYPE_CHECKING:
    from trl_steady.config.grpo import GRPOConfig

_FINITE = 80.0  # e^80 fits into float32
_PLAIN = {"k1": kl.k1, "k2": kl.k2, "k3": kl.k3}
_CORRECTED = {"k1": kl.corrected_k1, "k2": kl.corrected_k2, "k3": kl.corrected_k3}


def as_gspo_token(batch: MicroBatch) -> MicroBatch:
    """Return the micro-batch with log-probs that make TRL's token-level loss GSPO-token.

    The old log-probs are those of the surrogate, and all log-probs are relative to the policy's own. TRL's loss
    depends only on differences of log-probs, so this shift changes nothing else.
    """
    logps, old_logps = importance.gspo_token_surrogate(batch.logps, batch.old_logps, batch.mask)
    ref_logps = None if batch.ref_logps is None else batch.ref_logps - batch.logps.detach()
    return replace(batch, logps=logps, old_logps=old_logps, ref_logps=ref_logps)


class ClippedTrainer(Protocol):
    """A trainer with clip ranges, which a callback may anneal."""

    epsilon_low: float
    epsilon_high: float
    args: "GRPOConfig"


def gmpo(batch: MicroBatch, trainer: ClippedTrainer, is_kept: Tensor | None) -> Tensor:
    """Return the policy term of GMPO, (B, T) equal values for all tokens of a sequence.

    The trainer's clip ranges are those of the log-ratio. `is_kept` (B, T) has the tokens to which
    `top_entropy_quantile` limits the gradient, or is None for all.
    """
    advantages = batch.advantages.view(-1, 1)
    mask = batch.mask if is_kept is None else batch.mask & is_kept.bool()
    log_ratio = importance.log_geometric_mean_ratio(
        batch.logps,
        batch.old_logps,
        advantages,
        mask,
        low=trainer.epsilon_low,
        high=trainer.epsilon_high,
        delta=trainer.args.delta,
    )
    return (-log_ratio.exp() * advantages).expand_as(batch.logps)


def finite_ratios(batch: MicroBatch) -> MicroBatch:
    """Return the micro-batch with old log-probs that keep each token's ratio finite in float32.

    TRL computes the ratio and multiplies it by 0, and 0 times infinity is NaN. Ratios up to e^80 do not change.
    """
    log_ratio = batch.logps.detach() - batch.old_logps
    bounded = batch.logps.detach() - log_ratio.clamp(-_FINITE, _FINITE)
    return replace(batch, old_logps=batch.old_logps.where(log_ratio.abs() <= _FINITE, bounded))


def gmpo_clip_in_ratios(trainer: ClippedTrainer) -> dict[str, float]:
    """Return GMPO's clip ranges as distances of the ratio from 1, which TRL's metrics need."""
    return {"epsilon_low": -math.expm1(-trainer.epsilon_low), "epsilon_high": math.expm1(trainer.epsilon_high)}


def kl_estimates(batch: MicroBatch, args: "GRPOConfig") -> dict[str, Tensor]:
    """Return the (B, T) KL by each estimator, with the importance ratio that `args` selects."""
    assert batch.ref_logps is not None
    logps, ref_logps = batch.logps, batch.ref_logps
    if not args.use_bias_correction_kl:
        return {name: estimate(logps, ref_logps) for name, estimate in _PLAIN.items()}
    denominator = batch.old_logps
    if args.kl_ratio_denominator == "sampler":
        assert batch.sampler_logps is not None
        denominator = batch.sampler_logps.where(~batch.sampler_logps.isnan(), batch.old_logps)
    return {name: estimate(logps, ref_logps, logps - denominator) for name, estimate in _CORRECTED.items()}


def sampler_masks(batch: MicroBatch, args: "GRPOConfig") -> dict[str, Tensor]:
    """Return the masks that compare trainer and sampler: name -> (B, 1) bool, True = keep."""
    keep: dict[str, Tensor] = {}
    if batch.sampler_logps is None:
        return keep
    log_ratio = masks.log_ratio(batch.old_logps, batch.sampler_logps)
    if args.geometric_mask_range is not None:
        low, high = args.geometric_mask_range
        keep["geometric"] = masks.geometric_mask(log_ratio, batch.mask, low=low, high=high)
    if args.token_veto_threshold is not None:
        keep["veto"] = masks.token_veto(log_ratio, batch.mask, threshold=args.token_veto_threshold)
    return keep


def mismatch(batch: MicroBatch) -> tuple[Masked, dict[str, Masked]]:
    """Return the (B, T) log-ratios of trainer to sampler, and the values to average for the metrics.

    Tokens that the engine could not score do not count.
    """
    assert batch.sampler_logps is not None
    scored = batch.mask & ~batch.sampler_logps.isnan()
    old_logps, sampler_logps = batch.old_logps.where(scored, 0), batch.sampler_logps.where(scored, 0)
    log_ratio = old_logps - sampler_logps
    means = {
        "mismatch/log_ratio_mean": log_ratio,
        "mismatch/kl": kl.k3(sampler_logps, old_logps),  # KL(μ || π_old), on samples of μ
        "mismatch/above_2": log_ratio.exp() > 2,
        "mismatch/below_half": log_ratio.exp() < 0.5,
    }
    return (log_ratio, scored), {name: (values, scored) for name, values in means.items()}


def refuse_sampler_options(args: "GRPOConfig") -> None:
    """Raise if an option needs the sampler's log-probs. Call it where there are none."""
    for option in args.sampler_options:
        raise ValueError(
            f"{option}={getattr(args, option)!r} needs the sampler's log-probs, and there are none. Return 'logprobs' "
            f"from rollout_func, set use_vllm=True, or leave {option} unset."
        )


def dropped(keep: Mapping[str, Tensor], mask: Tensor) -> dict[str, Masked]:
    """Return which sequences with loss tokens each mask drops: name -> (B, 1) values, True = dropped, and their mask.

    For a mask of shape (B, T), loss tokens count instead of sequences.
    """
    has_tokens = mask.any(-1, keepdim=True)
    return {
        f"dropped/{name}": (~kept, mask if kept.shape == mask.shape else has_tokens) for name, kept in keep.items()
    }
