"""A generation window: the settings that a resume inside it must not change. This file knows TRL's options."""

from collections.abc import Iterator, Mapping
from typing import Any

from trl_steady.core.feature import Trainer
from trl_steady.core.json_values import as_json

WINDOW_OPTIONS = (
    # the batches of a window
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "num_iterations",
    "num_generations",
    # generation
    "use_vllm",
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
    "normalize_advantages",
    "reward_clip_range",
    # log-probs of the old policy and the reference
    "bf16",
    "fp16",
    "cast_lm_head_to_fp32",
    "disable_dropout",
    # the objective for which all of these were computed
    "loss_type",
    "importance_sampling_level",
    "mask_truncated_completions",
    "beta",
)
"""TRL's options that shape a rollout, or the objective for which it was made. The config marks ours with `IN_ROLLOUT`.

Clip ranges, mask thresholds, coefficients, the entropy bonus and the learning rate are not part of a rollout. The loss
reads them in every update, and callbacks may anneal them. Options for the computation of passes (padding, budgets,
memory) change only rounding. Options for serving an engine, evaluation and logging do not affect updates.
"""
WINDOW_OPTIONS_WITH: dict[str, tuple[str, ...]] = {
    "use_vllm": (
        "vllm_mode",
        "vllm_max_model_length",
        "vllm_structured_outputs_regex",
        "vllm_importance_sampling_correction",
        "vllm_importance_sampling_mode",
        "vllm_importance_sampling_clip_max",
        "vllm_importance_sampling_clip_min",
    ),
    "beta": ("use_bias_correction_kl",),
}
"""Option -> TRL's options that shape a rollout only if it is on."""


def window_settings(trainer: Trainer) -> dict[str, Any]:
    """Return the settings that must be the same for a run to continue a rollout, as plain JSON."""
    args = trainer.args
    settings = {name: getattr(args, name) for name in _window_options(args)}
    weights = args.reward_weights  # an array, perhaps
    settings |= {
        "reward_funcs": trainer.reward_func_names,
        "reward_weights": [1.0] * len(trainer.reward_func_names) if weights is None else weights,
        "tools": trainer.tools,
        "environment_factory": trainer.environment_factories,
        "rollout_func": trainer.rollout_func,
        "processes": trainer.accelerator.num_processes,
    }
    return as_json(settings)


def _window_options(args: Any) -> Iterator[str]:
    """Yield the options of a config that shape its rollouts as it is set now."""
    for name in WINDOW_OPTIONS:
        if hasattr(args, name):  # RLOO has fewer
            yield name
    for needed, names in WINDOW_OPTIONS_WITH.items():
        for name in names:
            if getattr(args, needed) and hasattr(args, name):
                yield name
    yield from args.options_in_rollout  # ours: those that the config marks with `IN_ROLLOUT` and that act


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the settings that both runs have and whose values differ."""
    changed = [name for name in now if name in before and before[name] != now[name]]
    # `beta` decides if there are log-probs of a reference. Its value matters for RLOO, whose KL is in the reward
    is_rloo = "normalize_advantages" in now  # an option of RLOO only
    if not is_rloo and now.get("beta") and before.get("beta") and "beta" in changed:
        changed.remove("beta")
    return changed
