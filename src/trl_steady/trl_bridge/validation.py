"""Friendly errors for the commonest mistakes, which have poor messages or train nothing. It knows options of TRL."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

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
    """Wrap a `rollout_func` to refuse token lists that TRL would pad, so that values would belong to other tokens."""

    @wraps(function)
    def checking(prompts: Sequence[object], *arguments: object, **keywords: object) -> Any:
        output = function(prompts, *arguments, **keywords)
        lengths = list(map(len, output["completion_ids"]))
        for name in ("logprobs", "env_mask"):
            found = lengths if output.get(name) is None else list(map(len, output[name]))
            if found != lengths:
                raise ValueError(
                    f"rollout_func returned {name} of lengths {found}, but completion_ids of lengths {lengths}. "
                    "Return one value for each token."
                )
        return output

    return checking


@contextmanager
def name_columns_in_errors(passed: Iterable[str]) -> Iterator[None]:
    """Say what TRL passes to a reward function, if its call fails: it may ask for a column that is not there."""
    try:
        yield
    except TypeError as error:
        error.add_note(f"TRL passes to a reward function by name: {', '.join(passed)}. Use these names, and **kwargs.")
        raise
