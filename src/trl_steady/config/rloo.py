"""`trl.RLOOConfig` with the options of trl-steady that apply to RLOO."""

import warnings
from dataclasses import dataclass, fields
from typing import Any

import trl

from trl_steady.config.checks import refuse_contradictions
from trl_steady.config.grpo import GRPOConfig
from trl_steady.config.idle import cannot_act
from trl_steady.config.shared import SharedOptions, documented
from trl_steady.config.values import refuse_out_of_range

__all__ = ["RLOOConfig"]

_ONE_LOSS = "RLOO has one loss, with the clipped ratio of whole sequences"
_KL = "RLOO's KL is log policy - log reference at rollout, summed over a sequence, and part of its reward"
_NO_MASK = "RLOO's loss has no masks, and TRL asks its engine for no log-probs"
_ADVANTAGE = "RLOO has one advantage per sequence, relative to the group's other answers"
# options of GRPO -> why RLOO does not have them
_REASONS = {
    **dict.fromkeys(("loss_type", "importance_sampling_level", "delta"), _ONE_LOSS),
    **dict.fromkeys(("kl_estimator", "kl_ratio_denominator", "use_bias_correction_kl"), _KL),
    **dict.fromkeys(("off_policy_mask_threshold", "off_policy_mask_level"), _NO_MASK),
    **dict.fromkeys(("geometric_mask_range", "token_veto_threshold"), _NO_MASK),
    **dict.fromkeys(("step_advantage", "scale_rewards"), _ADVANTAGE),
}


@documented
@dataclass
class RLOOConfig(SharedOptions, trl.RLOOConfig):
    """`trl.RLOOConfig` with a moving reference, padding-free passes, routing replay and the kept sampling mask.

    Options that are not listed here are TRL's and keep TRL's defaults.

    `sync_ref_model` also works with PEFT, on quantised bases and across resumes. The reference moves to the policy
    every `ref_model_sync_steps` optimizer steps, before the next generation. `ref_model_mixup_alpha=1` copies the
    policy; TRL's default, 0.6, mixes the two.

    Args:
        {options}

    Raises:
        ValueError: An option is invalid, or is one of GRPO that RLOO does not have. The message names the option, its
            value and the fix.

    Warns:
        UserWarning: An option has no effect because of another one.
    """

    METHOD = "RLOO"

    def __new__(cls, *_: Any, **options: Any) -> "RLOOConfig":
        """Refuse options of GRPO with the reason, which Python would only call unexpected."""
        known = {own.name for own in fields(cls)}
        for option in options.keys() & {own.name for own in fields(GRPOConfig)} - known:
            raise ValueError(
                f"{option}={options[option]!r} is an option of GRPO: {_REASONS.get(option, 'RLOO does not read it')}. "
                f"Leave {option} unset, or train with GRPOConfig and GRPOTrainer."
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        refuse_out_of_range(self)
        super().__post_init__()
        refuse_contradictions(self)
        for message in self.cannot_act:
            warnings.warn(message, UserWarning, stacklevel=3)

    @property
    def cannot_act(self) -> list[str]:
        """Warnings about options that have no effect, each with a fix."""
        return cannot_act(self)
