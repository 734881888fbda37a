"""Valid values of each option, independent of the other options."""

import functools
import json
import math
import operator
import os
import re
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from trl_steady.config.checks import TRLS_DEFAULTS, own_class
from trl_steady.config.spelling import near
from trl_steady.losses.table import LOSSES

if TYPE_CHECKING:
    from trl_steady.config.shared import SharedOptions

__all__ = ["CHOICES", "refuse_out_of_range"]

# Options with a few valid values. Some are TRL's, because TRL checks them only in the first rollout.
CHOICES: dict[str, Collection[Any]] = {
    "loss_type": LOSSES.keys(),  # a live view: a script may add a loss
    "importance_sampling_level": ("token", "sequence"),
    "kl_estimator": ("k1", "k2", "k3"),
    "kl_ratio_denominator": ("old", "sampler"),
    "off_policy_mask_level": ("sequence", "token"),
    "step_advantage": ("process", "return_to_go"),
    "router_replay": ("R2", "R3"),
    "adapter_dtype": ("float32",),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "scale_rewards": ("group", "batch", "none", True, False),
    "vllm_mode": ("server", "colocate"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
}
_NONE_IS = {"router_replay": "None for no replay of routes", "adapter_dtype": "None for TRL's choice"}


def _count(value: Any) -> bool:
    return operator.index(value) >= 1


def _count_or_0(value: Any) -> bool:
    return operator.index(value) >= 0


def _positive(value: Any) -> bool:
    return 0 < value < math.inf


def _not_negative(value: Any) -> bool:
    return 0 <= value < math.inf


def _share(value: Any) -> bool:
    return 0 < value <= 1


def _object(value: Any) -> bool:
    return isinstance(json.loads(value) if isinstance(value, str) else value, Mapping)


def _is_start(value: Any) -> bool:
    return value in ("policy", "reward") or bool(re.fullmatch(r"\w[\w.-]*/[\w.-]+", value)) or os.path.isdir(value)


_A_COUNT = "a whole number, 1 or more"
_A_POSITIVE = "a finite number above 0"
_NO_NEGATIVE = "a finite number, 0 or above"
_AN_OBJECT = "a dict or a string with a JSON object, or leave it unset"

# Option, a check of its value, and the valid values in words. None is valid if the option's type allows it.
_RANGES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("learning_rate", _not_negative, _NO_NEGATIVE),
    ("per_device_train_batch_size", _count, _A_COUNT),
    ("gradient_accumulation_steps", _count, "1 or more"),
    ("steps_per_generation", _count, "1 or more, or None for gradient_accumulation_steps"),
    ("generation_batch_size", _count, f"{_A_COUNT}, or None for the batch of an optimizer step"),
    ("num_generations", _count, "2 or more completions of a prompt, or 1 or more with PPO"),
    ("num_generations_eval", _count_or_0, "1 or more completions of a prompt, or None for num_generations"),
    ("num_iterations", _count, "1, 2, 3, ..."),
    ("max_completion_length", _count, "1 or more tokens"),
    *((name, lambda v: 0 <= v <= 1, "between 0 and 1") for name in ("gamma", "lam")),
    ("value_lam", lambda v: 0 <= v <= 1, "between 0 and 1, or None for lam"),
    ("lam_length_alpha", _positive, f"{_A_POSITIVE}, or None for lam"),
    ("kl_coef", _not_negative, "a finite number, 0 (no KL in the reward) or above"),
    ("kl_target", _positive, "above 0, in nats an answer, or None for a fixed kl_coef"),
    ("kl_horizon", _count, "1 answer or more"),
    ("cliprange_value", _positive, f"{_A_POSITIVE}, or None for no clip"),
    ("value_learning_rate", _not_negative, f"{_NO_NEGATIVE}, or None for learning_rate"),
    ("value_warmup_steps", _count_or_0, "0 or more optimizer steps"),
    ("value_updates", _count, "1 or more"),
    ("value_init", _is_start, "'policy', 'reward', an existing folder, or 'owner/name' of a model on the hub"),
    ("missing_eos_penalty", _not_negative, f"{_NO_NEGATIVE} (it is subtracted), or None for no penalty"),
    ("ptx_coef", _not_negative, "a finite number, 0 (no pretraining loss) or above"),
    ("epsilon", lambda v: v >= 0, "0 or above"),
    ("epsilon_high", lambda v: v >= 0, "0 or above"),
    ("delta", lambda v: v > 0, "above 0, or None for no two-sided clip"),
    ("sapo_temperature_pos", _positive, _A_POSITIVE),
    ("sapo_temperature_neg", _positive, _A_POSITIVE),
    ("vespo_k_pos", _not_negative, _NO_NEGATIVE),
    ("vespo_lambda_pos", _not_negative, _NO_NEGATIVE),
    ("vespo_k_neg", _not_negative, _NO_NEGATIVE),
    ("vespo_lambda_neg", _not_negative, _NO_NEGATIVE),
    ("beta", _not_negative, "a finite number, 0 (no KL) or above"),
    ("off_policy_mask_threshold", lambda v: v >= 0, "0 or above, in nats a token, or None for no mask"),
    (
        "geometric_mask_range",
        lambda v: len(v) == 2 and 0 <= v[0] <= 1 <= v[1],
        "two ratios, (low, high), with low <= 1 <= high, such as (0.99, 1.01), or None for no mask",
    ),
    ("token_veto_threshold", lambda v: 0 < v < 1, "above 0 and below 1, such as 0.0001, or None for no mask"),
    ("ref_model_sync_steps", lambda v: v >= 1 and v == int(v), "1, 2, 3, ... optimizer steps"),
    ("ref_model_mixup_alpha", _share, "above 0 and at most 1, where 1 copies the policy"),
    ("ref_model_sync_kl", _positive, "above 0, in nats a token, or None for refreshes by steps only"),
    ("token_budget", lambda v: v >= 1 and v == int(v), "1 token or more, or None for per_device_train_batch_size"),
    ("engine_check", _positive, "above 0, in nats a token, or None for no comparison with the engine"),
    ("router_aux_loss_coef", _not_negative, f"{_NO_NEGATIVE}, or None for the model's own"),
    (
        "reward_clip_range",
        lambda v: len(v) == 2 and v[0] < v[1],
        "two rewards, (low, high), with low < high, or None for no clip",
    ),
    ("reward_weights", lambda v: all(map(math.isfinite, v)), "a list of finite numbers, one for each reward function"),
    ("temperature", _positive, f"{_A_POSITIVE} (the policy is sampled, not decoded greedily)"),
    ("top_p", _share, "above 0 and at most 1"),
    # not None: transformers takes it for 50
    ("top_k", lambda v: operator.index(v) >= -1, "a whole number above 0, or 0 for no top-k filter"),
    ("min_p", lambda v: 0 <= v <= 1, "between 0 and 1, or None"),
    ("repetition_penalty", _positive, f"{_A_POSITIVE} (1 for no penalty)"),
    ("top_entropy_quantile", lambda v: 0 <= v <= 1, "between 0 and 1 (1 keeps every token)"),
    ("entropy_coef", math.isfinite, "a finite number, 0 for no bonus"),
    ("entropy_coef_min", math.isfinite, "a finite number"),
    ("entropy_coef_max", math.isfinite, "a finite number"),
    ("entropy_coef_delta", _not_negative, _NO_NEGATIVE),
    ("entropy_target", math.isfinite, "a finite number, in nats a token"),
    ("max_tool_calling_iterations", _count_or_0, "0 or more, or None for no limit"),
    ("vllm_importance_sampling_clip_max", lambda v: v > 0, "above 0, or None for no upper bound"),
    ("vllm_importance_sampling_clip_min", _not_negative, f"{_NO_NEGATIVE}, or None for no lower bound"),
    ("generation_kwargs", _object, _AN_OBJECT),
)


