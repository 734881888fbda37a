"""Checks of data, tokenizer, reward functions and rollouts that TRL would fail on later, or accept silently."""

import functools
import inspect
import math
import reprlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from datasets import Dataset

from trl_steady.host.reached import is_known

__all__ = ["checked_rollout", "refuse_data", "refuse_inputs", "refuse_reward_functions", "refuse_rows", "refuse_small"]

# Arguments that TRL passes to every reward function, in addition to the columns of the dataset.
_ALWAYS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
# Methods in which a subclass may change the columns of the rows.
_ROWS = ("get_train_dataloader", "get_eval_dataloader", "_prepare_inputs", "_generate_and_score_completions")
_SIGNATURE_COLUMNS = ("prompt", "image", "images")  # columns that remove_unused_columns=True keeps
_RENAME = "Rename the column that holds it: dataset.rename_column(..., 'prompt')"


def refuse_reward_functions(reward_funcs: Any) -> None:
    """Refuse a value that is not a reward function, a reward model, its path, or a list of these.

    Raises:
        ValueError: The message names the value.
    """
    alone = [] if reward_funcs is None else [reward_funcs]  # None: an environment returns the reward
    for function in reward_funcs if isinstance(reward_funcs, list) else alone:
        if not isinstance(function, str) and not callable(function):
            raise ValueError(
                f"reward_funcs has {function!r}, which cannot be called. Pass a function, a reward model or its path, "
                "or a list of these."
            )


def refuse_inputs(trainer: Any, tokenizer: Any) -> None:
    """Refuse a tokenizer, a dataset or a reward function with which the first rollout or an evaluation would fail.

    Args:
        trainer: A trainer of TRL, after its constructor has run.
        tokenizer: The tokenizer for text, which may be part of a processor.

    Raises:
        ValueError: The message names what is missing and what to do.

    Warns:
        UserWarning: All reward weights are 0.
    """
    _refuse_tokenizer(trainer, tokenizer)
    if not _is_users(trainer, "__init__"):  # a user's __init__ may still change the data
        refuse_data(trainer)
    if not trainer.reward_weights.any():
        warnings.warn(
            f"reward_weights={trainer.reward_weights.tolist()} sets all rewards to 0. Set one of the weights to a "
            "number other than 0, or leave reward_weights unset.",
            UserWarning,
            stacklevel=3,
        )


def refuse_data(trainer: Any) -> None:
    """Refuse a dataset without prompts, and a reward function that cannot be called with the dataset's columns.

    Raises:
        ValueError: The message names what is missing and what to do.
    """
    collator = getattr(trainer.data_collator, "__module__", "")
    changes_rows = _is_users(trainer, *_ROWS) or collator.split(".")[0] != "trl"
    datasets, evaluation = {"train_dataset": trainer.train_dataset}, trainer.eval_dataset
    if trainer.args.eval_strategy != "no" or trainer.args.eval_on_start:
        if isinstance(evaluation, Mapping):
            datasets |= {f"eval_dataset[{name!r}]": dataset for name, dataset in evaluation.items()}
        elif evaluation is not None:
            datasets["eval_dataset"] = evaluation
    for name, dataset in datasets.items():
        columns = None if changes_rows else _columns(dataset)
        if columns is not None and "prompt" not in columns and trainer.environment_factories is None:
            raise ValueError(f"{name} has no column 'prompt', but {_quoted(columns)}. {_RENAME}.")
        if _is_users(trainer, "_calculate_rewards"):  # a user's method may call reward functions in another way
            continue
        for function, title in zip(trainer.reward_funcs, trainer.reward_func_names, strict=True):
            if not isinstance(function, torch.nn.Module):
                _refuse_call(trainer, function, title, name, columns)


def refuse_small(trainer: Any) -> None:
    """Refuse to train on fewer prompts than a rollout needs, because TRL's sampler would drop them all.

    Raises:
        ValueError: The message names both numbers.
    """
    dataset, args = trainer.train_dataset, trainer.args
    prompts = args.generation_batch_size // args.num_generations
    smaller = "steps_per_generation" if args.steps_per_generation > 1 else "per_device_train_batch_size"
    is_trls_sampler = not _is_users(trainer, "_get_train_sampler")
    if is_trls_sampler and isinstance(dataset, Dataset) and len(dataset) < prompts:
        raise ValueError(
            f"train_dataset has {len(dataset)} rows, but each rollout needs {prompts} prompts (generation_batch_size="
            f"{args.generation_batch_size} / num_generations={args.num_generations}), so nothing would be trained. "
            f"Use a dataset with more rows, or set a smaller {smaller}."
        )


