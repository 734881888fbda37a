"""Values, returns and advantages of a rollout. Read `critic_targets` first."""

import functools
from collections.abc import Mapping
from typing import NamedTuple, cast

import torch
from torch import Tensor

from trl_steady.config.ppo import PPOConfig
from trl_steady.core.feature import Trainer
from trl_steady.core.types import Rollout
from trl_steady.features.step_rewards.feature import StepRewardsFeature
from trl_steady.functional import advantages, values
from trl_steady.trl_bridge.models import text_tokenizer


class TokenRewards(NamedTuple):
    """The rewards of a rollout, 0 where there is no action token."""

    rewards: Tensor
    """(B, T) scores at the ends of steps, less the KL to the reference."""
    kl: Tensor
    """(B, T) log policy - log reference at rollout; 0 without `kl_coef`."""
    counts: Tensor
    """(B, T) bool, True for the action tokens of completions that a reward function has scored."""
    is_scored: Tensor
    """(B, 1) bool, False for completions that no reward function has scored."""
    is_truncated: Tensor
    """(B, 1) bool, True for completions without an end of their text."""


def critic_targets(
    trainer: Trainer,
    args: PPOConfig,
    rollout: Rollout,
    old_values: Tensor,
    after: Tensor | None,
    kl_coef: float,
) -> tuple[dict[str, Tensor], Tensor]:
    """Give a rollout its advantages, return its other targets, and log them. Every process must call this function.

    Args:
        trainer: The trainer, whose reward functions have returned.
        args: Its config.
        rollout: TRL's samples with the log-probs that the KL needs.
        old_values: (B, T) values of the critic.
        after: (B,) value of the state after each completion; None: 0 for all.
        kl_coef: Coefficient of the KL in the reward.

    Returns:
        (B, T) float32 columns, 0 where there is no action token: `values` of the critic at rollout, and its targets
        `returns`, NaN for a completion that no reward function has scored. Then the (3,) moments, over all processes,
        of the completions' KL to the reference in nats.
    """
    mask = rollout.is_sampled
    old_values = old_values.float().where(mask, 0)
    tokens = rewards_with_kl(trainer, args, rollout, kl_coef)
    # after a completion that has ended there is no further reward
    bootstrap = None
    if after is not None:
        bootstrap = after.float().where(tokens.is_truncated.squeeze(1), 0)
    gae = functools.partial(advantages.gae, tokens.rewards, old_values, mask, gamma=args.gamma, bootstrap=bootstrap)
    policy_advantages = gae(lam=args.lam)
    critic_advantages = gae(lam=args.lam if args.value_lam is None else args.value_lam)
    returns = critic_advantages + old_values
    kl_per_completion = tokens.kl.sum(1, keepdim=True)
    has_tokens = mask.any(1, keepdim=True)
    advantage_moments, return_moments, critic_moments, kl_moments = _moments(
        trainer,
        (policy_advantages, tokens.counts),
        (returns, tokens.counts),
        (critic_advantages, tokens.counts),
        (kl_per_completion, has_tokens),
    )
    if args.whiten_advantages:
        policy_advantages = values.whitened(policy_advantages, tokens.counts, advantage_moments)
    policy_advantages = policy_advantages.where(tokens.counts, 0)
    explained = 1 - values.variance(critic_moments) / values.variance(return_moments)
    rollout.samples["advantages"] = policy_advantages
    if kl_coef and trainer.beta == 0:  # otherwise TRL logs that of the loss
        trainer.metrics.token_mean("kl", tokens.kl, mask)
    once = torch.ones(1, 1, dtype=torch.bool, device=mask.device)
    trainer.metrics.pooled(
        means={
            "value/mean": (old_values, tokens.counts),
            "value/returns": (returns, tokens.counts),
            "value/explained_variance": (explained.view(1, 1), once & explained.isfinite()),
            "kl_coef": (torch.full_like(once, kl_coef, dtype=torch.float64), once),
            "kl_per_answer": (kl_per_completion, has_tokens),
            "reward_with_kl": (tokens.rewards.sum(1, keepdim=True), has_tokens & tokens.is_scored),
        }
    )
    columns = {"values": old_values, "returns": returns.where(mask, 0).where(tokens.is_scored, torch.nan)}
    return columns, kl_moments


def rewards_with_kl(trainer: Trainer, args: PPOConfig, rollout: Rollout, kl_coef: float) -> TokenRewards:
    """Return the reward of each action token: scores of steps, penalty and KL. Every process must call this function.

    The KL in the reward is that of InstructGPT (arXiv 2203.02155, section 3.5).
    """
    samples, mask = rollout.samples, rollout.is_sampled
    table = trainer.feature(StepRewardsFeature).own_steps(mask)
    is_scored = table.is_rewarded.unsqueeze(1)
    is_truncated = _is_truncated(trainer, samples)
    counts = mask & is_scored
    rewards = values.at_ends(table.rewards.float(), table.ends, mask)
    if args.missing_eos_penalty is not None:
        penalty = torch.full_like(rewards[:, :1], -args.missing_eos_penalty).where(is_truncated, torch.nan)
        rewards = rewards + values.at_ends(penalty, torch.full_like(table.ends[:, :1], mask.size(1)), mask)
    kl = torch.zeros_like(rewards)
    if kl_coef:
        kl = (samples["old_per_token_logps"] - samples["ref_per_token_logps"]).where(mask, 0)
        rewards = rewards - kl_coef * kl
    if args.whiten_rewards:
        (moments,) = _moments(trainer, (rewards, counts))
        rewards = values.whitened(rewards, counts, moments, shift_mean=False)
    return TokenRewards(rewards, kl, counts, is_scored, is_truncated)


def _is_truncated(trainer: Trainer, samples: Mapping[str, Tensor]) -> Tensor:
    """Return (B, 1) bool, True for a completion that does not end as a model ends its text."""
    lengths = samples["completion_mask"].sum(1, keepdim=True)
    last = samples["completion_ids"].gather(1, (lengths - 1).clamp(min=0))
    ends = torch.tensor([*trainer.eos_token_ids, text_tokenizer(trainer).pad_token_id], device=last.device)
    return ~torch.isin(last, ends) & (lengths > 0)


def _moments(trainer: Trainer, *masked_values: tuple[Tensor, Tensor]) -> Tensor:
    """Return (n, 3) moments of n values under their masks: number, sum and sum of squares over all processes."""
    device = masked_values[0][0].device
    dtype = torch.float64 if device.type in ("cpu", "cuda") else torch.float32
    moments = torch.stack([values.moments(summands.to(dtype), mask) for summands, mask in masked_values])
    return cast(Tensor, trainer.accelerator.reduce(moments, reduction="sum"))
