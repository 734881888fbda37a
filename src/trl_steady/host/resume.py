"""Checks that a run may continue from a checkpoint: the same model, and the settings of its generation window.

This file knows TRL's options and how transformers names tensors. It loads nothing.
"""

import json
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

if TYPE_CHECKING:
    from trl_steady.host.seam import Steady


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


def window_settings(trainer: "Steady") -> dict[str, Any]:
    """Return the settings that must be the same for a run to continue a rollout, as plain JSON."""
    args = trainer.args
    options = {name: _ACTS_WITH.get(name) for name in WINDOW_OPTIONS if hasattr(args, name)}
    for part in trainer.parts:
        options.update(part.window_options)
    factories = trainer.environment_factories
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
        return {key if isinstance(key, str) else json.dumps(_plain(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, Set):
        return sorted(map(_plain, value), key=json.dumps)
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    name = getattr(value, "__name__", None)
    if name is None and hasattr(value, "tolist"):  # arrays, tensors and NumPy's numbers
        return _plain(value.tolist())
    return name or type(value).__name__


def different(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the settings that both runs have and whose values differ."""
    is_in_reward = "normalize_advantages" in now  # an option of RLOO, whose KL is part of the reward

    def value(name: str, setting: object) -> object:
        if name == "beta" and not is_in_reward:  # only 0 or not matters: it decides if there are reference log-probs
            return setting != 0
        return setting or None if name in _OFF else setting

    return [name for name in now if name in before and value(name, before[name]) != value(name, now[name])]


def saved_otherwise(model: torch.nn.Module) -> list[str]:
    """Return the tensors of a transformers model that transformers saves under other names or in other shapes.

    transformers 5 fuses experts when it loads a model, and splits them when it saves it. The Trainer, however, loads a
    checkpoint by the names in memory. This function converts only names and shapes, and copies no tensor.
    """
    tensors = tensors_of(model)
    plain = cast(PreTrainedModel, model)
    saved = revert_weight_conversion(plain, {name: tensor.to("meta") for name, tensor in tensors.items()})
    same = {name for name in tensors.keys() & saved.keys() if tensors[name].shape == saved[name].shape}
    return not_loaded(tensors, same)


def tensors_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the state of a model without what is not a tensor."""
    return {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}


def not_loaded(tensors: dict[str, Tensor], loaded: set[str]) -> list[str]:
    """Return the names of the tensors that are neither loaded nor tied to a loaded tensor."""
    pointers = {tensors[name].data_ptr() for name in loaded}
    return [name for name, tensor in tensors.items() if name not in loaded and tensor.data_ptr() not in pointers]


def refuse_another_model(checkpoint: Path, model: torch.nn.Module) -> None:
    """Refuse to resume an adapter with a whole model, a whole model with an adapter, or another architecture.

    Raises:
        ValueError: The message names the models of the checkpoint and of this run.
    """
    # PEFT saves an adapter that is not named "default" in a folder of that name
    patterns = ("adapter_config.json", "config.json", "*/adapter_config.json")
    file = next((file for pattern in patterns for file in checkpoint.glob(pattern)), None)
    if file is None:  # shards of FSDP, which FSDP's loader compares with the model
        return
    config = json.loads(file.read_text())
    bare = model.get_base_model() if isinstance(model, PeftModel) else model
    kind = type(bare).__name__.removeprefix("FSDP")  # FSDP2 adds this prefix to the name of a class
    if file.name == "adapter_config.json":  # which does not name the base if it has a task_type
        base = (config.get("auto_mapping") or {}).get("base_model_class", "").removeprefix("FSDP")
        saved = f"an adapter on {base or kind}"
    else:
        saved = f"a whole {', '.join(config.get('architectures') or [kind])}"
    trained = f"an adapter on {kind}" if isinstance(model, PeftModel) else f"a whole {kind}"
    if saved != trained:
        raise ValueError(
            f"{checkpoint} holds {saved}, but this run trains {trained}. Give the trainer the model and the "
            "peft_config that the run started with, or start a new run."
        )
