# TRL has no None where an option of ours may be unset
# pyright: reportIncompatibleVariableOverride=false
"""`trl.GRPOConfig` with trl-steady's options: defaults from the papers, errors, and warnings with a fix.

`Needs("beta")` in an annotation: without `beta`, the option has no effect. `IN_ROLLOUT`: a resume inside a rollout
needs the same value. `PolicyLoss` in `features/policy_loss.py` reads the options of the loss and of its KL.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from trl import GRPOConfig as _TRLConfig  # by name, because `trl-steady run` replaces it in `trl`

from trl_steady.config.options import (
    AROUND_1,
    BELOW_1,
    COEFFICIENT,
    COLUMN,
    IN_ROLLOUT,
    MODEL,
    NOT_NEGATIVE,
    PROMPTS,
    Idle,
    Needs,
    Range,
    option,
)
from trl_steady.config.shared import SharedOptions
from trl_steady.losses import LOSSES, Loss

if TYPE_CHECKING:
    _Prompt = str | Callable[[Mapping[str, Any]], Any]
else:
    _Prompt = str  # for TRL's parser, which knows no such union

_LOSS = Range(  # a script may add some
    LOSSES.__contains__, f"one of {', '.join(map(repr, LOSSES))}", {"enum": list(LOSSES)}
)
_TOKEN_SCALE_EPSILON = 1e-2  # clip ranges from here on are those of token ratios


@dataclass
class GRPOConfig(SharedOptions, _TRLConfig):
    """`trl.GRPOConfig` with five more losses and with the options of all other methods of trl-steady.

    All other options are TRL's and keep TRL's defaults. `trl-steady grpo --help` lists all.

    `sync_ref_model` also works with PEFT, on quantised bases and across resumes. The KL reference moves to the policy
    every `ref_model_sync_steps` optimizer steps, before the next generation (DeepSeekMath, arXiv 2402.03300,
    Algorithm 1). `ref_model_mixup_alpha=1` copies the policy; TRL's default, 0.6, mixes the two.

    Raises:
        ValueError: An option is invalid, or the chosen loss would ignore it. The message names the option, its value
            and the fix.

    Warns:
        UserWarning: An option has no effect because of another one. For example, every update would be on-policy, or
            a clip range is too wide for a sequence ratio.
    """

    METHOD = "GRPO"
    TRL_NUMBERS = (*SharedOptions.TRL_NUMBERS, "off_policy_mask_threshold", "delta")
    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*_TRLConfig._VALID_DICT_FIELDS, "vllm_engine_kwargs", "eval_generation"]
    loss_type: Annotated[str, _LOSS] = option(
        _TRLConfig.loss_type,
        'One of TRL\'s losses, or one of five more. `"gspo"` is GSPO (arXiv 2507.18071, section 4.1): one clipped '
        'ratio and one advantage per sequence. `"gspo_token"` is GSPO-token (section 4.3): the same ratio in value, '
        'with advantages per token. `"gmpo"` is GMPO (arXiv 2507.20673): the geometric mean of clipped token ratios. '
        '`"dppo"` is DPPO (arXiv 2602.04879, equation 12): the ratio to the sampler, without tokens whose probability '
        'has moved too far. `"m2po"` is M2PO (arXiv 2510.01161): the same ratio, without the tokens that are farthest '
        "from the sampler. Both switch off `vllm_importance_sampling_correction`, a second ratio to the sampler.",
    )
    scale_rewards: Literal["group", "batch", "none", "mean", True, False] = option(
        "group",
        'Divisor of the advantages. TRL has `"group"`, `"batch"` and `"none"`. `"mean"` is MaxRL (arXiv 2602.02710): '
        "the reward less the mean of its group, divided by this mean. Rewards must be 0 or above.",
    )
    dppo_divergence: Literal["tv", "kl"] = option(
        "tv",
        'How `loss_type="dppo"` measures how far a token\'s probability has moved from the sampler (equations 13 and '
        '14). `"tv"`: by the difference. `"kl"`: by the KL, with the sampled token and the rest as two tokens.',
    )
    m2po_budget: Annotated[float, NOT_NEGATIVE] = option(
        0.04,
        'With `loss_type="m2po"`, the largest mean of squared log-ratios of policy to sampler, over the tokens that '
        "the update moves further from the sampler. The largest are dropped until the mean fits the budget (section "
        "4.2).",
    )
    sampler_penalty: Annotated[float, COEFFICIENT] = option(
        0.0,
        "Add this times the squared log-ratio of policy to sampler, for each token, to the loss (Kimi K2.5, arXiv "
        "2602.02276, equation 1). The sampler is the old policy without an engine. No mask drops it. 0: no penalty.",
    )
    epsilon: Annotated[float | None, NOT_NEGATIVE] = option(
        None,
        "Lower clip range. If unset, 3e-4 for gspo and gspo_token (section 5.1), 0.4 for gmpo (of the log-ratio), "
        "for dppo (the largest divergence, appendix E) 0.2 with tv and 0.05 with kl, and TRL's default otherwise.",
    )
    epsilon_high: Annotated[float | None, NOT_NEGATIVE] = option(
        None,
        "Upper clip range. If unset, 4e-4 for gspo and gspo_token and 0.4 for gmpo when `epsilon` is unset too. "
        "Otherwise it is `epsilon`, which is TRL's rule.",
    )
    importance_sampling_level: Literal["token", "sequence"] | None = option(
        None, '`"token"` or `"sequence"`. If unset, `"sequence"` for gspo and gspo_token and TRL\'s default otherwise.'
    )
    kl_estimator: Annotated[Literal["k1", "k2", "k3"], Needs("beta"), IN_ROLLOUT] = option(
        "k3",
        '`"k1"`, `"k2"` or `"k3"` (GRPO\'s): how the KL is estimated from a sampled token. `trl_steady.functional.kl` '
        "lists the gradient of each. With `use_bias_correction_kl` all three have the gradient of the reverse KL.",
    )
    kl_ratio_denominator: Annotated[Literal["old", "sampler"], Needs("beta", "use_bias_correction_kl"), IN_ROLLOUT] = (
        option(
            "old",
            'Denominator of the ratio with which `use_bias_correction_kl` corrects the KL. `"old"` is the policy at '
            'rollout, scored by the trainer. `"sampler"` is the inference engine\'s log-probs, with which the '
            "correction is unbiased.",
        )
    )
    beta_column: Annotated[str | None, COLUMN, Needs("beta"), IN_ROLLOUT] = option(
        None,
        "Column of the data set with a factor of `beta` for each row, 0 or above. DeepSeek-V3.2 (arXiv 2512.02556, "
        "section 3.1) sets the strength of the KL by domain. None: `beta` for all rows.",
    )
    off_policy_mask_level: Literal["sequence", "token"] = option(
        "sequence",
        "With advantages per token, how `off_policy_mask_threshold` (DeepSeek-V3.2, arXiv 2512.02556, section 3.1) "
        'decides. `"sequence"` decides once for all tokens, by the sign of their mean advantage. `"token"` decides '
        "for each token by its own advantage.",
    )
    geometric_mask_range: Annotated[list[float] | None, AROUND_1] = option(
        None,
        "(low, high). Leave out of the policy term each sequence whose geometric mean of the token ratios, trainer "
        "to inference engine, is outside this range. None: no mask.",
    )
    token_veto_threshold: Annotated[float | None, BELOW_1] = option(
        None,
        "Leave out of the policy term each sequence that has a token whose ratio, trainer to inference engine, is "
        "below this value. None: no mask.",
    )
    advantage_baseline: Annotated[Literal["group", "token"], IN_ROLLOUT] = option(
        "group",
        'What is subtracted from a reward. `"group"`: the mean of the group, as in TRL. `"token"`: the optimal token '
        "baseline (arXiv 2602.07078), a mean of the group's rewards for each token, in which answers weigh by the "
        "squared gradients of their log-probs up to there.",
    )
    teacher: Annotated[str | None, MODEL, IN_ROLLOUT] = option(
        None,
        "A model that scores the sampled tokens: its name or path, the folder of a PEFT adapter (with PEFT, it is "
        'loaded beside the policy\'s, on the same base), `"reference"` (the reference as it moves, also with '
        '`beta=0`), or the address of a server, such as `"http://localhost:8000"` (vLLM, or another whose '
        "`/v1/completions` has `echo` and `logprobs`). None: no teacher.",
    )
    teacher_coef: Annotated[float, COEFFICIENT, Needs("teacher"), IN_ROLLOUT] = option(
        0.5, "Strength of the `teacher`: see `teacher_mode`. 0: only measure how far it is."
    )
    teacher_mode: Annotated[Literal["add", "weight"], Needs("teacher"), IN_ROLLOUT] = option(
        "weight",
        "What the `teacher` does to a token's advantage A, with d = log teacher - log old policy. "
        '`"add"`: A + coef d (on-policy distillation). `"weight"`: A ((1 - coef) + coef clip(exp(sign(A) d), 0.8, '
        "1.2)), so that rewards give the sign, and the teacher the size (RLSD, arXiv 2604.03128).",
    )
    teacher_prompt: Annotated[_Prompt | None, PROMPTS, Needs("teacher"), IN_ROLLOUT] = option(
        None,
        "The prompt that the `teacher` reads in place of the policy's, for example with the solution in it: the name "
        "of a column, or a function of a row (a dictionary) that returns a text or a conversation. None: the policy's "
        "prompt.",
    )
    step_advantage: Annotated[Literal["process", "return_to_go"], IN_ROLLOUT] = option(
        "return_to_go",
        'Formula for the advantages when reward functions return `StepRewards`. `"process"` (DeepSeekMath, arXiv '
        "2402.03300, section 4.1.3) sums the rewards from a step on, each normalised over the group's steps. "
        '`"return_to_go"` sums the rewards from a step on and subtracts the mean of the same sum in the group\'s '
        'other completions. With `scale_rewards="none"` it does not favour stopping early or late.',
    )

    def _idle_because(self) -> dict[str, Idle | None]:
        reasons = super()._idle_because()
        loss_type = f"loss_type={self.loss_type!r}"
        if self.loss.is_ours:
            why = self._why_on_sampler if self.loss.to_sampler else self._why_on_policy
            if self.loss.advantages == "sequence" and self._chooses_tokens:
                why = None  # it acts on whole sequences, and TRL's losses on the chosen tokens
            if why is not None:  # TRL's default reduces tokens otherwise than some of our losses
                why = why._replace(instead=f"set loss_type={self.loss.trl_loss!r}, which then trains the same")
            reasons["loss_type"] = why
        for name, own_loss in (("dppo_divergence", "dppo"), ("m2po_budget", "m2po")):
            if self.loss_type != own_loss:
                reasons[name] = Idle(loss_type, f"Set loss_type={own_loss!r}")
        reasons["sampler_penalty"] = self._why_on_sampler
        if self.off_policy_mask_threshold is None:
            reasons["off_policy_mask_level"] = Idle("off_policy_mask_threshold=None", "Set off_policy_mask_threshold")
        elif self.loss.advantages == "sequence":
            reasons["off_policy_mask_level"] = Idle(f"{loss_type} has one advantage per sequence", "")
        if self.off_policy_mask_threshold != math.inf:  # inf: metrics only
            reasons["off_policy_mask_threshold"] = self._why_on_sampler
        if not self._takes_token_advantages:
            reasons["step_advantage"] = Idle(f"the ratio of {loss_type} is of sequences", "Set loss_type='gspo_token'")
        return reasons

    def _fill_unset(self) -> None:
        if self.teacher is not None:
            self.teacher = os.fspath(self.teacher)
        loss = self.loss
        if self.epsilon is None:
            epsilon = loss.epsilon
            if callable(epsilon):
                epsilon = epsilon(self)
            self.epsilon = _TRLConfig.epsilon if epsilon is None else epsilon
            if self.epsilon_high is None:
                self.epsilon_high = loss.epsilon_high
        if self.importance_sampling_level is None:
            self.importance_sampling_level = loss.level or "token"  # TRL's default
        if loss.to_sampler:
            self.vllm_importance_sampling_correction = False

    def _contradictions(self) -> Iterator[str]:
        yield from super()._contradictions()
        if self.beta != 0 and self.kl_estimator == "k1" and not self.use_bias_correction_kl:
            yield (
                "kl_estimator='k1' with use_bias_correction_kl=False only adds noise: its gradient is 0 in "
                "expectation. Set use_bias_correction_kl=True, or kl_estimator to 'k2' or 'k3'."
            )
        if self.scale_rewards == "mean" and self.multi_objective_aggregation != "sum_then_normalize":
            yield (
                f"scale_rewards='mean' contradicts multi_objective_aggregation={self.multi_objective_aggregation!r}, "
                "which divides by deviations. Set multi_objective_aggregation='sum_then_normalize'."
            )
        if self.loss.is_ours and self.importance_sampling_level != self.loss.level:
            yield (
                f"importance_sampling_level={self.importance_sampling_level!r} contradicts loss_type="
                f"{self.loss_type!r}, which is {self.loss.level!r}. Leave importance_sampling_level unset."
            )
        for name, off in (("advantage_baseline", "group"), ("teacher", None)):
            if getattr(self, name) != off and self.METHOD == "GRPO" and not self._takes_token_advantages:
                yield (
                    f"{name}={getattr(self, name)!r} does not work with loss_type={self.loss_type!r}, whose ratio is "
                    "of sequences. Set loss_type='gspo_token', or leave it unset."
                )
        if self.teacher_is_server and (self.temperature != 1 or self.keep_sampling_mask):
            yield (
                f"teacher={self.teacher!r} scores at temperature 1 and over the whole vocabulary. Set temperature=1.0 "
                "and keep_sampling_mask=False, or load the teacher here."
            )
        if self.ref_model_sync_kl and self.teacher and not self.measures_kl:
            off = "beta=0.0"
            if self.METHOD == "PPO":
                off = "beta=0.0 and kl_coef=0.0"
            yield (
                f"ref_model_sync_kl={self.ref_model_sync_kl} does not work with {off}: no KL is measured. Set "
                "one above 0, or leave it unset."
            )

    @property
    def teacher_is_server(self) -> bool:
        """True if the teacher is behind an address."""
        return self.teacher is not None and self.teacher.startswith(("http://", "https://"))

    @property
    def has_reference(self) -> bool:
        """True if the policy is compared with a reference."""
        return super().has_reference or self.teacher == "reference"

    @property
    def measures_kl(self) -> bool:
        """True if the KL to the reference is measured."""
        return self.beta != 0

    @property
    def why_needs_old_pass(self) -> str | None:
        """Setting with which a rollout needs its pass of the old policy; None without one."""
        if self.teacher:
            return f"teacher={self.teacher!r}, which is compared with these log-probs"
        return super().why_needs_old_pass

    @property
    def doubts(self) -> list[str]:
        """Warnings about options that have no effect, or probably not the intended one, each with a fix."""
        messages = super().doubts
        epsilon, epsilon_high = self.epsilon or 0, self.epsilon_high or 0
        if self.loss.clip == "log_ratio" and epsilon <= _TRLConfig.epsilon:
            messages.append(
                f"epsilon={self.epsilon} is for token ratios, and loss_type={self.loss_type!r} clips log-ratios. "
                f"Leave epsilon unset, or set epsilon={self.loss.epsilon}."
            )
        is_sequence_ratio = self.loss.clip == "ratio" and self.importance_sampling_level == "sequence"
        if is_sequence_ratio and max(epsilon, epsilon_high) >= _TOKEN_SCALE_EPSILON:
            messages.append(
                f"epsilon={self.epsilon} and epsilon_high={self.epsilon_high} are for token ratios. A sequence ratio "
                "varies far less, so almost nothing will be clipped. Set epsilon=3e-4 and epsilon_high=4e-4, as GSPO."
            )
        return messages

    @property
    def loss(self) -> Loss:
        """The entry of `loss_type` in the table of losses."""
        return LOSSES[self.loss_type]

    @property
    def _takes_token_advantages(self) -> bool:
        return self.loss.takes_token_advantages(self.importance_sampling_level or "token")

    @property
    def _chooses_tokens(self) -> bool:
        """True if tokens of one sequence have other weights in TRL's losses."""
        corrects = self.use_vllm and self.vllm_importance_sampling_correction
        weighs_tokens = corrects and self.vllm_importance_sampling_mode.startswith("token")
        return self.top_entropy_quantile < 1.0 or weighs_tokens

    @property
    def _why_on_sampler(self) -> Idle | None:
        """Reason why each update is of the policy that sampled; None without one."""
        if self.use_vllm:
            return None
        why = self._why_on_policy
        if why is None:
            return None
        return why._replace(because=f"{why.because}, unless a rollout_func generates")

    # for the table of methods

    @property
    def has_sequence_kl(self) -> bool:
        """True if the KL has a ratio of its own, because that of the policy term is of sequences."""
        is_corrected = self.beta != 0 and self.use_bias_correction_kl
        return is_corrected and self.importance_sampling_level == "sequence"

    @property
    def has_off_policy_mask(self) -> bool:
        """True if `off_policy_mask_threshold` is set, also to 0."""
        return self.off_policy_mask_threshold is not None

    @property
    def sampler_options(self) -> list[str]:
        """Names of the options that are set and need the sampler's log-probs."""
        names: list[str] = []
        if self.kl_ratio_denominator == "sampler" and self.beta != 0 and self.use_bias_correction_kl:
            names.append("kl_ratio_denominator")
        for name in ("geometric_mask_range", "token_veto_threshold"):
            if getattr(self, name) is not None:
                names.append(name)
        return names
