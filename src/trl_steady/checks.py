"""What a config cannot be and cannot do: refusals with the way out, warnings of what cannot act."""

import math
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import trl

if TYPE_CHECKING:
    from trl_steady.config import GRPOConfig

__all__ = [
    "CLIPPED_LOSS_TYPES",
    "GSPO_EPSILON",
    "GSPO_EPSILON_HIGH",
    "NATIVE_LOSS_TYPES",
    "SEQUENCE_RATIO_LOSS_TYPES",
    "beyond_sets",
    "cannot_act",
    "refuse_contradictions",
    "refuse_means_over_micro_batches",
    "refuse_out_of_range",
    "reweights",
    "trl_default",
    "truncates",
]

NATIVE_LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
SEQUENCE_RATIO_LOSS_TYPES = ("gspo", "gspo_token")
# which clip at 1 - epsilon and 1 + epsilon_high
CLIPPED_LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", *SEQUENCE_RATIO_LOSS_TYPES)

# GSPO, arXiv 2507.18071, section 5.1: left and right clipping range
GSPO_EPSILON, GSPO_EPSILON_HIGH = 3e-4, 4e-4
TOKEN_SCALE_EPSILON = 1e-2


# read at import: `trl-steady run` puts our config in the place of TRL's
_TRLS_OPTIONS = {option.name: option for option in fields(trl.GRPOConfig)}


def trl_default(name: str) -> Any:
    """TRL's default of an option, read from TRL, so that it moves with TRL."""
    option = _TRLS_OPTIONS[name]
    return option.default_factory() if option.default_factory is not MISSING else option.default


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
    ("token_budget", lambda v: v >= 1 and v == int(v), "1 token or more, or None for per_device_train_batch_size"),
    ("router_replay", lambda v: v in ("R2", "R3"), "'R2', 'R3', or None for no replay of routes"),
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

