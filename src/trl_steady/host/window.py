"""Settings that must not change inside a generation window."""

import json
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

__all__ = ["WINDOW_OPTIONS", "different", "refuse_other_settings", "window_settings"]

WINDOW_OPTIONS = (
    # the batches of a window
    *("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "num_iterations"),
    "num_generations",
    # generation
    *("use_vllm", "vllm_mode", "vllm_max_model_length", "vllm_structured_outputs_regex"),
    *("use_transformers_continuous_batching", "max_completion_length", "max_tool_calling_iterations"),
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "generation_kwargs", "chat_template_kwargs"),
    # advantages
    *("reward_weights", "multi_objective_aggregation", "scale_rewards", "normalize_advantages", "reward_clip_range"),
    # log-probs of the old policy, the engine and the reference
    *("bf16", "fp16", "cast_lm_head_to_fp32", "disable_dropout"),
    *("vllm_importance_sampling_correction", "vllm_importance_sampling_mode"),
    *("vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min"),
    # the objective for which all of these were computed
    *("loss_type", "importance_sampling_level", "mask_truncated_completions", "beta", "use_bias_correction_kl"),
)
"""TRL's options that shape a rollout, or the objective for which it was made. The parts of a trainer name ours.

Clip ranges, mask thresholds, coefficients, the entropy bonus and the learning rate are not part of a rollout. The loss
reads them in every update, and callbacks may anneal them. Options for the computation of passes (padding, budgets,
memory) change only rounding. Options for serving an engine, evaluation and logging do not affect updates.
"""

_ACTS_WITH = {
    **{name: "use_vllm" for name in WINDOW_OPTIONS if name.startswith("vllm_")},
    "use_bias_correction_kl": "beta",
}
"""Option -> the option without which it has no effect on a rollout."""

_OFF = ("min_p", "bf16", "fp16", "disable_dropout")
"""Options for which None is the same as 0 or False."""


def window_settings(trainer: Any) -> dict[str, Any]:
    """Return the settings that must be the same for a run to continue a rollout, as plain JSON."""
    args = trainer.args
    options = {name: _ACTS_WITH.get(name) for name in WINDOW_OPTIONS if hasattr(args, name)}
    for part in trainer.parts:
        options.update(part.window_options)
    factories: Any = trainer.environment_factories
    of_trainer = ("num_iterations", "scale_rewards")  # the trainer's scale_rewards is "group" for True
    settings = {
        **{name: getattr(args, name) for name, other in options.items() if other is None or getattr(args, other)},
        **{name: getattr(trainer, name) for name in of_trainer if hasattr(trainer, name)},
        "reward_funcs": trainer.reward_func_names,
        "reward_weights": _plain(args.reward_weights) or [1.0] * len(trainer.reward_func_names),
        "tools": trainer.tools,
        # as it was passed to the trainer
        "environment_factory": factories[None] if factories and factories.keys() == {None} else factories,
        "rollout_func": trainer.rollout_func,
        "processes": trainer.accelerator.num_processes,
    }
    plain = {name: _plain(value) for name, value in settings.items()}
    return json.loads(json.dumps({name: None if value == {} else value for name, value in plain.items()}))


def _plain(value: Any) -> Any:
    """Return a value as JSON types. Functions and objects become names."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else json.dumps(_plain(key)): _plain(own) for key, own in value.items()}
    if isinstance(value, Set):
        return sorted(map(_plain, value), key=json.dumps)
    if isinstance(value, Sequence):
        return [_plain(own) for own in value]
    name = getattr(value, "__name__", None)
    if name is None and hasattr(value, "tolist"):  # arrays, tensors and NumPy's numbers
        return _plain(value.tolist())
    return name or type(value).__name__


def different(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Return the settings that both runs have and whose values differ."""
    is_in_reward = "normalize_advantages" in here  # an option of RLOO, whose KL is part of the reward

    def value(name: str, own: Any) -> Any:
        if name == "beta" and not is_in_reward:  # only 0 or not matters: it decides if there are reference log-probs
            return own != 0
        return own or None if name in _OFF else own

    return [name for name in here if name in there and value(name, there[name]) != value(name, here[name])]


def refuse_other_settings(checkpoint: Path, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Refuse a resume inside a generation window that began with other settings.

    Raises:
        ValueError: The message names each option with both values.
    """
    lines = [f"{name}={there[name]!r}; this run has {name}={here[name]!r}" for name in different(there, here)]
    if not lines:
        return
    began = f" {lines[0]}. " if len(lines) == 1 else "".join(f"\n  {line}" for line in lines) + "\n"
    raise ValueError(
        f"{checkpoint} was taken inside a generation window that began with{began}Resume with the same "
        f"value{'s' * (len(lines) > 1)}, or from a checkpoint at the end of a window."
    )
