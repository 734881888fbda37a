"""Access to the return values of reward functions, and to the advantages in TRL's table of completions."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from trl.trainer.utils import is_async_callable

__all__ = ["reading", "relog"]


def reading(functions: Sequence[Any], reads: Sequence[Callable[[int, Any], Any]]) -> list[Any]:
    """Return reward functions whose results go through all `reads`, which get the function's number and its result."""

    def read(index: int, returned: Any) -> Any:
        return functools.reduce(lambda result, each: each(index, result), reads, returned)

    return [
        function
        if isinstance(function, torch.nn.Module)  # TRL reads the logits of a reward model itself
        else _then(function, functools.partial(read, index))
        for index, function in enumerate(functions)
    ]


def relog(trainer: Any, count: int, advantages: Sequence[float] | None, columns: Mapping[str, Sequence[Any]]) -> None:
    """Change the rows of the last rollout in TRL's table of completions.

    Args:
        trainer: The trainer.
        count: Number of completions of the rollout, over all processes.
        advantages: (count,) values that replace TRL's; None keeps TRL's.
        columns: name -> (count,) values of an additional column. A new column with only None is not added.
    """
    logs = trainer._logs
    if advantages is not None:
        column = logs["advantages"]
        for _ in range(min(count, len(column))):
            column.pop()
        column.extend(advantages)
    for name, values in columns.items():
        if name not in logs["extra"] and all(value is None for value in values):
            continue
        column = logs["extra"][name]
        # every column of TRL's table must be as long as the column of prompts
        column.extend([None] * (len(logs["prompt"]) - count - len(column)))
        column.extend(values)


def _then(function: Callable[..., Any], read: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a function that applies `read` to the result of `function`; it is async if `function` is."""

    async def reading_later(*arguments: Any, **keywords: Any) -> Any:
        with _naming(keywords):
            return read(await function(*arguments, **keywords))

    def reading_now(*arguments: Any, **keywords: Any) -> Any:
        with _naming(keywords):
            return read(function(*arguments, **keywords))

    return reading_later if is_async_callable(function) else reading_now


@contextmanager
def _naming(passed: Iterable[str]) -> Iterator[None]:
    """Say what TRL passes to a reward function, if its call fails: it may ask for a column that is not there."""
    try:
        yield
    except TypeError as error:
        error.add_note(f"TRL passes to a reward function by name: {', '.join(passed)}. Use these names, and **kwargs.")
        raise
