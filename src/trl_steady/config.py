"""TRL's `GRPOConfig` with our losses: paper defaults, refusals with the way out, warnings for what cannot act."""

import math
import warnings
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, get_args, get_type_hints

import trl

__all__ = ["GRPOConfig"]

NATIVE_LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
SEQUENCE_RATIO_LOSS_TYPES = ("gspo", "gspo_token")
# which clip at 1 - epsilon and 1 + epsilon_high
CLIPPED_LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", *SEQUENCE_RATIO_LOSS_TYPES)

# GSPO, arXiv 2507.18071, section 5.1: left and right clipping range
GSPO_EPSILON, GSPO_EPSILON_HIGH = 3e-4, 4e-4
TOKEN_SCALE_EPSILON = 1e-2


def _trl_default(name: str) -> Any:
    """TRL's default of an option, read from TRL, so that it moves with TRL."""
    (option,) = (f for f in fields(trl.GRPOConfig) if f.name == name)
    return option.default_factory() if option.default_factory is not MISSING else option.default


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
            `"return_to_go"`, the sum itself less what the group's other completions got from the same step on.
        ref_model_sync_kl: Also move the reference when the KL of an update, as logged and so by `kl_estimator`,
            exceeds this many nats a token. None: by steps only.
        ref_model_sync_reset_optimizer: Clear the optimizer's state at each move (ProRL, arXiv 2505.24864).
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
        default=_trl_default("loss_type"),
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
    adapter_dtype: str | None = field(
        default=None,
        metadata={"help": "'float32' keeps the adapters of a quantised base in float32, where TRL makes them bf16."},
    )

    def __post_init__(self) -> None:
        _refuse_out_of_range(self)
        self._fill_unset()
        super().__post_init__()
        _refuse_idle_reference(self)
        if self.has_sequence_ratio_loss:
            _refuse_under_sequence_ratio(self)
        _refuse_kl_without_effect(self)
        for message in (*_inactive(self), *_token_scale(self), *_idle_options(self)):
            warnings.warn(message, UserWarning, stacklevel=3)

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
            self.epsilon = GSPO_EPSILON if ours else _trl_default("epsilon")
            if self.epsilon_high is None and ours:
                self.epsilon_high = GSPO_EPSILON_HIGH
        if self.importance_sampling_level is None:
            self.importance_sampling_level = "sequence" if ours else _trl_default("importance_sampling_level")


