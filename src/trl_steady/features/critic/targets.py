"""Values, returns and advantages of a rollout."""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from trl_steady.core.types import Rollout
from trl_steady.features.critic.trainer import PPO
from trl_steady.features.step_rewards.feature import StepRewardsFeature
from trl_steady.functional import advantages, values
from trl_steady.trl_bridge.models import text_tokenizer
from trl_steady.trl_bridge.rollout import log_token_advantages


def targets(
    trainer: PPO, rollout: Rollout, old_values: Tensor, after: Tensor | None, *, kl_coef: float
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the targets of policy and critic in a rollout, and log what they show. Every process must call this.

    Args:
        trainer: The trainer, whose `StepRewardsFeature` has the rewards.
        rollout: TRL's samples with the log-probs that the KL needs.
        old_values: (B, T) values of the critic.
        after: (B,) value of the state after each completion; None: 0 for all.
        kl_coef: Coefficient of the KL in the reward.

    Returns:
        (B, T) float32 columns, 0 where there is no action token: `values` of the critic at rollout, its targets
        `returns`, NaN for a completion that no reward function has scored, and the policy's `advantages`. And (2,) the
        sum over the answers of all processes of their KL to the reference, in nats, and the number of answers.
    """
    args, samples, mask = trainer.args, rollout.samples, rollout.is_sampled
    steps = trainer.feature(StepRewardsFeature)
    table = steps.own_steps(mask)
    is_scored = table.is_rewarded.unsqueeze(1)
    is_cut = _is_cut(trainer, samples)
    score = values.at_ends(table.rewards.float(), table.ends, mask)
    if args.missing_eos_penalty is not None:
        penalty = torch.full_like(score[:, :1], -args.missing_eos_penalty).where(is_cut, torch.nan)
        score = score + values.at_ends(penalty, torch.full_like(table.ends[:, :1], mask.size(1)), mask)
    rewards, kl = score, torch.zeros_like(score)
    if kl_coef:
        kl = (samples["old_per_token_logps"] - samples["ref_per_token_logps"]).where(mask, 0)
        rewards = score - kl_coef * kl
    counts, old_values = mask & is_scored, old_values.float().where(mask, 0)
    if args.whiten_rewards:
        rewards = values.whitened(rewards, counts, _everywhere(trainer, rewards, counts)[0], shift_mean=False)
    bootstrap = None if after is None else after.float().where(is_cut.squeeze(1), 0)
    lam, value_lam = args.lam, args.lam if args.value_lam is None else args.value_lam
    of_policy, of_critic = (
        advantages.gae(rewards, old_values, mask, gamma=args.gamma, lam=each, bootstrap=bootstrap)
        for each in (lam, value_lam)
    )
    returns = of_critic + old_values
    answer_kl, has_tokens = kl.sum(1, keepdim=True), mask.any(1, keepdim=True)
    totals = _everywhere(trainer, of_policy, counts, returns, counts, of_critic, counts, answer_kl, has_tokens)
    if args.whiten_advantages:
        of_policy = values.whitened(of_policy, counts, totals[0])
    of_policy = of_policy.where(counts, 0)
    log_token_advantages(trainer, of_policy, rollout.is_sampled)
    if steps.has_steps:
        steps.keep_advantages(rollout, of_policy)
    if kl_coef and trainer.beta == 0:  # otherwise TRL logs that of the loss
        trainer.metrics.token_mean("kl", kl, mask)
    explained = 1 - values.variance(totals[2]) / values.variance(totals[1])
    of_rollout = torch.ones(1, 1, dtype=torch.bool, device=mask.device)
    trainer.metrics.pooled(
        means={
            "value/mean": (old_values, counts),
            "value/returns": (returns, counts),
            "value/explained_variance": (explained.view(1, 1), of_rollout & explained.isfinite()),
            "kl_coef": (torch.full_like(of_rollout, kl_coef, dtype=torch.float64), of_rollout),
            "kl_per_answer": (answer_kl, has_tokens),
            "reward_with_kl": (rewards.sum(1, keepdim=True), has_tokens & is_scored),
        }
    )
    return {
        "values": old_values,
        "returns": returns.where(mask, 0).where(is_scored, torch.nan),
        "advantages": of_policy,
    }, totals[3][[1, 0]]


def _is_cut(trainer: PPO, samples: Mapping[str, Tensor]) -> Tensor:
    """Return (B, 1) bool, True for a completion that does not end as a model ends its text."""
    ends = samples["completion_mask"].sum(1, keepdim=True)
    last = samples["completion_ids"].gather(1, (ends - 1).clamp(min=0))
    stops = torch.tensor([*trainer.eos_token_ids, text_tokenizer(trainer).pad_token_id], device=last.device)
    return ~torch.isin(last, stops) & (ends > 0)


def _everywhere(trainer: PPO, *pairs: Tensor) -> Tensor:
    """Return (n, 3) moments over all processes of n values under their masks."""
    exact = torch.float64 if pairs[0].device.type in ("cpu", "cuda") else torch.float32
    masked = zip(pairs[::2], pairs[1::2], strict=True)
    moments = torch.stack([values.moments(each.to(exact), mask) for each, mask in masked])
    return cast(Tensor, trainer.accelerator.reduce(moments, reduction="sum"))
