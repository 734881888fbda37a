"""Friendly errors for the commonest mistakes, which have poor messages or train nothing. It knows options of TRL."""

import inspect
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import wraps
from typing import Any

import torch
from datasets import Dataset, IterableDataset

from trl_steady.core.feature import Trainer
from trl_steady.trl_bridge.overrides import overrides
from trl_steady.trl_bridge.trl_state import as_trl_trainer

PASSED = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""TRL passes these to reward functions by name, beside the columns of the data."""


def refuse_wrong_columns(trainer: Trainer) -> None:
    """Refuse a dataset whose columns do not fit TRL or the reward functions, unless a rollout may have others."""
    dataset = trainer.train_dataset
    # another class, a transform or a collator may add columns; a stream may not know its own
    is_plain = type(dataset) in (Dataset, IterableDataset) and getattr(dataset, "format", {}).get("type") != "custom"
    is_plain = is_plain and getattr(as_trl_trainer(trainer).data_collator, "__name__", "") == "identity"  # TRL's
    columns: Sequence[str] = (dataset.column_names or ()) if is_plain else ()
    is_open = trainer.environment_factories is not None or overrides(trainer, "data", "generation")
    if not columns or trainer.args.remove_unused_columns or is_open:
        return
    messages: list[str] = []
    if "prompt" not in columns:
        rename = f"train_dataset.rename_column({columns[0]!r}, 'prompt')"
        messages.append(f"train_dataset has no column 'prompt', but {', '.join(columns)}. Rename one: {rename}.")
    if (factors := getattr(trainer.args, "beta_column", None)) not in (None, *columns):
        messages.append(f"train_dataset has no column {factors!r}, but {', '.join(columns)}. Set beta_column to one.")
    passed = [*PASSED, *(name for name in columns if name not in ("prompt", "completion"))]
    for name, function in zip(trainer.reward_func_names, trainer.reward_funcs, strict=True):
        if isinstance(function, torch.nn.Module):
            continue
        taken = sorted({"prompts", "completions"}.intersection(columns))
        messages += [f"train_dataset has a column {each!r}, as TRL names all {each}. Rename it." for each in taken]
        for each in _required(function) - {*passed} if trainer.rollout_func is None else ():
            meant = "".join(f" Did you mean {close!r}?" for close in get_close_matches(each, passed, 1))
            messages.append(f"reward function {name!r} asks for {each!r}. TRL passes {', '.join(passed)}.{meant}")
    if messages:
        raise ValueError(" ".join(messages))


def _required(function: Callable[..., object]) -> set[str]:
    """Return the parameters that TRL must pass by name; none if they are not known."""
    try:  # not those of a function that a decorator wraps, for which it may have values of its own
        parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    except Exception:  # a user's object may do anything when it is looked at
        return set()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {each.name for each in parameters if each.default is each.empty and each.kind in named}


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
        answers = lengths.get("completion_ids", [])  # TRL names a column that is missing
        for name, found in lengths.items():
            if answers and (found != answers or len(answers) != len(prompts) or 0 in answers):
                raise ValueError(
                    f"rollout_func returned {name} of lengths {found}, and completion_ids of lengths {answers} for "
                    f"{len(prompts)} prompts. Return one completion of one token or more for each prompt, which TRL "
                    "has repeated num_generations times, and one value for each token."
                )
        return {**output, **columns}

    return checking
