"""`trl.GRPOConfig` with trl-steady's options: defaults from the papers, errors, and warnings with a fix."""

import math
import sys
import warnings
from dataclasses import dataclass, field
from typing import Any

import transformers
import trl

from trl_steady.config.checks import refuse_contradictions, reweights, trl_default, truncates
from trl_steady.config.idle import cannot_act
from trl_steady.config.values import refuse_out_of_range
from trl_steady.losses.table import LOSSES, Loss

__all__ = ["GRPOConfig"]


@dataclass
class GRPOConfig(trl.GRPOConfig):
    """`trl.GRPOConfig` with two more losses and with the options of all other methods of trl-steady.

    Options that are not listed here are TRL's and keep TRL's defaults.

    `sync_ref_model` also works with PEFT, on quantised bases and across resumes. The KL reference moves to the policy
    every `ref_model_sync_steps` optimizer steps, before the next generation (DeepSeekMath, arXiv 2402.03300,
    Algorithm 1). `ref_model_mixup_alpha=1` copies the policy; TRL's default, 0.6, mixes the two.

    Args:
        loss_type: One of TRL's losses, or one of two more. `"gspo"` is GSPO (arXiv 2507.18071, section 4.1): one
            clipped ratio and one advantage per sequence. `"gspo_token"` is GSPO-token (section 4.3): the same ratio in
            value, with advantages per token.
        epsilon: Lower clip range. If unset, 3e-4 for gspo and gspo_token (section 5.1) and TRL's default otherwise.
        epsilon_high: Upper clip range. If unset, 4e-4 for gspo and gspo_token when `epsilon` is unset too. Otherwise
            it is `epsilon`, which is TRL's rule.
        importance_sampling_level: `"token"` or `"sequence"`. If unset, `"sequence"` for gspo and gspo_token and TRL's
            default otherwise.
        kl_estimator: `"k1"`, `"k2"` or `"k3"` (GRPO's): how the KL is estimated from a sampled token.
            `trl_steady.functional.kl` lists the gradient of each. With `use_bias_correction_kl` all three have the
            gradient of the reverse KL.
        kl_ratio_denominator: Denominator of the ratio with which `use_bias_correction_kl` corrects the KL. `"old"` is
            the policy at rollout, scored by the trainer. `"sampler"` is the inference engine's log-probs, with which
            the correction is unbiased.
        off_policy_mask_level: With advantages per token, how `off_policy_mask_threshold` (DeepSeek-V3.2, arXiv
            2512.02556, section 3.1) decides. `"sequence"` decides once for all tokens, by the sign of their mean
            advantage. `"token"` decides for each token by its own advantage.
        geometric_mask_range: (low, high). Leave out of the policy term each sequence whose geometric mean of the
            token ratios, trainer to inference engine, is outside this range. None: no mask.
        token_veto_threshold: Leave out of the policy term each sequence that has a token whose ratio, trainer to
            inference engine, is below this value. None: no mask.
        step_advantage: Formula for the advantages when reward functions return `StepRewards`. `"process"`
            (DeepSeekMath, arXiv 2402.03300, section 4.1.3) sums the rewards from a step on, each normalised over the
            group's steps. `"return_to_go"` sums the rewards from a step on and subtracts the mean of the same sum in
            the group's other completions. With `scale_rewards="none"` it does not favour stopping early or late.
        ref_model_sync_kl: With `sync_ref_model`, also move the reference when the KL of an update exceeds this many
            nats per token. The KL is the logged one, so it depends on `kl_estimator`. None: move it by steps only.
        ref_model_sync_reset_optimizer: With `sync_ref_model`, clear the optimizer's state each time the reference
            moves (ProRL, arXiv 2505.24864).
        trim_padding: Compute only the tokens of a batch, not its padding, in every pass of the policy and the
            reference. Columns that are padding in every row are cut off. If padding is left, sequences are packed.
            Results change within float rounding. False: keep the padding, as in TRL.
        token_budget: Maximum number of tokens in a micro-batch of the policy. Micro-batches are filled with sequences
            of the optimizer step up to this number. A longer sequence is a micro-batch of its own. None: TRL's
            micro-batches of `per_device_train_batch_size` sequences.
        share_prompts: Compute a prompt once for all of its completions in the same forward pass.
        router_replay: For mixtures of experts. `"R2"`: all updates use the experts that were chosen when the old
            log-probs of the rollout were computed. `"R3"`: the old log-probs and the updates use the experts that were
            chosen while the rollout was generated. None: each pass chooses its experts, as in TRL.
        router_replay_reference: With `router_replay`, the reference's pass uses the same experts too.
        keep_sampling_mask: If `top_p`, `top_k` or `min_p` exclude tokens from sampling, normalise log-probs over the
            tokens that were kept, under policy, old policy and reference (DeepSeek-V3.2, section 3.1, "Keep Sampling
            Mask"). False: normalise over the whole vocabulary, as in TRL.
        adapter_dtype: `"float32"` keeps the adapters of a quantised base in float32. TRL makes them bf16, in which
            steps with a small learning rate round away. None: as in TRL.

    Raises:
        ValueError: An option is invalid, or the chosen loss would ignore it. The message names the option, its value
            and the fix.

    Warns:
        UserWarning: An option has no effect because of another one. For example, every update would be on-policy, or
            a clip range is too wide for a sequence ratio.
    """

    loss_type: str = field(
        default=trl_default("loss_type"),
        metadata={
            "help": "One of TRL's losses, 'gspo' (GSPO: one clipped ratio and one advantage per sequence), or "
            "'gspo_token' (GSPO-token: the same ratio in value, with advantages per token)."
        },
    )
    epsilon: float | None = field(
        default=None,
        metadata={"help": "Lower clip range. If unset, 3e-4 for gspo and gspo_token and TRL's default otherwise."},
    )
    epsilon_high: float | None = field(
        default=None,
        metadata={
            "help": "Upper clip range. If unset, 4e-4 for gspo and gspo_token when epsilon is unset too, and epsilon "
            "otherwise."
        },
    )
    importance_sampling_level: str | None = field(
        default=None,
        metadata={
            "help": "'token' or 'sequence'. If unset, 'sequence' for gspo and gspo_token and TRL's default otherwise."
        },
    )

    kl_estimator: str = field(
        default="k3",
        metadata={"help": "'k1', 'k2' or 'k3': how the KL is estimated from a sampled token."},
    )
    kl_ratio_denominator: str = field(
        default="old",
        metadata={
            "help": "Denominator of the ratio with which use_bias_correction_kl corrects the KL: 'old' (the policy at "
            "rollout, scored by the trainer) or 'sampler' (the inference engine's log-probs)."
        },
    )
    off_policy_mask_level: str = field(
        default="sequence",
        metadata={
            "help": "How off_policy_mask_threshold decides with advantages per token: 'sequence' decides once for all "
            "tokens, by the sign of their mean advantage; 'token' decides for each token by its own advantage."
        },
    )
    geometric_mask_range: list[float] | None = field(
        default=None,
        metadata={
            "help": "(low, high). Leave out sequences whose geometric mean of the token ratios, trainer to engine, is "
            "outside this range."
        },
    )
    token_veto_threshold: float | None = field(
        default=None,
        metadata={"help": "Leave out sequences that have a token whose ratio, trainer to engine, is below this."},
    )
    step_advantage: str = field(
        default="return_to_go",
        metadata={
            "help": "Formula for the advantages of StepRewards: 'process' (DeepSeekMath: the sum of the rewards from "
            "a step on, each normalised over the group's steps) or 'return_to_go' (the sum of the rewards from a step "
            "on, minus the mean of that sum in the group's other completions)."
        },
    )
    ref_model_sync_kl: float | None = field(
        default=None,
        metadata={
            "help": "With sync_ref_model, also move the reference when the KL of an update exceeds this many nats per "
            "token."
        },
    )
    ref_model_sync_reset_optimizer: bool = field(
        default=False,
        metadata={"help": "With sync_ref_model, clear the optimizer's state each time the reference moves."},
    )
    trim_padding: bool = field(
        default=True,
        metadata={
            "help": "Compute only the tokens of a batch, not its padding, in every pass of the policy and the "
            "reference."
        },
    )
    token_budget: int | None = field(
        default=None,
        metadata={
            "help": "Maximum number of tokens in a micro-batch of the policy. If unset, TRL's micro-batches of "
            "per_device_train_batch_size sequences."
        },
    )
    share_prompts: bool = field(
        default=False,
        metadata={"help": "Compute a prompt once for all of its completions in the same forward pass."},
    )
    router_replay: str | None = field(
        default=None,
        metadata={
            "help": "For mixtures of experts: replay the experts chosen when the old log-probs were computed ('R2') "
            "or while the rollout was generated ('R3')."
        },
    )
    router_replay_reference: bool = field(
        default=False,
        metadata={"help": "With router_replay, the reference's pass uses the same experts too."},
    )
    keep_sampling_mask: bool = field(
        default=False,
        metadata={
            "help": "If top_p, top_k or min_p exclude tokens from sampling, normalise log-probs over the tokens that "
            "were kept."
        },
    )
    adapter_dtype: str | None = field(
        default=None,
        metadata={"help": "'float32' keeps the adapters of a quantised base in float32. TRL makes them bf16."},
    )

    def __post_init__(self) -> None:
        refuse_out_of_range(self)
        self._fill_unset()
        super().__post_init__()
        refuse_contradictions(self)
        for message in cannot_act(self):
            warnings.warn(message, UserWarning, stacklevel=3)

    def get_process_log_level(self) -> int:
        """Return the log level, as transformers does.

        Raises:
            ValueError: The caller is a trainer that is not trl-steady's and would ignore trl-steady's options.
        """
        # transformers.Trainer.__init__ calls this method, so TRL needs no patch. A script may call it too.
        caller = sys._getframe(1).f_locals.get("self")
        if isinstance(caller, transformers.Trainer):
            from trl_steady.host import Steady  # not at the top: a script may only parse options

            if not isinstance(caller, Steady):
                name = f"{type(caller).__module__}.{type(caller).__qualname__}"
                raise ValueError(
                    f"{name} got a trl_steady.GRPOConfig and would ignore trl-steady's options. For GRPO, import the "
                    "trainer from trl_steady too: from trl_steady import GRPOConfig, GRPOTrainer. Give any other "
                    "trainer its own config."
                )
        return super().get_process_log_level()

    @property
    def loss(self) -> Loss:
        """What `loss_type` is."""
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

    @property
    def sampling(self) -> dict[str, Any]:
        """Generation options that are set; `generation_kwargs` override TRL's own options."""
        own = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty"]
        own += ["vllm_structured_outputs_regex"] if self.use_vllm else []
        options = {**{name: getattr(self, name) for name in own}, **self._generation_kwargs}
        return {name: value for name, value in options.items() if value is not None}

    @property
    def _generation_kwargs(self) -> dict[str, Any]:
        assert not isinstance(self.generation_kwargs, str)  # parsed by transformers.TrainingArguments
        return self.generation_kwargs or {}

    @property
    def truncations(self) -> list[str]:
        """Settings that exclude tokens from sampling, such as "top_p=0.9"."""
        return [f"{name}={value!r}" for name, value in self.sampling.items() if truncates(name, value)]

    @property
    def weightings(self) -> list[str]:
        """Settings that change the probabilities of the kept tokens, such as "repetition_penalty=1.1"."""
        weights = {name: value for name, value in self.sampling.items() if reweights(name, value)}
        if self.sampling["temperature"] != self.temperature:  # log-probs are computed with the latter
            weights["temperature"] = self.sampling["temperature"]
        return [f"{name}={value!r}" for name, value in weights.items()]

    @property
    def is_on_policy(self) -> bool:
        """True if each generation batch feeds only one optimizer step, so that the ratio is exactly 1.

        TRL then does not compute old log-probs.
        """
        assert self.steps_per_generation is not None  # filled in by trl.GRPOConfig
        return self.gradient_accumulation_steps % (self.steps_per_generation * self.num_iterations) == 0

    @property
    def way_off_policy(self) -> str:
        """Advice for an on-policy config: the settings with which a rollout feeds several updates."""
        assert self.steps_per_generation is not None  # filled in by trl.GRPOConfig
        accumulation = self.gradient_accumulation_steps
        batch = 4 * accumulation * self.per_device_train_batch_size * self.world_size
        return (
            f"Set steps_per_generation={4 * accumulation} (or generation_batch_size={batch}, if you set that instead) "
            "for four updates per rollout as in the GSPO paper, or "
            f"num_iterations={accumulation // self.steps_per_generation + 1} or more."
        )

    def _fill_unset(self) -> None:
        loss = self.loss
        if self.epsilon is None:
            self.epsilon = trl_default("epsilon") if loss.epsilon is None else loss.epsilon
            if self.epsilon_high is None:
                self.epsilon_high = loss.epsilon_high
        if self.importance_sampling_level is None:
            self.importance_sampling_level = loss.level or trl_default("importance_sampling_level")
