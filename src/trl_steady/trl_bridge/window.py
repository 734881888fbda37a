"""Checks that a run may continue from a checkpoint: the same tensors, and the settings of its generation window.

This file knows TRL's options and how transformers loads tensors. It loads nothing.
"""

from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from trl_steady.core.feature import Trainer

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
"""TRL's options that shape a rollout, or the objective for which it was made. The features of a trainer name ours.

Clip ranges, mask thresholds, coefficients, the entropy bonus and the learning rate are not part of a rollout. The loss
reads them in every update, and callbacks may anneal them. Options for the computation of passes (padding, budgets,
memory) change only rounding. Options for serving an engine, evaluation and logging do not affect updates.
"""

_ACTS_WITH = {
    **{name: "use_vllm" for name in WINDOW_OPTIONS if name.startswith("vllm_")},
    "use_bias_correction_kl": "beta",
}
"""Option -> the option without which it has no effect on a rollout."""


def window_settings(trainer: Trainer) -> dict[str, Any]:
    """Return the settings that must be the same for a run to continue a rollout, as plain JSON."""
    args = trainer.args
    options = {name: _ACTS_WITH.get(name) for name in WINDOW_OPTIONS}
    for feature in trainer.features:
        options.update(feature.window_options)
    options = {name: other for name, other in options.items() if hasattr(args, name)}  # RLOO has fewer
    weights = args.reward_weights  # an array, perhaps
    settings = {
        **{name: getattr(args, name) for name, other in options.items() if other is None or getattr(args, other)},
        "reward_funcs": trainer.reward_func_names,
        "reward_weights": [1.0] * len(trainer.reward_func_names) if weights is None else weights,
        "tools": trainer.tools,
        "environment_factory": trainer.environment_factories,
        "rollout_func": trainer.rollout_func,
        "processes": trainer.accelerator.num_processes,
    }
    return as_json(settings)


def as_json(value: Any) -> Any:
    """Return a value as JSON types. Functions and objects become names."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, Set):  # whose order differs from one run of Python to the next
        return sorted(map(as_json, value), key=str)
    if isinstance(value, Sequence):
        return [as_json(item) for item in value]
    if hasattr(value, "tolist"):  # arrays, tensors and NumPy's numbers
        return as_json(value.tolist())
    return getattr(value, "__name__", type(value).__name__)


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the settings that both runs have and whose values differ."""
    changed = [name for name in now if name in before and before[name] != now[name]]
    # `beta` decides if there are log-probs of a reference. Its value matters for RLOO, whose KL is in the reward
    if "normalize_advantages" not in now and now.get("beta") and before.get("beta"):
        changed = [name for name in changed if name != "beta"]
    return changed


def refuse_missing_tensors(model: torch.nn.Module, missing: Collection[str]) -> None:
    """Refuse a checkpoint without some tensors of the model, because transformers would keep the initial ones."""
    tensors = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    loaded = {tensor.data_ptr() for name, tensor in tensors.items() if name not in missing}
    lost = [name for name in missing if name in tensors and tensors[name].data_ptr() not in loaded]  # not tied ones
    if lost:
        raise ValueError(
            f"the checkpoint lacks {len(lost)} of the model's {len(tensors)} tensors, for example {min(lost)}. Give "
            "the trainer the model and the peft_config that the run had. A fully trained mixture of experts, which "
            "transformers saves under other names than it loads, cannot be resumed: load the checkpoint with "
            "from_pretrained."
        )
