"""Errors for options that contradict each other, each with a fix."""

import math
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

import trl

from trl_steady.losses.objective import refuse_means_over_micro_batches
from trl_steady.losses.table import LOSSES

if TYPE_CHECKING:
    from trl_steady.config.grpo import GRPOConfig
    from trl_steady.config.shared import SharedOptions

__all__ = [
    "TRLS_DEFAULTS",
    "beyond_sets",
    "defaults",
    "own_class",
    "refuse_contradictions",
    "refuse_contradictions_of_loss",
    "reweights",
    "trl_default",
    "truncates",
]


def defaults(kind: Any) -> dict[str, Any]:
    """Return the options of a config with their defaults."""
    return {own.name: own.default if own.default_factory is MISSING else own.default_factory() for own in fields(kind)}


# read at import, before `trl-steady run` replaces TRL's configs with trl-steady's
TRLS_DEFAULTS = {"GRPO": defaults(trl.GRPOConfig), "RLOO": defaults(trl.RLOOConfig)}
TRLS_DEFAULTS["PPO"] = TRLS_DEFAULTS["GRPO"]
"""Method -> the options of TRL's config with their defaults."""


def trl_default(name: str, method: str = "GRPO") -> Any:
    """Return the default of an option in the installed TRL."""
    return TRLS_DEFAULTS[method][name]


def own_class(args: "SharedOptions") -> type:
    """Return trl-steady's class of a config, which may be an object of a script's subclass."""
    return next(kind for kind in type(args).__mro__ if kind.__module__.startswith("trl_steady."))


# Generation options that may exclude tokens from sampling -> True for a value that does.
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
# Generation options that make some tokens likelier than others -> the value that has no effect.
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


def truncates(option: str, value: Any) -> bool:
    """Return True if a generation option excludes tokens from sampling."""
    return option in _TRUNCATIONS and _TRUNCATIONS[option](value)


def reweights(option: str, value: Any) -> bool:
    """Return True if a generation option changes the probabilities of the tokens that it does not exclude."""
    return option in _WEIGHTINGS and value != _WEIGHTINGS[option]


def refuse_contradictions(args: "SharedOptions") -> None:
    """Refuse options of every trainer that are valid alone, but not together.

    Raises:
        ValueError: The message names the option, its value and the fix.
    """
    _refuse_idle_reference(args)
    _refuse_regrouping(args)
    _refuse_generation(args)
    if args.keep_sampling_mask:
        _refuse_unkept(args)


def refuse_contradictions_of_loss(args: "GRPOConfig") -> None:
    """Refuse options of GRPO's loss that are valid alone, but not together.

    Raises:
        ValueError: The message names the option, its value and the fix.
    """
    if args.token_budget is not None:
        refuse_means_over_micro_batches(args.token_budget, args)
    if args.loss.is_ours:
        _refuse_under_own_loss(args)
    if args.beta != 0 and args.kl_estimator == "k1" and not args.use_bias_correction_kl:
        raise ValueError(
            "kl_estimator='k1' with use_bias_correction_kl=False: the gradient of log policy - log reference does not "
            "depend on the reference, and its on-policy expectation is 0. This KL would add noise without holding the "
            "policy. Set use_bias_correction_kl=True, or set kl_estimator to 'k2' or 'k3'."
        )
    if args.loss_type == "dr_grpo" and args.max_completion_length is None:
        raise ValueError(
            "max_completion_length=None does not work with loss_type='dr_grpo', which divides by it. Set "
            "max_completion_length, or set loss_type='dapo'."
        )
    if args.use_adaptive_entropy and args.entropy_coef_min > args.entropy_coef_max:
        raise ValueError(
            f"entropy_coef_min={args.entropy_coef_min} is above entropy_coef_max={args.entropy_coef_max}. Set "
            "entropy_coef_min to at most entropy_coef_max."
        )


