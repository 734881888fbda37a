"""Friendly errors for the commonest mistakes, which have poor messages or train nothing. It knows options of TRL."""

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from datasets import Dataset


def refuse_small_dataset(dataset: object, args: Any) -> None:
    """Refuse a dataset that is smaller than a rollout, because TRL's sampler would drop all of it."""
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


def refuse_reserved_columns(row: Mapping[str, object], reward_functions: Iterable[object]) -> None:
    """Refuse columns with names of TRL's own arguments, which a reward function would get twice."""
    found = sorted({"prompts", "completions"} & row.keys())
    if found and not all(isinstance(function, torch.nn.Module) for function in reward_functions):
        raise ValueError(
            f"the data set, or rollout_func, gives a column {found[0]!r}, but TRL passes all {found[0]} of a rollout "
            "to reward functions by this name. Rename the column."
        )


@contextmanager
def name_columns_in_errors(passed: Iterable[str]) -> Iterator[None]:
    """Say what TRL passes to a reward function, if it asks for a column that is not there."""
    try:
        yield
    except TypeError as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_name in ("call", "call_async"):  # otherwise, the function's own code has failed
            names = ", ".join(passed)
            error.add_note(f"TRL passes to a reward function by name: {names}. Use these names, and **kwargs.")
        raise