def refuse_out_of_range(args: "SharedOptions") -> None:
    """Refuse values that are invalid whatever the other options are.

    Raises:
        ValueError: The message names the option, its value and the valid values.
    """
    types = _types(own_class(args))
    for option, choices in CHOICES.items():
        if option in types and not _works(value := getattr(args, option), types[option], choices.__contains__):
            *others, last = [repr(choice) for choice in choices if isinstance(choice, str)]
            if option in _NONE_IS:
                expected = f"{', '.join([*others, last])}, or {_NONE_IS[option]}"
            else:
                expected = f"{', '.join(others)} or {last}"
            _refuse(option, value, expected, near(value, choices))
    for option, holds, expected in _RANGES:
        if option not in types:
            continue
        value = getattr(args, option)
        is_flag = isinstance(value, bool)  # Python takes it for 0 or 1
        is_missing = value is None and option == "num_generations"  # although its type allows None
        if is_flag or is_missing or not _works(value, types[option], holds):
            _refuse(option, value, expected)
    for option, hint in types.items():
        if hint not in (bool, bool | None):
            continue
        value = getattr(args, option, None)
        is_lax = value is None and option in TRLS_DEFAULTS[args.METHOD]  # transformers takes None for False
        if not is_lax and not _works(value, hint, (True, False).__contains__):
            _refuse(option, value, "True or False")


@functools.cache
def _types(kind: type) -> dict[str, Any]:
    """Return the types of the options of one of trl-steady's configs.

    The annotations of a user's subclass may not resolve here. The types in the dataclass fields are not used either,
    because `HfArgumentParser` rewrites them in place.
    """
    return get_type_hints(kind)


def _works(value: Any, hint: Any, holds: Callable[[Any], bool]) -> bool:
    if value is None:
        return type(None) in get_args(hint)
    try:
        return bool(holds(value))
    except (TypeError, ValueError, LookupError, ArithmeticError):  # a value of another type, such as a string
        return False


def _refuse(option: str, value: Any, expected: str, hint: str = "") -> None:
    raise ValueError(f"{option}={value!r} cannot work. Set {option} to {expected}.{hint}")