# Option, what holds for a value that can work, and how to say it. None works where the option's type has it.
_RANGES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("importance_sampling_level", lambda v: v in ("token", "sequence"), "'token' or 'sequence'"),
    ("epsilon", lambda v: v >= 0, "0 or above"),
    ("epsilon_high", lambda v: v >= 0, "0 or above"),
    ("delta", lambda v: v > 0, "above 0, or None for no two-sided clip"),
    ("beta", lambda v: 0 <= v < math.inf, "a finite number, 0 (no KL) or above"),
    ("kl_estimator", lambda v: v in ("k1", "k2", "k3"), "'k1', 'k2' or 'k3'"),
    ("kl_ratio_denominator", lambda v: v in ("old", "sampler"), "'old' or 'sampler'"),
    ("off_policy_mask_level", lambda v: v in ("sequence", "token"), "'sequence' or 'token'"),
    (
        "geometric_mask_range",
        lambda v: len(v) == 2 and 0 <= v[0] <= 1 <= v[1],
        "two ratios, (low, high), with low <= 1 <= high, such as (0.99, 1.01), or None for no such mask",
    ),
    ("step_advantage", lambda v: v in ("process", "return_to_go"), "'process' or 'return_to_go'"),
    ("token_veto_threshold", lambda v: 0 < v < 1, "above 0 and below 1, such as 0.0001, or None for no such mask"),
    ("ref_model_sync_steps", lambda v: v >= 1 and v == int(v), "1, 2, 3, ... optimizer steps"),
    ("ref_model_mixup_alpha", lambda v: 0 < v <= 1, "above 0 and at most 1, where 1 copies the policy"),
    ("ref_model_sync_kl", lambda v: 0 < v < math.inf, "above 0, in nats a token, or None for refreshes by steps only"),
    ("adapter_dtype", lambda v: v == "float32", "'float32', or None for TRL's choice"),
    ("off_policy_mask_threshold", lambda v: v >= 0, "0 or above, in nats a token, or None for no mask"),
    ("entropy_coef", math.isfinite, "a finite number, 0 for no bonus"),
    ("num_iterations", lambda v: v >= 1 and v == int(v), "1, 2, 3, ..."),
    ("steps_per_generation", lambda v: v >= 1, "1 or more, or None for gradient_accumulation_steps"),
    ("gradient_accumulation_steps", lambda v: v >= 1, "1 or more"),
    ("max_completion_length", lambda v: v >= 1, "1 or more tokens"),
    (
        "temperature",
        lambda v: 0 < v < math.inf,
        "a finite number above 0 (the policy is sampled, not decoded greedily)",
    ),
    ("top_p", lambda v: 0 < v <= 1, "above 0 and at most 1"),
    ("min_p", lambda v: 0 <= v <= 1, "between 0 and 1, or None"),
    ("repetition_penalty", lambda v: 0 < v < math.inf, "a finite number above 0 (1 for no penalty)"),
    ("top_entropy_quantile", lambda v: 0 <= v <= 1, "between 0 and 1 (1 keeps every token)"),
    (
        "multi_objective_aggregation",
        lambda v: v in ("sum_then_normalize", "normalize_then_sum"),
        "'sum_then_normalize' or 'normalize_then_sum'",
    ),
    ("scale_rewards", lambda v: v in ("group", "batch", "none", True, False), "'group', 'batch' or 'none'"),
    (
        "vllm_importance_sampling_mode",
        lambda v: v in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
        "'token_truncate', 'token_mask', 'sequence_truncate' or 'sequence_mask'",
    ),
)

