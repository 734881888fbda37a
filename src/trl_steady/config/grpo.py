"""`trl.GRPOConfig` with trl-steady's options: defaults from the papers, errors, and warnings with a fix."""

import math
import warnings
from dataclasses import dataclass
from typing import ClassVar

import trl

from trl_steady.config.checks import refuse_contradictions, refuse_contradictions_of_loss, trl_default
from trl_steady.config.idle import cannot_act, loss_cannot_act
from trl_steady.config.shared import SharedOptions, documented, option
from trl_steady.config.values import refuse_out_of_range
from trl_steady.losses.table import LOSSES, Loss

__all__ = ["GRPOConfig"]


@documented
@dataclass
class GRPOConfig(SharedOptions, trl.GRPOConfig):
    """`trl.GRPOConfig` with three more losses and with the options of all other methods of trl-steady.

    Options that are not listed here are TRL's and keep TRL's defaults.

    `sync_ref_model` also works with PEFT, on quantised bases and across resumes. The KL reference moves to the policy
    every `ref_model_sync_steps` optimizer steps, before the next generation (DeepSeekMath, arXiv 2402.03300,
    Algorithm 1). `ref_model_mixup_alpha=1` copies the policy; TRL's default, 0.6, mixes the two.

    Args:
        {options}

    Raises:
        ValueError: An option is invalid, or the chosen loss would ignore it. The message names the option, its value
            and the fix.

    Warns:
        UserWarning: An option has no effect because of another one. For example, every update would be on-policy, or
            a clip range is too wide for a sequence ratio.
    """

    METHOD = "GRPO"
    _DEPTH: ClassVar[int] = 3  # of a script that builds the config, seen from here
    loss_type: str = option(
        trl_default("loss_type"),
        'One of TRL\'s losses, or one of three more. `"gspo"` is GSPO (arXiv 2507.18071, section 4.1): one clipped '
        'ratio and one advantage per sequence. `"gspo_token"` is GSPO-token (section 4.3): the same ratio in '
        'value, with advantages per token. `"gmpo"` is GMPO (arXiv 2507.20673): the geometric mean of clipped '
        "token ratios.",
    )
    epsilon: float | None = option(
        None,
        "Lower clip range. If unset, 3e-4 for gspo and gspo_token (section 5.1), 0.4 for gmpo (of the log-ratio), "
        "and TRL's default otherwise.",
    )
    epsilon_high: float | None = option(
        None,
        "Upper clip range. If unset, 4e-4 for gspo and gspo_token and 0.4 for gmpo when `epsilon` is unset too. "
        "Otherwise it is `epsilon`, which is TRL's rule.",
    )
    importance_sampling_level: str | None = option(
        None,
        '`"token"` or `"sequence"`. If unset, `"sequence"` for gspo and gspo_token and TRL\'s default otherwise.',
    )
    kl_estimator: str = option(
        "k3",
        '`"k1"`, `"k2"` or `"k3"` (GRPO\'s): how the KL is estimated from a sampled token. '
        "`trl_steady.functional.kl` lists the gradient of each. With `use_bias_correction_kl` all three have the "
        "gradient of the reverse KL.",
    )
    kl_ratio_denominator: str = option(
        "old",
        'Denominator of the ratio with which `use_bias_correction_kl` corrects the KL. `"old"` is the policy at '
        'rollout, scored by the trainer. `"sampler"` is the inference engine\'s log-probs, with which the '
        "correction is unbiased.",
    )
    off_policy_mask_level: str = option(
        "sequence",
        "With advantages per token, how `off_policy_mask_threshold` (DeepSeek-V3.2, arXiv 2512.02556, section "
        '3.1) decides. `"sequence"` decides once for all tokens, by the sign of their mean advantage. `"token"` '
        "decides for each token by its own advantage.",
    )
    geometric_mask_range: list[float] | None = option(
        None,
        "(low, high). Leave out of the policy term each sequence whose geometric mean of the token ratios, "
        "trainer to inference engine, is outside this range. None: no mask.",
    )
    token_veto_threshold: float | None = option(
        None,
        "Leave out of the policy term each sequence that has a token whose ratio, trainer to inference engine, is "
        "below this value. None: no mask.",
    )
    step_advantage: str = option(
        "return_to_go",
        'Formula for the advantages when reward functions return `StepRewards`. `"process"` (DeepSeekMath, arXiv '
        "2402.03300, section 4.1.3) sums the rewards from a step on, each normalised over the group's steps. "
        '`"return_to_go"` sums the rewards from a step on and subtracts the mean of the same sum in the group\'s '
        'other completions. With `scale_rewards="none"` it does not favour stopping early or late.',
    )

    def __post_init__(self) -> None:
        refuse_out_of_range(self)
        self._fill_unset()
        super().__post_init__()
        refuse_contradictions(self)
        refuse_contradictions_of_loss(self)
        for message in self.cannot_act:
            warnings.warn(message, UserWarning, stacklevel=self._DEPTH)

    @property
    def cannot_act(self) -> list[str]:
        """Warnings about options that have no effect, each with a fix."""
        return [*cannot_act(self), *loss_cannot_act(self)]

    @property
    def loss(self) -> Loss:
        """The entry of `loss_type` in the table of losses."""
        return LOSSES[self.loss_type]

    def has_trls_kl(self, importance_sampling_level: str) -> bool:
        """Return True if TRL's own KL is the configured one: k3, plain or with a per-token ratio to the old policy."""
        if self.kl_estimator != "k3":
            return False
        own_ratio = importance_sampling_level == "token" and self.kl_ratio_denominator == "old"
        return own_ratio or not self.use_bias_correction_kl

    @property
    def sampler_options(self) -> list[str]:
        """Names of the options that are set and need the sampler's log-probs."""
        has_ratio = self.beta != 0 and self.use_bias_correction_kl
        set_ones = {
            "kl_ratio_denominator": self.kl_ratio_denominator == "sampler" and has_ratio,
            "geometric_mask_range": self.geometric_mask_range is not None,
            "token_veto_threshold": self.token_veto_threshold is not None,
        }
        return [option for option, is_set in set_ones.items() if is_set]

    @property
    def idle_without_engine(self) -> list[str]:
        """Warnings about options that have no effect when the policy itself samples, each with a fix."""
        threshold = self.off_policy_mask_threshold
        if threshold is None or threshold == math.inf:  # infinity only switches on metrics
            return []
        if self.is_on_policy:
            return [
                f"off_policy_mask_threshold={threshold} cannot act: every update is on-policy, so the policy and the "
                f"sampler are the same. {self.way_off_policy}"
            ]
        assert self.epsilon is not None  # filled in at construction
        clipped = -math.log1p(-self.epsilon) if self.epsilon < 1 else math.inf
        clips_sequences = self.importance_sampling_level == "sequence" and self.loss.clip == "ratio"
        # with gspo_token, the advantages of a sequence's tokens may have both signs
        if clips_sequences and self.loss.advantages != "token" and threshold >= clipped:
            return [
                f"off_policy_mask_threshold={threshold} cannot act with one advantage per sequence: from "
                f"-log(1 - epsilon) = {clipped:.6g} on, the lower clip of the sequence ratio (epsilon={self.epsilon}) "
                "already removes the gradient of the same sequences. Set it to None or to a lower value. The mask can "
                "act with token ratios or with an inference engine."
            ]
        return []

    def _fill_unset(self) -> None:
        loss = self.loss
        if self.epsilon is None:
            self.epsilon = trl_default("epsilon") if loss.epsilon is None else loss.epsilon
            if self.epsilon_high is None:
                self.epsilon_high = loss.epsilon_high
        if self.importance_sampling_level is None:
            self.importance_sampling_level = loss.level or trl_default("importance_sampling_level")