# Options of generation that leave tokens out, where they do.
_TRUNCATIONS: dict[str, Callable[[Any], bool]] = {
    "top_p": lambda v: v < 1,
    "top_k": lambda v: v > 0,
    "min_p": lambda v: v > 0,
    "top_h": lambda v: v < 1,
    "typical_p": lambda v: v < 1,
    "epsilon_cutoff": lambda v: 0 < v < 1,
    "eta_cutoff": lambda v: 0 < v < 1,
    **dict.fromkeys(("vllm_structured_outputs_regex", "structured_outputs"), bool),
    **dict.fromkeys(("bad_words", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens"), bool),
    **dict.fromkeys(("allowed_token_ids", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), bool),
    **dict.fromkeys(("min_new_tokens", "min_length", "min_tokens", "forced_eos_token_id"), bool),
}
# And those that make some tokens likelier than others, with the value that does not.
_WEIGHTINGS = {
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "logit_bias": {},
    "sequence_bias": {},
    "exponential_decay_length_penalty": (),
    "watermarking_config": {},
    "guidance_scale": 1,
}

# Read by one other loss only; under gspo and gspo_token they would be ignored.
_OPTIONS_OF_OTHER_LOSSES = (
    ("sapo", ("sapo_temperature_pos", "sapo_temperature_neg")),
    ("vespo", ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")),
)


def refuse_out_of_range(args: "GRPOConfig") -> None:
    """Refuse values that cannot work whatever else is set.

    Raises:
        ValueError: naming the option, the value and the way out.
    """
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


def truncates(option: str, value: Any) -> bool:
    """Whether an option of generation leaves tokens out."""
    return option in _TRUNCATIONS and _TRUNCATIONS[option](value)


def reweights(option: str, value: Any) -> bool:
    """Whether an option of generation moves probabilities among the tokens that it does not leave out."""
    return option in _WEIGHTINGS and value != _WEIGHTINGS[option]


def refuse_contradictions(args: "GRPOConfig") -> None:
    """Refuse options that can work, but not with one another.

    Raises:
        ValueError: naming the option, the value and the way out.
    """
    _refuse_idle_reference(args)
    _refuse_regrouping(args)
    if args.has_sequence_ratio_loss:
        _refuse_under_sequence_ratio(args)
    _refuse_kl_without_effect(args)
    if args.keep_sampling_mask:
        _refuse_unkept(args)


def cannot_act(args: "GRPOConfig") -> list[str]:
    """What is set and will do nothing, in sentences with the way out."""
    return [*_inactive(args), *_token_scale(args), *_idle_options(args), *_weighted(args)]


def _refuse_under_sequence_ratio(args: "GRPOConfig") -> None:
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
            if getattr(args, option) != trl_default(option):
                raise ValueError(
                    f"{option}={getattr(args, option)!r} is an option of loss_type={other!r} and would be ignored by "
                    f"loss_type={loss_type!r}. Leave {option} unset, or set loss_type={other!r}."
                )


def _refuse_idle_reference(args: "GRPOConfig") -> None:
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


def _refuse_regrouping(args: "GRPOConfig") -> None:
    """Refuse micro-batches other than TRL's where they are not composed, or where the loss is not a sum over them."""
    for option in ("token_budget", "share_prompts"):
        if getattr(args, option) and not args.trim_padding:
            raise ValueError(
                f"{option}={getattr(args, option)!r} with trim_padding=False, which leaves TRL's batches as they are. "
                f"Set trim_padding=True, or leave {option} unset."
            )
    if args.token_budget is None:
        return
    refuse_means_over_micro_batches(args.token_budget, args)
    if args.ref_model_sync_kl is not None:
        raise ValueError(
            f"token_budget={args.token_budget} with ref_model_sync_kl={args.ref_model_sync_kl}, which is compared "
            "with a mean over TRL's micro-batches. Leave one of the two unset."
        )


def refuse_means_over_micro_batches(token_budget: int, args: Any) -> None:
    """Refuse what is a mean over the tokens of each of TRL's micro-batches where these are regrouped.

    Args:
        token_budget: the option.
        args: a config, or a trainer, whose attributes a callback may have set.

    Raises:
        ValueError: naming the option, the value and the way out.
    """
    budget = f"token_budget={token_budget}"
    if args.loss_type == "bnpo":
        raise ValueError(
            f"{budget} with loss_type='bnpo', a mean over the tokens of each of TRL's micro-batches. Set "
            "loss_type='dapo', the mean over the tokens of the whole step, or leave token_budget unset."
        )
    if args.entropy_coef != 0 or args.use_adaptive_entropy:
        raise ValueError(
            f"{budget} with entropy_coef={args.entropy_coef} and use_adaptive_entropy={args.use_adaptive_entropy}: "
            "the entropy bonus is a mean over the tokens of each of TRL's micro-batches. Switch it off, or leave "
            "token_budget unset."
        )
    if args.top_entropy_quantile < 1:
        raise ValueError(
            f"{budget} with top_entropy_quantile={args.top_entropy_quantile}, a quantile over the tokens of each of "
            "TRL's micro-batches. Set top_entropy_quantile=1.0, or leave token_budget unset."
        )


def _refuse_unkept(args: "GRPOConfig") -> None:
    """Refuse generation whose kept tokens nobody can tell."""
    option, sampling = "keep_sampling_mask=True", args.sampling
    if args.use_transformers_continuous_batching:
        raise ValueError(
            f"{option} with use_transformers_continuous_batching=True, which does not show what it samples from. Set "
            "it to False, or keep_sampling_mask=False."
        )
    for name, works in (("do_sample", True), ("num_beams", 1)):
        if sampling.get(name, works) != works:
            raise ValueError(
                f"{option} with {name}={sampling[name]!r} in generation_kwargs: tokens are searched for, not sampled. "
                f"Leave {name} unset, or set keep_sampling_mask=False."
            )
    if args.use_vllm and sampling.get("top_k", 0) <= 0:
        raise ValueError(
            f"{option} with top_k={sampling.get('top_k')}: vLLM returns kept tokens where top_k bounds how many they "
            "are. Set top_k=512 or the like beside top_p, or keep_sampling_mask=False."
        )


def _refuse_kl_without_effect(args: "GRPOConfig") -> None:
    if args.beta != 0 and args.kl_estimator == "k1" and not args.use_bias_correction_kl:
        raise ValueError(
            "kl_estimator='k1' with use_bias_correction_kl=False: the gradient of log policy - log reference does not "
            "depend on the reference, and on policy its expectation is 0, so that the KL would add noise and hold "
            "nothing. Set use_bias_correction_kl=True, or kl_estimator to 'k2' or 'k3'."
        )


def _idle_options(args: "GRPOConfig") -> list[str]:
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
        (
            "step_advantage",
            "return_to_go",
            not args.takes_token_advantages(args.loss_type, args.importance_sampling_level or "token"),
            "one ratio a sequence, StepRewards are refused. Set loss_type='gspo_token'",
        ),
        (
            "router_replay_reference",
            False,
            args.router_replay is None,
            "router_replay=None there are no routes. Set router_replay",
        ),
        (
            "router_replay_reference",
            False,
            args.router_replay is not None and args.beta == 0,
            "beta=0.0 there is no reference. Set beta above 0",
        ),
        (
            "keep_sampling_mask",
            False,
            not args.truncations,
            "top_p, top_k and min_p unset sampling leaves nothing out. Set one of them",
        ),
        (
            "pad_to_multiple_of",
            None,
            args.trim_padding,
            "trim_padding=True passes leave out padding. Set trim_padding=False",
        ),
    ]
    return [
        f"{option}={getattr(args, option)!r} cannot act: with {why}, or leave {option} unset."
        for option, default, is_off, why in idle
        if is_off and getattr(args, option) != default
    ]


def _inactive(args: "GRPOConfig") -> list[str]:
    """What cannot act because every update is on-policy."""
    if not args.is_on_policy:
        return []
    why = (
        f"(gradient_accumulation_steps={args.gradient_accumulation_steps} uses up the generation batch: "
        f"steps_per_generation={args.steps_per_generation}, num_iterations={args.num_iterations}). "
        f"{args.way_off_policy}"
    )
    messages = []
    if args.has_sequence_ratio_loss:
        messages.append(
            f"loss_type={args.loss_type!r} cannot act: every update is on-policy, so that the sequence ratio is "
            f"exactly 1 and nothing is ever clipped {why}"
        )
    if args.router_replay == "R2":
        messages.append(
            "router_replay='R2' cannot act: every update is on-policy, so that its routes are those of the policy "
            f"itself {why}"
        )
    return messages


def beyond_sets(weightings: Sequence[str]) -> str:
    """A sentence, after others, on what a set does not undo; "" for nothing."""
    if not weightings:
        return ""
    what = f"{', '.join(weightings)} moves probabilities among the tokens that are kept, too, and ratios carry that"
    return f" {what} with keep_sampling_mask=True as well."


def _weighted(args: "GRPOConfig") -> list[str]:
    return [beyond_sets(args.weightings).strip()] if args.keep_sampling_mask and args.weightings else []


def _token_scale(args: "GRPOConfig") -> list[str]:
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