def _refuse_under_own_loss(args: "GRPOConfig") -> None:
    loss, loss_type, low, high = args.loss, args.loss_type, args.epsilon, args.epsilon_high
    assert low is not None
    high = low if high is None else high
    if args.importance_sampling_level != loss.level:
        other = "set loss_type='grpo' for token ratios" if loss.level == "sequence" else "set loss_type='gspo'"
        raise ValueError(
            f"importance_sampling_level={args.importance_sampling_level!r} contradicts loss_type={loss_type!r}, which "
            f"uses {loss.what}. Leave importance_sampling_level unset, or {other}."
        )
    if low >= 1 and loss.clip == "ratio":
        raise ValueError(
            f"epsilon={low} with loss_type={loss_type!r} never clips from below, because a ratio is always above 0. "
            f"Set epsilon below 1; the {loss.name.split('-')[0]} paper uses {loss.epsilon}."
        )
    upper = math.exp(high) if loss.clip == "log_ratio" else 1 + high
    if args.delta is not None and args.delta <= upper:
        raise ValueError(
            f"delta={args.delta} is inside the clip range of loss_type={loss_type!r} (upper end {upper}), so it "
            f"would replace epsilon_high. Set delta above {upper}, or None for no two-sided clip."
        )
    for other, its in LOSSES.items():
        for option in its.options:
            if getattr(args, option) != trl_default(option):
                raise ValueError(
                    f"{option}={getattr(args, option)!r} is an option of loss_type={other!r} and would be ignored by "
                    f"loss_type={loss_type!r}. Leave {option} unset, or set loss_type={other!r}."
                )


def _refuse_idle_reference(args: "SharedOptions") -> None:
    """Refuse options of a moving reference if there is no reference, or if it does not move."""
    if args.sync_ref_model and not args.has_reference:
        raise ValueError(
            "sync_ref_model=True with beta=0.0: without a KL there is no reference to move. Set beta above 0 "
            "(DeepSeekMath uses 0.04), or set sync_ref_model=False."
        )
    for option in ("ref_model_sync_kl", "ref_model_sync_reset_optimizer"):
        if getattr(args, option) and not args.sync_ref_model:
            raise ValueError(
                f"{option}={getattr(args, option)!r} would be ignored: with sync_ref_model=False the reference does "
                f"not move. Set sync_ref_model=True, or leave {option} unset."
            )


def _refuse_regrouping(args: "SharedOptions") -> None:
    """Refuse to regroup TRL's micro-batches without `trim_padding`, or if the loss is not a sum over them."""
    for option in ("token_budget", "share_prompts"):
        if getattr(args, option) and not args.trim_padding:
            raise ValueError(
                f"{option}={getattr(args, option)!r} does not work with trim_padding=False, which keeps TRL's batches "
                f"as they are. Set trim_padding=True, or leave {option} unset."
            )
    if args.token_budget is not None and args.ref_model_sync_kl is not None:
        raise ValueError(
            f"token_budget={args.token_budget} does not work with ref_model_sync_kl={args.ref_model_sync_kl}, which "
            "is compared with a mean over TRL's micro-batches. Leave one of the two unset."
        )


def _refuse_unkept(args: "SharedOptions") -> None:
    """Refuse settings of generation with which the kept tokens are not known."""
    option, sampling = "keep_sampling_mask=True", args.sampling
    if args.use_transformers_continuous_batching:
        raise ValueError(
            f"{option} does not work with use_transformers_continuous_batching=True, which does not expose the "
            "distribution that it samples from. Set it to False, or set keep_sampling_mask=False."
        )
    for name, works in (("do_sample", True), ("num_beams", 1)):
        if sampling.get(name, works) != works:
            raise ValueError(
                f"{option} does not work with {name}={sampling[name]!r} in generation_kwargs, which searches for "
                f"tokens and does not sample them. Leave {name} unset, or set keep_sampling_mask=False."
            )
    if args.use_vllm and sampling.get("top_k", 0) <= 0:
        raise ValueError(
            f"{option} does not work with top_k={sampling.get('top_k')}: vLLM returns the kept tokens only if top_k "
            "limits their number. Set top_k=512, for example, in addition to top_p, or set keep_sampling_mask=False."
        )


def _refuse_generation(args: "SharedOptions") -> None:
    """Refuse settings of generation that would fail, or break the groups, in the first rollout."""
    if args.top_k == -1 and not args.use_vllm:
        raise ValueError("top_k=-1 is only valid for vLLM; transformers refuses it. Set top_k=0 for no top-k filter.")
    for name, value in args.sampling.items():
        try:
            truncates(name, value)
        except TypeError:  # a string, or another type that does not compare with a number
            raise ValueError(
                f"{name}={value!r} in generation_kwargs is not a number. Set {name} to a number."
            ) from None
    for name in ("num_return_sequences", "n"):
        value = args.sampling.get(name, 1)
        if value != 1:
            raise ValueError(
                f"{name}={value!r} in generation_kwargs: TRL repeats each prompt itself. Leave {name} unset, and set "
                f"num_generations={value!r}."
            )


def beyond_sets(weightings: Sequence[str]) -> str:
    """Return a sentence about settings that kept tokens do not correct for, with a leading blank; "" without any."""
    if not weightings:
        return ""
    what = f"{', '.join(weightings)} also changes the probabilities of the kept tokens, and ratios include this change"
    return f" {what} even with keep_sampling_mask=True."
