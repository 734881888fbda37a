"""Friendly errors for the commonest mistakes, which have poor messages or train nothing. It knows options of TRL."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from typing import Any, cast

import torch
from datasets import Dataset, IterableDataset
from trl.trainer.utils import get_callable_name

from trl_steady.core.feature import Trainer
from trl_steady.trl_bridge.overrides import overrides
from trl_steady.trl_bridge.trl_state import as_trl_trainer

PASSED = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""TRL passes these to reward functions by name, beside the columns of the data."""


def refuse_wrong_columns(trainer: Trainer) -> None:
    """Refuse data sets whose columns do not fit TRL or the reward functions, unless a rollout may have others.

    Sets for evaluations are checked only if the training evaluates.
    """
    messages: list[str] = []
    if not overrides(trainer, "data", "generation"):
        messages += _wrong_columns(trainer, "train_dataset", trainer.train_dataset)
    evaluates = trainer.args.eval_strategy != "no" or trainer.args.eval_on_start
    if evaluates and not overrides(trainer, "evaluation data", "generation"):
        for name, dataset in _evaluation_sets(trainer.eval_dataset):
            messages += _wrong_columns(trainer, name, dataset)
    if messages:
        raise ValueError(" ".join(messages))


def refuse_optimizer_of_frozen_weights(trainer: Trainer) -> None:
    """Refuse an optimizer of the script that has frozen weights of the model only: each step would change nothing.

    One that was made before PEFT wrapped the model has the weights of the base. Some optimizers hold copies of the
    weights, so that one with tensors of its own passes.
    """
    optimizer = as_trl_trainer(trainer).optimizer
    groups = getattr(optimizer, "param_groups", None) or []
    held = {id(weight) for group in groups for weight in group["params"]}
    frozen: set[int] = set()
    trained: list[str] = []
    for name, weight in trainer.model.named_parameters():
        if weight.requires_grad:
            trained.append(name)
        else:
            frozen.add(id(weight))
    if held and held <= frozen and trained:
        raise ValueError(
            f"optimizers=({type(optimizer).__name__}, ...) has frozen weights only, and none of the {len(trained)} "
            f"that are trained, such as {trained[0]}. If peft_config is set, the trainer has wrapped the model since. "
            f"Leave optimizers unset, with the options of {type(trainer.args).__name__}, or pass a model that is "
            "wrapped already (get_peft_model), and make the optimizer of its weights."
        )


def refuse_wrong_best_metric(trainer: Trainer) -> None:
    """Refuse a metric for the best model that no set of several has. TRL would take the reward of the last set."""
    args, sets = trainer.args, trainer.eval_dataset
    metric = args.metric_for_best_model
    evaluates = args.eval_strategy != "no" and not overrides(trainer, "evaluation")
    if metric is None or not isinstance(sets, dict) or not evaluates:
        return
    name = metric.removeprefix("eval_")
    names = list(map(str, cast(dict[str, object], sets)))
    if not any(name.startswith(f"{set_name}_") for set_name in names):
        raise ValueError(
            f"metric_for_best_model={metric!r} is of no single set. eval_dataset has the sets {', '.join(names)}, and "
            f"each has its own metrics. Set metric_for_best_model to one of them, such as 'eval_{names[0]}_{name}'."
        )


def _evaluation_sets(dataset: object) -> Iterator[tuple[str, object]]:
    """Yield each set for evaluations with its name in a script."""
    if not isinstance(dataset, Mapping):
        yield "eval_dataset", dataset
        return
    for key, member in cast(Mapping[str, object], dataset).items():
        yield f"eval_dataset[{key!r}]", member


def _wrong_columns(trainer: Trainer, set_name: str, dataset: Any) -> list[str]:
    """Return what is wrong with the columns of a data set, each with a fix."""
    # another class, a transform or a collator may add columns
    if type(dataset) not in (Dataset, IterableDataset) or getattr(dataset, "format", {}).get("type") == "custom":
        return []
    if getattr(as_trl_trainer(trainer).data_collator, "__name__", "") != "identity":  # TRL's
        return []
    columns: Sequence[str] = dataset.column_names or ()
    if not columns or trainer.args.remove_unused_columns:  # a stream may not know its columns
        return []
    if trainer.environment_factories is not None:
        return []
    messages: list[str] = []
    if "prompt" not in columns:
        rename = f"{set_name}.rename_column({columns[0]!r}, 'prompt')"
        messages.append(f"{set_name} has no column 'prompt', but {', '.join(columns)}. Rename one: {rename}.")
    for option in ("beta_column", "teacher_prompt"):
        column = getattr(trainer.args, option, None)
        if isinstance(column, str) and column not in columns:
            messages.append(f"{set_name} has no column {column!r}, but {', '.join(columns)}. Set {option} to one.")
    passed = list(PASSED)
    passed += [name for name in columns if name not in ("prompt", "completion")]
    passes = "TRL passes"
    if set_name != "train_dataset":
        passes = f"With {set_name}, TRL passes"
    functions: list[tuple[str, Any]] = []
    for name, function in zip(trainer.reward_func_names, trainer.reward_funcs, strict=True):
        functions.append((f"reward function {name!r}", function))
    if set_name != "train_dataset":
        for metric in trainer.args.eval_metrics or ():
            functions.append((f"evaluation metric {get_callable_name(metric)!r}", metric))
    functions = [(title, function) for title, function in functions if not isinstance(function, torch.nn.Module)]
    if functions:
        for column in ("completions", "prompts"):
            if column in columns:
                messages.append(f"{set_name} has a column {column!r}, as TRL names all {column}. Rename it.")
    for title, function in functions:
        if trainer.rollout_func is not None:  # it may return further columns
            continue
        for missing in _required(function).difference(passed):
            message = f"{title} asks for {missing!r}. {passes} {', '.join(passed)}."
            for close in get_close_matches(missing, passed, 1):
                message += f" Did you mean {close!r}?"
            messages.append(message)
    return messages


