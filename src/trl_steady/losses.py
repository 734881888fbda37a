"""The losses: what each one is, the formulas of ours, and the table of all. A new loss is added here."""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from trl_steady.core.feature import Trainer
from trl_steady.core.types import MicroBatch
from trl_steady.functional.masks import binary_divergence, second_moment_mask
from trl_steady.functional.ratios import gmpo_log_ratio, truncate


@dataclass(frozen=True)
class Loss:
    """One value of `loss_type`. All code that depends on the loss reads it here."""

    trl_loss: str
    """TRL's loss that runs, and whose reduction of tokens holds for all terms."""
    clip: Literal["ratio", "log_ratio", "cap", "divergence", None] = "ratio"
    """Meaning of `epsilon` and `epsilon_high`: the distance of the ratio from 1, the distance of its log from 0, a cap
    of the ratio itself (`epsilon_high` only), the largest divergence of a token, or nothing."""
    advantages: Literal["by_level", "token", "sequence"] = "by_level"
    """Which advantages count: those of tokens, the mean of a sequence, or tokens only if the ratio is per token."""

    # The rest is for losses that TRL does not have.
    name: str = ""
    """Name of the method; "" for TRL's own losses."""
    level: Literal["sequence", "token", None] = None
    """`importance_sampling_level`; None if the user chooses it."""
    epsilon: float | Callable[[Any], float] | None = None
    """Default of `epsilon`, or a function of the config; None for TRL's."""
    epsilon_high: float | None = None
    """Default of `epsilon_high` if `epsilon` is unset too."""
    rewrite: Callable[[MicroBatch], MicroBatch] | None = None
    """Changes the micro-batch so that TRL's loss on token ratios becomes this one."""
    policy_term: Callable[[MicroBatch, Trainer, Tensor | None], Tensor] | None = None
    """Computes the policy term (B, T) itself, as `gmpo_term` does. TRL's loss adds its other terms.

    It gets the micro-batch, with 0 outside the mask; the trainer, whose clip ranges and `delta` it must apply; and the
    tokens (B, T) to which `top_entropy_quantile` limits the gradient, or None. Advantages are (B,), (B, 1) or (B, T);
    with `advantages="sequence"` there is one for each sequence.
    """
    token_masks: Callable[[MicroBatch, Trainer], Mapping[str, Tensor]] | None = None
    """Returns name -> (B, T) bool, False = left out of the policy term, logged as the share `dropped/name`."""
    to_sampler: bool = False
    """True if the ratio is to the sampler. The config then switches off TRL's correction for an engine, which would be
    a second ratio to it."""
    trl_epsilons: Callable[[Trainer], Mapping[str, float]] | None = None
    """Returns `epsilon_low` and `epsilon_high` for TRL's metrics of clipping; None for the trainer's. It needs a
    `policy_term`, because TRL also clips its own term with them."""

    @property
    def is_ours(self) -> bool:
        """True if TRL does not have this loss."""
        return bool(self.name)

    def takes_token_advantages(self, importance_sampling_level: str) -> bool:
        """Return True if the gradient of each token carries the advantage of that token."""
        return self.advantages == "token" or (self.advantages == "by_level" and importance_sampling_level == "token")


def gspo_token(batch: MicroBatch) -> MicroBatch:
    """Return the micro-batch with log-probs that make TRL's token-level loss GSPO-token.

    Its ratio is s_it = sg[s_i] · π(y_it) / sg[π(y_it)], where sg stops the gradient: its value is the sequence's
    ratio, its gradient that of the token's own log-prob. TRL forms exp(logps - old_logps), which is exactly this ratio
    for the pair (log π - sg[log π], -sg[log s_i]), because log π - sg[log π] is exactly 0. The pair (log π,
    sg[log π] - log s_i) is the same on paper. But its rounding error is about 1e-3 times the paper's clip range
    (3e-4), so a clip bound could separate tokens of one sequence.

    The reference is shifted too: TRL's loss depends only on differences of log-probs.
    """
    constant = batch.logps.detach()  # sg[log π]
    ref_logps = batch.ref_logps
    if ref_logps is not None:
        ref_logps = ref_logps - constant
    return replace(
        batch,
        logps=batch.logps - constant,
        old_logps=(-batch.sequence_log_ratio).expand_as(constant),
        ref_logps=ref_logps,
    )


def gmpo_term(batch: MicroBatch, trainer: Trainer, is_kept: Tensor | None) -> Tensor:
    """Return the policy term of GMPO, (B, T) equal values for all tokens of a sequence: -ratio · A."""
    advantages = batch.advantages.view(-1, 1)
    mask = batch.mask
    if is_kept is not None:
        mask = mask & is_kept.bool()
    bounds = {"low": trainer.epsilon_low, "high": trainer.epsilon_high, "delta": trainer.args.delta}
    log_ratio = gmpo_log_ratio(batch.log_ratio, advantages, mask, **bounds)
    return (-log_ratio.exp() * advantages).expand_as(batch.logps)


def _clip_in_ratios(trainer: Trainer) -> dict[str, float]:
    """Return GMPO's clip ranges, of log-ratios, as distances of the ratio from 1."""
    high = min(trainer.epsilon_high, 700.0)  # e^709 overflows
    return {"epsilon_low": -math.expm1(-trainer.epsilon_low), "epsilon_high": math.expm1(high)}


