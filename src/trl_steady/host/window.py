"""The settings that a generation window begins with and must end with."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import trl

__all__ = ["WINDOW_OPTIONS", "different", "refuse_other_settings", "window_settings"]

WINDOW_OPTIONS = (
    # the batches that a window is cut into
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "num_iterations",
    "num_generations",
    # what generates, and how
    "use_vllm",
    "vllm_mode",
    "vllm_max_model_length",
    "vllm_structured_outputs_regex",
    "use_transformers_continuous_batching",
    "max_completion_length",
    "max_tool_calling_iterations",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "generation_kwargs",
    "chat_template_kwargs",
    # advantages
    "reward_weights",
    "multi_objective_aggregation",
    "scale_rewards",
    "step_advantage",
    # log-probs of old policy, engine and reference
    "bf16",
    "fp16",
    "adapter_dtype",
    "cast_lm_head_to_fp32",
    "disable_dropout",
    "keep_sampling_mask",
    "router_replay",
    "router_replay_reference",
    "share_prompts",
    "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode",
    "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min",
    # the objective that all of these were computed for
    "loss_type",
    "importance_sampling_level",
    "mask_truncated_completions",
    "beta",
    "use_bias_correction_kl",
    "kl_estimator",
    "kl_ratio_denominator",
)
"""Options that shape a rollout, or the objective it was made for.

Clip ranges, mask thresholds, coefficients, the entropy bonus and the learning rate are no part of a rollout: the loss
reads them anew in every update, and callbacks anneal them. How passes are computed (padding, budgets, memory) moves
rounding only. What an engine is served by, what is evaluated and what is logged touches no update.
"""

_ACTS_WITH = {
    **{name: "use_vllm" for name in WINDOW_OPTIONS if name.startswith("vllm_")},
    **dict.fromkeys(("router_replay_reference", "share_prompts"), "router_replay"),
    **dict.fromkeys(("use_bias_correction_kl", "kl_estimator", "kl_ratio_denominator"), "beta"),
}
"""Option -> the one without which it does nothing to a rollout."""

# which a version that wrote fewer settings wrote only where they were set
_UNSET = {"keep_sampling_mask": False, "router_replay": None}


def window_settings(trainer: trl.GRPOTrainer) -> dict[str, Any]:
    """Return what must be the same for a rollout to go on in another run, as plain JSON."""
    args: Any = trainer.args
    acting = (name for name in WINDOW_OPTIONS if name not in _ACTS_WITH or getattr(args, _ACTS_WITH[name]))
    functions = {
        "reward_funcs": trainer.reward_func_names,
        "tools": trainer.tools,
        "rollout_func": trainer.rollout_func,
    }
    settings = {
        **{name: getattr(args, name) for name in acting},
        **functions,
        "num_iterations": trainer.num_iterations,
        "scale_rewards": trainer.scale_rewards,  # True and "group" are one
        "reward_weights": args.reward_weights or [1.0] * len(trainer.reward_func_names),
        "processes": trainer.accelerator.num_processes,
    }
    settings = {name: None if value == {} else value for name, value in settings.items()}
    return json.loads(json.dumps(settings, sort_keys=True, default=_name))


def _name(value: Any) -> str:
    return getattr(value, "__name__", type(value).__name__)


def different(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Return the settings whose values differ, of those that both runs have.

    A checkpoint of an older version has fewer; settings that it lacks are not compared.
    """
    there = {**_UNSET, **there}
    return [name for name in here if name in there and _value(name, there[name]) != _value(name, here[name])]


def _value(name: str, value: Any) -> Any:
    return value != 0 if name == "beta" else value  # another coefficient is fine; reference log-probs exist or not


def refuse_other_settings(checkpoint: Path, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Refuse a resume inside a generation window that began with other settings.

    Raises:
        ValueError: naming each option with both values.
    """
    before = {**_UNSET, **there}
    lines = [f"{name}={before[name]!r}; this run has {name}={here[name]!r}" for name in different(there, here)]
    if not lines:
        return
    began = f" {lines[0]}. " if len(lines) == 1 else "".join(f"\n  {line}" for line in lines) + "\n"
    raise ValueError(
        f"{checkpoint} lies inside a generation window that began with{began}Resume with the same "
        f"value{'s' * (len(lines) > 1)}, or from a checkpoint at the end of a window."
    )
