"""TRL's `GRPOConfig` with our losses: paper defaults, refusals with the way out, warnings for what cannot act."""

import math
import sys
import warnings
from dataclasses import dataclass, field
from typing import Any

import transformers
import trl

from trl_steady.checks import (
    CLIPPED_LOSS_TYPES,
    GSPO_EPSILON,
    GSPO_EPSILON_HIGH,
    SEQUENCE_RATIO_LOSS_TYPES,
    refuse_contradictions,
    reweights,
    trl_default,
    truncates,
)
from trl_steady.idle import cannot_act
from trl_steady.values import refuse_out_of_range

__all__ = ["GRPOConfig"]


@dataclass
class GRPOConfig(trl.GRPOConfig):
    """`trl.GRPOConfig` with two more values of `loss_type`, the paper's clip range where the user set none, and
    options of the KL, of masks and of a reference that moves.

    Every other option is TRL's own and keeps TRL's default. `sync_ref_model` works with PEFT, on quantised bases and
    across resumes too: the KL reference moves to the policy every `ref_model_sync_steps` optimizer steps, before the
    next generation (DeepSeekMath, arXiv 2402.03300, Algorithm 1). `ref_model_mixup_alpha=1` copies; TRL's default,
    0.6, mixes.

    Args:
        loss_type: TRL's values, or
            `"gspo"`: GSPO (arXiv 2507.18071, section 4.1), one clipped ratio and one advantage per sequence;
            `"gspo_token"`: GSPO-token (section 4.3), the same ratio in value, advantages per token.
        epsilon: Lower clip range. Unset: 3e-4 for gspo and gspo_token (section 5.1), TRL's default otherwise.
        epsilon_high: Upper clip range. Unset: 4e-4 for gspo and gspo_token if `epsilon` is unset too; otherwise
            `epsilon`, which is TRL's rule.
        importance_sampling_level: Unset: `"sequence"` for gspo and gspo_token, TRL's default otherwise.
        kl_estimator: `"k1"`, `"k2"` or `"k3"` (GRPO's), of which `trl_steady.functional.kl` says what each one's
            gradient is. With `use_bias_correction_kl` it is always that of the reverse KL.
        kl_ratio_denominator: What `use_bias_correction_kl` divides the policy by: `"old"`, the policy at rollout as
            the trainer scores it; `"sampler"`, the inference engine's own log-probs, with which it is unbiased.
        off_policy_mask_level: Where advantages are per token, `off_policy_mask_threshold` (DeepSeek-V3.2, arXiv
            2512.02556, section 3.1) decides by `"sequence"`, with the sign of the mean advantage, or by `"token"`.
        geometric_mask_range: (low, high): leave sequences out of the policy term whose geometric-mean ratio of trainer
            to inference engine lies outside. None: no such mask.
        token_veto_threshold: Leave sequences out of the policy term in which any token's ratio of trainer to inference
            engine lies below. None: no such mask.
        step_advantage: Where reward functions return `StepRewards`: `"process"` (DeepSeekMath, arXiv 2402.03300,
            section 4.1.3), the sum of the rewards from a step on, each normalised over the group's steps;
            `"return_to_go"`, the sum itself less what the group's other completions got from the same step on, which
            with `scale_rewards="none"` does not favour stopping early or late.
        ref_model_sync_kl: Also move the reference when the KL of an update, as logged and so by `kl_estimator`,
            exceeds this many nats a token. None: by steps only.
        ref_model_sync_reset_optimizer: Clear the optimizer's state at each move (ProRL, arXiv 2505.24864).
        trim_padding: Compute the tokens of a batch and not its padding, in every pass of policy and reference: columns
            that are padding in every row are cut off, and where that leaves padding, sequences are laid end to end.
            Moves results within float rounding. False: as TRL.
        token_budget: Upper bound on the tokens that go through the policy at a time; of an optimizer step's sequences
            as many share a micro-batch as it allows for, a longer one is a micro-batch of its own. None: TRL's
            micro-batches of `per_device_train_batch_size` sequences.
        share_prompts: Completions that go through a model together have one copy of their prompt between them.
        router_replay: For mixtures of experts. `"R2"`: experts chosen when the old log-probs of a rollout are computed
            are chosen again in all its updates. `"R3"`: those chosen while the rollout was generated, in the old
            log-probs and in the updates. None: as TRL, each pass chooses anew.
        router_replay_reference: With `router_replay`, the reference's pass takes the same experts, too.
        keep_sampling_mask: Where `top_p`, `top_k` or `min_p` leave tokens out of sampling, a token has the log-prob
            that it has among those that were kept, under policy, old policy and reference (DeepSeek-V3.2, section 3.1,
            "Keep Sampling Mask"). False: as TRL, of the whole vocabulary.
        adapter_dtype: `"float32"` keeps the adapters of a quantised base in float32, where TRL makes them bf16 and a
            small learning rate rounds away. None: as TRL.

    Raises:
        ValueError: an option that cannot work, or that the chosen loss would ignore. The message names the option, the
            value and the way out.

    Warns:
        UserWarning: every update would be on-policy, so that the loss cannot act; a clip range of token scale under a
            sequence ratio; an option that another one makes idle.
    """

    loss_type: str = field(
        default=trl_default("loss_type"),
        metadata={
            "help": "TRL's losses, or 'gspo' (GSPO: one clipped ratio and one advantage per sequence), or "
            "'gspo_token' (GSPO-token: the sequence's ratio with advantages per token)."
        },
    )
    epsilon: float | None = field(
        default=None,
        metadata={"help": "Lower clip range. Unset: 3e-4 for gspo and gspo_token, TRL's default otherwise."},
    )
    epsilon_high: float | None = field(
        default=None,
        metadata={
            "help": "Upper clip range. Unset: 4e-4 for gspo and gspo_token if epsilon is unset too, otherwise epsilon."
        },
    )
    importance_sampling_level: str | None = field(
        default=None,
        metadata={
            "help": "'token' or 'sequence'. Unset: 'sequence' for gspo and gspo_token, TRL's default otherwise."
        },
    )

    kl_estimator: str = field(
        default="k3",
        metadata={"help": "'k1', 'k2' or 'k3': how the KL is estimated from a sampled token."},
    )
    kl_ratio_denominator: str = field(
        default="old",
        metadata={
            "help": "With use_bias_correction_kl: 'old' or 'sampler', whose log-probs are the denominator of the "
            "ratio that corrects the KL."
        },
    )
    off_policy_mask_level: str = field(
        default="sequence",
        metadata={
            "help": "With off_policy_mask_threshold and advantages per token: 'sequence' decides once for all tokens, "
            "by their mean advantage; 'token' by each token's own."
        },
    )
    geometric_mask_range: list[float] | None = field(
        default=None,
        metadata={
            "help": "Leave out sequences whose geometric-mean ratio of trainer to engine is outside of these two."
        },
    )
    token_veto_threshold: float | None = field(
        default=None,
        metadata={"help": "Leave out sequences with a token whose ratio of trainer to engine is below this."},
    )
    step_advantage: str = field(
        default="return_to_go",
        metadata={
            "help": "Where reward functions return StepRewards: 'process' (DeepSeekMath: sums of rewards normalised "
            "over the group's steps) or 'return_to_go' (each step's return less that of the group's others)."
        },
    )
    ref_model_sync_kl: float | None = field(
        default=None,
        metadata={
            "help": "With sync_ref_model: also move the reference when an update's KL exceeds this many nats a token."
        },
    )
    ref_model_sync_reset_optimizer: bool = field(
        default=False,
        metadata={"help": "With sync_ref_model: clear the optimizer's state whenever the reference moves."},
    )
    trim_padding: bool = field(
        default=True,
        metadata={"help": "Leave padding out of every pass of the policy and the reference."},
    )
    token_budget: int | None = field(
        default=None,
        metadata={"help": "Tokens that go through the policy at a time, in place of per_device_train_batch_size."},
    )
    share_prompts: bool = field(
        default=False,
        metadata={"help": "Compute a prompt once for all completions that go through a model together."},
    )
    router_replay: str | None = field(
        default=None,
        metadata={
            "help": "Mixtures of experts: 'R2' trains each token through the experts of the policy that scored the "
            "rollout, 'R3' through those of the rollout itself."
        },
    )
    router_replay_reference: bool = field(
        default=False,
        metadata={"help": "With router_replay: the reference takes the same experts, too."},
    )
    keep_sampling_mask: bool = field(
        default=False,
        metadata={
            "help": "Where top_p, top_k or min_p leave tokens out of sampling, log-probs are among those that were "
            "kept."
        },
    )
    adapter_dtype: str | None = field(
        default=None,
        metadata={"help": "'float32' keeps the adapters of a quantised base in float32, where TRL makes them bf16."},
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
            ValueError: a trainer that is not trl-steady's asks. It would ignore our options.
        """
        # transformers.Trainer.__init__ calls this for every trainer, so TRL needs no patch. A script may call it too.
        caller = sys._getframe(1).f_locals.get("self")
        if isinstance(caller, transformers.Trainer):
            from trl_steady.host import HostTrainer  # not for a script that only parses options

            if not isinstance(caller, HostTrainer):
                name = f"{type(caller).__module__}.{type(caller).__qualname__}"
                raise ValueError(
                    f"{name} got a trl_steady.GRPOConfig and would ignore trl-steady's options. For GRPO import the "
                    "trainer too: from trl_steady import GRPOConfig, GRPOTrainer. Give any other trainer its own "
                    "config."
                )
        return super().get_process_log_level()

    @property
    def has_sequence_ratio_loss(self) -> bool:
        """Whether `loss_type` is one of ours that clip the sequence's ratio."""
        return self.loss_type in SEQUENCE_RATIO_LOSS_TYPES

    def has_trls_kl(self, importance_sampling_level: str) -> bool:
        """Whether TRL's own KL is the one asked for: k3, plain or with each token's own ratio to the old policy."""
        if self.kl_estimator != "k3":
            return False
        own_ratio = importance_sampling_level == "token" and self.kl_ratio_denominator == "old"
        return own_ratio or not self.use_bias_correction_kl

    @staticmethod
    def takes_token_advantages(loss_type: str, importance_sampling_level: str) -> bool:
        """Whether each token's gradient carries that token's own advantage.

        A sequence's ratio gives every token the same gradient, unless it is only a weight (gspo_token, cispo, vespo).
        """
        return importance_sampling_level == "token" or loss_type in ("gspo_token", "cispo", "vespo")

    @property
    def sampler_options(self) -> list[str]:
        """The options that are set and need the sampler's log-probs."""
        has_ratio = self.beta != 0 and self.use_bias_correction_kl
        set_ones = {
            "kl_ratio_denominator": self.kl_ratio_denominator == "sampler" and has_ratio,
            "geometric_mask_range": self.geometric_mask_range is not None,
            "token_veto_threshold": self.token_veto_threshold is not None,
        }
        return [option for option, is_set in set_ones.items() if is_set]

    @property
    def idle_without_engine(self) -> list[str]:
        """What cannot act where the policy itself has sampled, in sentences with the way out."""
        threshold = self.off_policy_mask_threshold
        if threshold is None or threshold == math.inf:  # which is there to be seen in the metrics
            return []
        if self.is_on_policy:
            return [
                f"off_policy_mask_threshold={threshold} cannot act: every update is on-policy, so that policy and "
                f"sampler are the same. {self.way_off_policy}"
            ]
        assert self.epsilon is not None  # filled in at construction
        clipped = -math.log1p(-self.epsilon) if self.epsilon < 1 else math.inf
        clips_sequences = self.importance_sampling_level == "sequence" and self.loss_type in CLIPPED_LOSS_TYPES
        # gspo_token is there for advantages per token, of which a sequence may have both signs
        if clips_sequences and self.loss_type != "gspo_token" and threshold >= clipped:
            return [
                f"off_policy_mask_threshold={threshold} cannot act on one advantage a sequence: from "
                f"-log(1 - epsilon) = {clipped:.6g} on, the lower clip of the sequence ratio (epsilon={self.epsilon}) "
                "silences the same sequences. Set it to None, or below that; it acts on token ratios and with an "
                "inference engine."
            ]
        return []

    @property
    def sampling(self) -> dict[str, Any]:
        """The options of generation that are set, `generation_kwargs` before TRL's own."""
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
        """What leaves tokens out of sampling, such as "top_p=0.9"."""
        return [f"{name}={value!r}" for name, value in self.sampling.items() if truncates(name, value)]

    @property
    def weightings(self) -> list[str]:
        """What moves probabilities among the tokens that are kept, too, such as "repetition_penalty=1.1"."""
        weights = {name: value for name, value in self.sampling.items() if reweights(name, value)}
        if self.sampling["temperature"] != self.temperature:  # log-probs are at the latter
            weights["temperature"] = self.sampling["temperature"]
        return [f"{name}={value!r}" for name, value in weights.items()]

    @property
    def is_on_policy(self) -> bool:
        """Whether each generation batch feeds one optimizer step only, so that the ratio is exactly 1.

        TRL then skips the old log-probs altogether.
        """
        assert self.steps_per_generation is not None  # filled in by trl.GRPOConfig
        return self.gradient_accumulation_steps % (self.steps_per_generation * self.num_iterations) == 0

    @property
    def way_off_policy(self) -> str:
        """What to set so that a rollout feeds several updates; advice for a config that is on-policy."""
        assert self.steps_per_generation is not None  # filled in by trl.GRPOConfig
        accumulation = self.gradient_accumulation_steps
        batch = 4 * accumulation * self.per_device_train_batch_size * self.world_size
        return (
            f"Set steps_per_generation={4 * accumulation} (if you set the generation batch: "
            f"generation_batch_size={batch}) for four updates per rollout as in the GSPO paper, or "
            f"num_iterations={accumulation // self.steps_per_generation + 1} or more."
        )

    def _fill_unset(self) -> None:
        ours = self.has_sequence_ratio_loss
        if self.epsilon is None:
            self.epsilon = GSPO_EPSILON if ours else trl_default("epsilon")
            if self.epsilon_high is None and ours:
                self.epsilon_high = GSPO_EPSILON_HIGH
        if self.importance_sampling_level is None:
            self.importance_sampling_level = "sequence" if ours else trl_default("importance_sampling_level")