def refuse_rows(rows: Sequence[Mapping[str, Any]], *, of_any_kind: bool) -> None:
    """Refuse a batch with a row without a prompt, before anything is generated.

    A prompt may be `of_any_kind` if a rollout_func reads it.

    Raises:
        ValueError: The message names the row and its content.
    """
    for index, row in enumerate(rows):
        if "prompt" not in row:
            raise ValueError(f"row {index} of the batch has no 'prompt', but {_quoted(row)}. {_RENAME}.")
        prompt = row["prompt"]
        if not of_any_kind and (not isinstance(prompt, str | list) or not prompt):
            raise ValueError(
                f"row {index} of the batch has prompt={prompt!r}. Use a non-empty text or list of messages, or remove "
                "the row: dataset.filter(lambda row: row['prompt'])."
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


def _is_users(trainer: Any, *methods: str) -> bool:
    """Return True if a subclass, a mixin, a patch or an attribute of the trainer defines one of these methods."""
    owners = [vars(trainer), *map(vars, type(trainer).__mro__[:-1])]  # the last class is object
    return any(method in owner and not is_known(owner[method]) for owner in owners for method in methods)


def _columns(dataset: Any) -> list[str] | None:
    """Return the names of the columns, or None if only a row has them: a stream, or a dataset with a transform."""
    has_transform = isinstance(dataset, Dataset) and dataset.format["type"] == "custom"
    return None if has_transform else getattr(dataset, "column_names", None)


def _refuse_tokenizer(trainer: Any, tokenizer: Any) -> None:
    if tokenizer.pad_token_id is None:
        raise ValueError(
            "the tokenizer has pad_token=None and eos_token=None, so sequences cannot be padded. Set "
            "tokenizer.eos_token, and tokenizer.pad_token if it differs, to tokens of the vocabulary."
        )
    if trainer.use_vllm or trainer.rollout_func is not None:
        return
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "the tokenizer has eos_token=None, so transformers cannot tell where a completion ends. Set "
            "tokenizer.eos_token to a token of the vocabulary."
        )
    embedded = trainer.accelerator.unwrap_model(trainer.model).get_input_embeddings()
    rows = getattr(embedded, "num_embeddings", math.inf)
    if tokenizer.pad_token_id >= rows:
        raise ValueError(
            f"the tokenizer's pad_token={tokenizer.pad_token!r} has the id {tokenizer.pad_token_id}, but the model "
            f"has embeddings for {rows} tokens. Set tokenizer.pad_token to a token of the model's vocabulary, or call "
            "model.resize_token_embeddings(len(tokenizer)) first."
        )


def _refuse_call(trainer: Any, function: Any, title: str, name: str, columns: Sequence[str] | None) -> None:
    """Refuse a reward function that cannot be called with the arguments and columns that TRL passes to it."""
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # a builtin without a signature
        return
    own = set(columns or ()) - {"prompt", "completion", "completion_ids"}
    if trainer.args.remove_unused_columns:
        own &= set(_SIGNATURE_COLUMNS)
    always = _ALWAYS if trainer.environment_factories is None else (*_ALWAYS, "environments")
    twice = own & set(always)
    if twice:
        raise ValueError(
            f"{name} has a column {min(twice)!r}, but TRL passes its own argument of this name to reward functions. "
            "Rename the column."
        )
    passed, parameters = {*always, *own}, signature.parameters.values()
    unnamed = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_ONLY]
    if unnamed:
        raise ValueError(
            f"reward function {title!r} takes {_quoted(unnamed)} by position only, but TRL passes all arguments by "
            f"name. Delete the '/' in its signature: def {title}({', '.join(unnamed)}, **kwargs)."
        )
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        surplus = [key for key in sorted(passed) if key not in signature.parameters]
        if surplus:
            raise ValueError(
                f"reward function {title!r} does not accept {_quoted(surplus)}, which TRL passes by name. Use "
                f"**kwargs as its last parameter: def {title}(..., **kwargs)."
            )
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind in by_name and p.name not in passed]
    kept = ", with remove_unused_columns=True," if trainer.args.remove_unused_columns else ""
    # a rollout_func may add columns
    if needed and columns is not None and trainer.rollout_func is None:
        raise ValueError(
            f"reward function {title!r} needs {_quoted(needed)}, but {name}{kept} has no such column. TRL passes "
            f"{_quoted((*_ALWAYS[:3], *sorted(own)))}. Use these names, or give the parameter a default."
        )


def _quoted(names: Any) -> str:
    return ", ".join(repr(name) for name in names) or "nothing"