# Read by one other loss only; under gspo and gspo_token they would be ignored.
_OPTIONS_OF_OTHER_LOSSES = (
    ("sapo", ("sapo_temperature_pos", "sapo_temperature_neg")),
    ("vespo", ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")),
)


def _refuse_out_of_range(args: GRPOConfig) -> None:
    losses = (*NATIVE_LOSS_TYPES, *SEQUENCE_RATIO_LOSS_TYPES)
    if args.loss_type not in losses:
        raise ValueError(f"loss_type={args.loss_type!r} is unknown. Set it to one of: {', '.join(losses)}.")
    types = get_type_hints(type(args))  # not the fields' own, which HfArgumentParser rewrites in place
    for option, holds, expected in _RANGES:
        value = getattr(args, option)
        try:
            works = type(None) in get_args(types[option]) if value is None else holds(value)
        except (TypeError, LookupError):  # of a type that does not compare, such as a number given as a string
            works = False
        if not works:
            raise ValueError(f"{option}={value!r} cannot work. Set {option} to {expected}.")


def _refuse_under_sequence_ratio(args: GRPOConfig) -> None:
    loss_type, low, high = args.loss_type, args.epsilon, args.epsilon_high
    assert low is not None
    high = low if high is None else high
    if args.importance_sampling_level != "sequence":
        raise ValueError(
            f"importance_sampling_level={args.importance_sampling_level!r} contradicts loss_type={loss_type!r}, whose "
            "ratio is the sequence's. Leave importance_sampling_level unset, or set loss_type='grpo' for token ratios."
        )
    if low >= 1:
        raise ValueError(
            f"epsilon={low} with loss_type={loss_type!r} never clips from below: a ratio is above 0. Set it below 1; "
            f"the paper's is {GSPO_EPSILON}."
        )
    if args.delta is not None and args.delta <= 1 + high:
        raise ValueError(
            f"delta={args.delta} lies inside the clip range of loss_type={loss_type!r} (upper end {1 + high}), where "
            f"it would stand in for epsilon_high. Set delta above {1 + high}, or None for no two-sided clip."
        )
    for other, options in _OPTIONS_OF_OTHER_LOSSES:
        for option in options:
            if getattr(args, option) != _trl_default(option):
                raise ValueError(
                    f"{option}={getattr(args, option)!r} is an option of loss_type={other!r} and would be ignored by "
                    f"loss_type={loss_type!r}. Leave {option} unset, or set loss_type={other!r}."
                )


def _refuse_idle_reference(args: GRPOConfig) -> None:
    """Refuse options of a moving reference where there is none, or where it does not move."""
    if args.sync_ref_model and args.beta == 0:
        raise ValueError(
            "sync_ref_model=True with beta=0.0: without a KL there is no reference to move. Set beta above 0 "
            "(DeepSeekMath uses 0.04), or sync_ref_model=False."
        )
    for option in ("ref_model_sync_kl", "ref_model_sync_reset_optimizer"):
        if getattr(args, option) and not args.sync_ref_model:
            raise ValueError(
                f"{option}={getattr(args, option)!r} would be ignored: with sync_ref_model=False the reference does "
                f"not move. Set sync_ref_model=True, or leave {option} unset."
            )


def _refuse_kl_without_effect(args: GRPOConfig) -> None:
    if args.beta != 0 and args.kl_estimator == "k1" and not args.use_bias_correction_kl:
        raise ValueError(
            "kl_estimator='k1' with use_bias_correction_kl=False: the gradient of log policy - log reference does not "
            "depend on the reference, and on policy its expectation is 0, so that the KL would add noise and hold "
            "nothing. Set use_bias_correction_kl=True, or kl_estimator to 'k2' or 'k3'."
        )


def _idle_options(args: GRPOConfig) -> list[str]:
    """Options that something else in the config makes idle."""
    no_kl = "beta=0.0 there is no KL. Set beta above 0"
    no_mask = "off_policy_mask_threshold=None there is no mask. Set off_policy_mask_threshold"
    idle = [
        ("kl_estimator", "k3", args.beta == 0, no_kl),
        ("kl_ratio_denominator", "old", args.beta == 0, no_kl),
        (
            "kl_ratio_denominator",
            "old",
            args.beta != 0 and not args.use_bias_correction_kl,
            "use_bias_correction_kl=False the KL has no ratio. Set use_bias_correction_kl=True",
        ),
        ("off_policy_mask_level", "sequence", args.off_policy_mask_threshold is None, no_mask),
        (
            "off_policy_mask_level",
            "sequence",
            args.off_policy_mask_threshold is not None and args.loss_type == "gspo",
            "loss_type='gspo' a sequence has one advantage. Set loss_type='gspo_token'",
        ),
    ]
    return [
        f"{option}={getattr(args, option)!r} cannot act: with {why}, or leave {option} unset."
        for option, default, is_off, why in idle
        if is_off and getattr(args, option) != default
    ]


def _inactive(args: GRPOConfig) -> list[str]:
    """A loss that cannot act because every update is on-policy."""
    if not (args.has_sequence_ratio_loss and args.is_on_policy):
        return []
    return [
        f"loss_type={args.loss_type!r} cannot act: every update is on-policy, so that the sequence ratio is exactly 1 "
        f"and nothing is ever clipped (gradient_accumulation_steps={args.gradient_accumulation_steps} uses up the "
        f"generation batch: steps_per_generation={args.steps_per_generation}, num_iterations={args.num_iterations}). "
        f"{args.way_off_policy}"
    ]


def _token_scale(args: GRPOConfig) -> list[str]:
    if args.loss_type not in CLIPPED_LOSS_TYPES:
        return []
    ranges = {"epsilon": args.epsilon, "epsilon_high": args.epsilon_high}
    wide = [f"{name}={value}" for name, value in ranges.items() if value is not None and value >= TOKEN_SCALE_EPSILON]
    if args.importance_sampling_level != "sequence" or not wide:
        return []
    return [
        f"{' and '.join(wide)}: a clip range of token scale under a sequence ratio, which is a mean over the answer "
        f"and moves far less, so that almost nothing will be clipped. The GSPO paper uses epsilon={GSPO_EPSILON} and "
        f"epsilon_high={GSPO_EPSILON_HIGH}."
    ]