def _required(function: Callable[..., object]) -> set[str]:
    """Return the parameters that TRL must pass by name; none if they are not known."""
    try:  # not those of a function that a decorator wraps, for which it may have values of its own
        parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    except Exception:  # a user's object may do anything when it is looked at
        return set()
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    required: set[str] = set()
    for parameter in parameters:
        if parameter.default is parameter.empty and parameter.kind in by_name:
            required.add(parameter.name)
    return required


def refuse_shared_engine_for_tools(trainer: Trainer) -> None:
    """Refuse tools where processes share an engine, because TRL then mixes up their completions, or waits forever.

    After a tool's result, each process asks for the rest of its own conversations, as often as they need. The engine
    expects all processes each time, with equally many.
    """
    args, accelerator = trainer.args, trainer.accelerator
    has_tools = bool(trainer.tools) or trainer.environment_factories is not None
    if not has_tools or not trainer.use_vllm or accelerator.num_processes == 1 or overrides(trainer, "generation"):
        return
    shared = ""
    if args.vllm_mode == "server":
        shared = "vllm_mode='server'"
    elif args.vllm_tensor_parallel_size > 1:
        shared = f"vllm_tensor_parallel_size={args.vllm_tensor_parallel_size}"
    if shared:
        raise ValueError(
            f"tools and environments do not work with {shared} on {accelerator.num_processes} processes: TRL would "
            "give completions to other prompts, or wait forever. Set vllm_mode='colocate' and "
            "vllm_tensor_parallel_size=1, or train with one process."
        )


def refuse_taken_names(trainer: Trainer, kinds: Mapping[str, type]) -> None:
    """Refuse attributes that a script has set over ours. Some would fail at the first save only.

    Args:
        trainer: The trainer.
        kinds: Name of each attribute of ours -> its class.
    """
    for name, kind in kinds.items():
        if not isinstance(getattr(trainer, name), kind):
            raise ValueError(
                f"{type(trainer).__name__} sets an attribute {name!r} of its own, and the trainers of trl-steady have "
                "one of this name. Give it another name."
            )


def refuse_small_dataset(trainer: Trainer) -> None:
    """Refuse a dataset that is smaller than a rollout, because TRL's sampler would drop all of it."""
    dataset, args = trainer.train_dataset, trainer.args
    prompts = args.generation_batch_size // args.num_generations
    if isinstance(dataset, Dataset) and len(dataset) < prompts:
        raise ValueError(
            f"train_dataset has {len(dataset)} rows, but each rollout needs {prompts} prompts (generation_batch_size="
            f"{args.generation_batch_size} / num_generations={args.num_generations}), so nothing would be trained. "
            "Use a dataset with more rows, or set a smaller steps_per_generation or per_device_train_batch_size."
        )


def checked_rollout_func(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a `rollout_func` to refuse token lists that TRL would pad, so that values would belong to other tokens.

    Columns may be any iterables of rows, which are read once.
    """

    @wraps(function)
    def checking(prompts: Sequence[object], *arguments: object, **keywords: object) -> Any:
        output = function(prompts, *arguments, **keywords)
        names = ("prompt_ids", "completion_ids", "logprobs", "env_mask")
        columns = {name: list(output[name]) for name in names if output.get(name) is not None}
        lengths = {name: list(map(len, column)) for name, column in columns.items() if name != "prompt_ids"}
        of_completions = lengths.get("completion_ids", [])
        if not of_completions:  # TRL names a column that is missing
            return {**output, **columns}
        has_right_count = len(of_completions) == len(prompts) and 0 not in of_completions
        for name, of_column in lengths.items():
            if of_column != of_completions or not has_right_count:
                raise ValueError(
                    f"rollout_func returned {name} of lengths {of_column}, and completion_ids of lengths "
                    f"{of_completions} for {len(prompts)} prompts. Return one completion of one token or more for "
                    "each prompt, which TRL has repeated num_generations times, and one value for each token."
                )
        return {**output, **columns}

    return checking
