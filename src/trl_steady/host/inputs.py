"""Checks of data and rollouts that TRL would accept, and train nothing or something else."""

import functools
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from datasets import Dataset

__all__ = ["checked_rollout", "refuse_idle"]


def refuse_idle(trainer: Any) -> None:
    """Refuse a dataset that is smaller than a rollout, because TRL's sampler would drop all of it.

    Raises:
        ValueError: The message names both numbers.
    """
    dataset, args = trainer.train_dataset, trainer.args
    prompts = args.generation_batch_size // args.num_generations
    smaller = "steps_per_generation" if args.steps_per_generation > 1 else "per_device_train_batch_size"
    if isinstance(dataset, Dataset) and len(dataset) < prompts:
        raise ValueError(
            f"train_dataset has {len(dataset)} rows, but each rollout needs {prompts} prompts (generation_batch_size="
            f"{args.generation_batch_size} / num_generations={args.num_generations}), so nothing would be trained. "
            f"Use a dataset with more rows, or set a smaller {smaller}."
        )


def checked_rollout(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a `rollout_func` so that output that does not fit the prompts is refused.

    Raises:
        ValueError: The message names the key and its expected content.
    """

    @functools.wraps(function)
    def checking(prompts: Sequence[Any], *arguments: Any, **keywords: Any) -> Any:
        output = function(prompts, *arguments, **keywords)
        if not isinstance(output, Mapping):
            raise ValueError(
                f"rollout_func returned {reprlib.repr(output)}. Return a dict with 'prompt_ids', 'completion_ids' and "
                "'logprobs'."
            )
        _refuse_tokens(output, len(prompts))
        return output

    return checking


def _refuse_tokens(output: Mapping[str, Any], count: int) -> None:
    lists = {name: _plain(output.get(name)) for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask")}
    for name, rows in lists.items():
        if rows is None and name.endswith("_ids"):
            raise ValueError(f"rollout_func returned {name}=None. Return a list of token ids for each prompt.")
        if rows is not None and len(rows) != count:
            raise ValueError(
                f"rollout_func returned {len(rows)} {name} for {count} prompts. Return one list for each prompt."
            )
    for index, ids in enumerate(lists["completion_ids"] or ()):
        if len(ids) == 0 or isinstance(ids, str):
            raise ValueError(
                f"rollout_func returned completion_ids[{index}]={ids!r}. Return at least one token for each "
                "completion, as a list of ids."
            )
        for name in ("logprobs", "env_mask"):
            rows = lists[name]
            if rows is not None and len(rows[index]) != len(ids):
                raise ValueError(
                    f"rollout_func returned {len(rows[index])} {name} for the {len(ids)} tokens of "
                    f"completion_ids[{index}]. Return one for each token."
                )
    scores = [value for row in lists["logprobs"] or () for value in _plain(row) if isinstance(value, float)]
    if scores and min(scores) > 0:
        raise ValueError(
            f"rollout_func returned {scores[0]} in logprobs[0], and no value below 0. These seem to be probabilities. "
            "Return log-probs, which are 0 or below."
        )


def _plain(values: Any) -> Any:
    """Return a tensor or an array as lists, because it has no truth value; return other values unchanged."""
    return values.tolist() if hasattr(values, "tolist") else values