def sampler_ratio_term(batch: MicroBatch, trainer: Trainer, is_kept: Tensor | None, *, largest: float) -> Tensor:
    """Return the policy term of DPPO and M2PO before their masks, (B, T): -min(π/μ, C) · A, with C = `delta`.

    Without `delta`, C is `largest`. The value is that of DPPO's equation 12, and the gradient that of equation 23,
    which flows at the bound C too.
    """
    if trainer.args.delta is not None:
        largest = trainer.args.delta
    largest = min(largest, _LARGEST_FINITE_RATIO)  # a mask would make NaN of an infinite ratio
    ratio = truncate(batch.logps - batch.behavior_logps, math.log(largest)).exp()
    values = -ratio * batch.advantages.view(len(ratio), -1)
    if is_kept is None:
        return values
    return values * is_kept


def dppo_masks(batch: MicroBatch, trainer: Trainer) -> dict[str, Tensor]:
    """Return the tokens that DPPO keeps (equation 12): those that do not move on away from the sampler's policy.

    A token is dropped if its advantage is positive and its probability has grown too much, or the reverse.
    """
    advantages = batch.advantages.view(len(batch.mask), -1)
    moved = binary_divergence(batch.logps, batch.behavior_logps, kind=trainer.args.dppo_divergence)
    return {
        "dppo_low": (advantages >= 0) | (moved >= -trainer.epsilon_low),
        "dppo_high": (advantages <= 0) | (moved <= trainer.epsilon_high),
    }


def m2po_masks(batch: MicroBatch, trainer: Trainer) -> dict[str, Tensor]:
    """Return the tokens that M2PO keeps (arXiv 2510.01161, Algorithm 1), chosen among those of the micro-batch."""
    log_ratio = (batch.logps - batch.behavior_logps).detach()
    moves_on = batch.mask & (batch.advantages.view(len(batch.mask), -1) * log_ratio > 0)
    return {"m2po": second_moment_mask(log_ratio, moves_on, budget=trainer.args.m2po_budget)}


_LARGEST_FINITE_RATIO = math.exp(20)
_LARGEST_RATIO = 20.0  # verl's C for DPPO
_NOTHING_IS_CLIPPED: dict[str, float] = {"epsilon_low": math.inf, "epsilon_high": math.inf}

LOSSES: dict[str, Loss] = {
    # TRL's
    "grpo": Loss("grpo"),
    "bnpo": Loss("bnpo"),
    "dr_grpo": Loss("dr_grpo"),
    "dapo": Loss("dapo"),
    # a sequence's ratio gives all tokens the same gradient, unless it is only a weight, as in cispo and vespo
    "cispo": Loss("cispo", clip="cap", advantages="token"),
    "sapo": Loss("sapo", clip=None),
    "luspo": Loss("luspo"),
    "vespo": Loss("vespo", clip=None, advantages="token"),
    # GSPO (arXiv 2507.18071, section 4.1): one clipped ratio, the geometric mean s_i of those of the tokens, and one
    # advantage for each sequence. TRL computes it, on a micro-batch with 0 in place of padding, which TRL would read.
    "gspo": Loss(
        "grpo",
        advantages="sequence",
        name="GSPO",
        level="sequence",
        epsilon=3e-4,  # section 5.1: left and right clipping range
        epsilon_high=4e-4,
    ),
    # GSPO-token (section 4.3): GSPO's ratio in value, with the advantage of each token
    "gspo_token": Loss(
        "grpo",
        advantages="token",
        name="GSPO-token",
        level="sequence",
        epsilon=3e-4,
        epsilon_high=4e-4,
        rewrite=gspo_token,
    ),
    # GMPO (arXiv 2507.20673, equation 4): the geometric mean of clipped token ratios, times the advantage
    "gmpo": Loss(
        "grpo",
        clip="log_ratio",
        advantages="sequence",
        name="GMPO",
        level="token",
        epsilon=0.4,  # the clip range (e^-0.4, e^0.4)
        epsilon_high=0.4,
        policy_term=gmpo_term,
        trl_epsilons=_clip_in_ratios,
    ),
    # DPPO (arXiv 2602.04879, equations 12 to 14): a mask by the probability of the sampled token, in place of a clip.
    # The sum over tokens is that of equation 12, up to a constant.
    "dppo": Loss(
        "dr_grpo",
        clip="divergence",
        advantages="token",
        name="DPPO",
        level="token",
        epsilon=lambda args: {"tv": 0.2, "kl": 0.05}[args.dppo_divergence],  # appendix E; 0.15 for tv in appendix C
        # the paper has 5 in its large runs (appendix E), and none in its analysis (appendix C): low bounds do harm
        # (section 5.4)
        policy_term=functools.partial(sampler_ratio_term, largest=_LARGEST_RATIO),
        token_masks=dppo_masks,
        to_sampler=True,
        trl_epsilons=lambda _: _NOTHING_IS_CLIPPED,
    ),
    # M2PO (arXiv 2510.01161): ratios without a clip, and without the tokens that are farthest from the sampler. The
    # mean over all tokens of the rollout is that of the paper's objective.
    "m2po": Loss(
        "dapo",
        clip=None,
        advantages="token",
        name="M2PO",
        level="token",
        # the paper has no bound: one wrong log-prob of an engine would be the whole update. DPPO's, for the same term
        policy_term=functools.partial(sampler_ratio_term, largest=_LARGEST_RATIO),
        token_masks=m2po_masks,
        to_sampler=True,
        trl_epsilons=lambda _: _NOTHING_IS_CLIPPED,
    ),
}
"""`loss_type` -> what the loss is."""
