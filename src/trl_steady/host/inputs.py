"""Data, tokenizer, reward functions and rollouts that TRL would stumble over later, or take in silence."""

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

# Arguments that TRL passes to every reward function, beside the columns of the dataset.
_ALWAYS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
# Methods in which a subclass may give rows other columns than the dataset has.
_ROWS = ("get_train_dataloader", "get_eval_dataloader", "_prepare_inputs", "_generate_and_score_completions")
_SIGNATURE_COLUMNS = ("prompt", "image", "images")  # that remove_unused_columns=True leaves
_RENAME = "Rename the column that holds it: dataset.rename_column(..., 'prompt')"


def refuse_reward_functions(reward_funcs: Any) -> None:
    """Refuse what is neither a reward function, nor a reward model or its path, nor a list of these.

    Raises:
        ValueError: naming it.
    """
    alone = [] if reward_funcs is None else [reward_funcs]  # None: of an environment's own reward
    for function in reward_funcs if isinstance(reward_funcs, list) else alone:
        if not isinstance(function, str) and not callable(function):
            raise ValueError(
                f"reward_funcs has {function!r}, which cannot be called. Pass a function, a reward model or its path, "
                "or a list of these."
            )


def refuse_inputs(trainer: Any, tokenizer: Any) -> None:
    """Refuse a tokenizer, a dataset or a reward function with which the first rollout, or an evaluation, would fail.

    Args:
        trainer: one of TRL's, after its constructor.
        tokenizer: of text, its own or its processor's.

    Raises:
        ValueError: naming what is missing, and what to do.

    Warns:
        UserWarning: all reward weights are 0.
    """
    _refuse_tokenizer(trainer, tokenizer)
    if not _is_users(trainer, "__init__"):  # which may still change the data
        refuse_data(trainer)
    if not trainer.reward_weights.any():
        warnings.warn(
            f"reward_weights={trainer.reward_weights.tolist()} leaves nothing of the rewards. Set one of them to "
            "another number than 0, or leave reward_weights unset.",
            UserWarning,
            stacklevel=3,
        )


def refuse_data(trainer: Any) -> None:
    """Refuse a dataset without prompts, and a reward function that cannot be called with its columns.

    Raises:
        ValueError: naming what is missing, and what to do.
    """
    is_evaluated = trainer.args.eval_strategy != "no" or trainer.args.eval_on_start
    evaluation = trainer.eval_dataset if is_evaluated else None
    collator = getattr(trainer.data_collator, "__module__", "")
    changes_rows = _is_users(trainer, *_ROWS) or collator.split(".")[0] != "trl"
    if isinstance(evaluation, Mapping):
        named = {f"eval_dataset[{name!r}]": dataset for name, dataset in evaluation.items()}
    else:
        named = {} if evaluation is None else {"eval_dataset": evaluation}
    for name, dataset in {"train_dataset": trainer.train_dataset, **named}.items():
        columns = None if changes_rows else _columns(dataset)
        if columns is not None and "prompt" not in columns and trainer.environment_factories is None:
            raise ValueError(f"{name} has no column 'prompt', but {_quoted(columns)}. {_RENAME}.")
        if _is_users(trainer, "_calculate_rewards"):  # which may call them otherwise
            continue
        for function, title in zip(trainer.reward_funcs, trainer.reward_func_names, strict=True):
            if not isinstance(function, torch.nn.Module):
                _refuse_call(trainer, function, title, name, columns)


def refuse_small(trainer: Any) -> None:
    """Refuse to train on fewer prompts than a rollout takes: TRL's sampler would leave them all out.

    Raises:
        ValueError: naming both numbers.
    """
    dataset, args = trainer.train_dataset, trainer.args
    prompts = args.generation_batch_size // args.num_generations
    if _is_users(trainer, "_get_train_sampler"):
        return
    smaller = "steps_per_generation" if args.steps_per_generation > 1 else "per_device_train_batch_size"
    if isinstance(dataset, Dataset) and len(dataset) < prompts:
        raise ValueError(
            f"train_dataset has {len(dataset)} rows, and each rollout takes {prompts} prompts (generation_batch_size="
            f"{args.generation_batch_size} / num_generations={args.num_generations}), so that nothing would be "
            f"trained. Use a dataset with more rows, or set a smaller {smaller}."
        )


def refuse_rows(rows: Sequence[Mapping[str, Any]], *, of_any_kind: bool) -> None:
    """Refuse rows of a dataset without a prompt, before anything is generated.

    Args:
        rows: Of a batch.
        of_any_kind: True if a prompt may be anything, as a rollout_func may take it.

    Raises:
        ValueError: naming the row and what it has.
    """
    for index, row in enumerate(rows):
        if "prompt" not in row:
            raise ValueError(f"row {index} of the batch has no 'prompt', but {_quoted(row)}. {_RENAME}.")
        prompt = row["prompt"]
        if not of_any_kind and (not isinstance(prompt, str | list) or not prompt):
            raise ValueError(
                f"row {index} of the batch has prompt={prompt!r}. Use a text or a list of messages, neither empty, or "
                "leave the row out: dataset.filter(lambda row: row['prompt'])."
            )


def checked_rollout(function: Callable[..., Any]) -> Callable[..., Any]:
    """`rollout_func`, whose output is refused where it does not fit the prompts.

    Raises:
        ValueError: naming the key, and what it should hold.
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
                f"rollout_func returned completion_ids[{index}]={ids!r}. Return at least one token of each, as a list "
                "of ids."
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
            f"rollout_func returned {scores[0]} in logprobs[0], and nothing below 0: probabilities, it seems. Return "
            "log-probs, which are 0 or below."
        )


def _plain(values: Any) -> Any:
    """Lists in place of a tensor or an array, which have no truth value."""
    return values.tolist() if hasattr(values, "tolist") else values


def _is_users(trainer: Any, *methods: str) -> bool:
    """Return whether a subclass, a mixin, a patch or an attribute of the trainer has one of these methods."""
    owners = [vars(trainer), *map(vars, type(trainer).__mro__[:-1])]  # the last is object
    return any(method in owner and not is_known(owner[method]) for owner in owners for method in methods)


def _columns(dataset: Any) -> list[str] | None:
    """Names of the columns; None where only a row can tell, of a stream or of a dataset with a transform."""
    has_transform = isinstance(dataset, Dataset) and dataset.format["type"] == "custom"
    return None if has_transform else getattr(dataset, "column_names", None)


def _refuse_tokenizer(trainer: Any, tokenizer: Any) -> None:
    if tokenizer.pad_token_id is None:
        raise ValueError(
            "the tokenizer has pad_token=None and eos_token=None, so that sequences cannot be padded. Set "
            "tokenizer.eos_token, and tokenizer.pad_token if it is another, to tokens of its vocabulary."
        )
    if trainer.use_vllm or trainer.rollout_func is not None:
        return
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "the tokenizer has eos_token=None, so that transformers cannot tell where a completion ends. Set "
            "tokenizer.eos_token to a token of its vocabulary."
        )
    embedded = trainer.accelerator.unwrap_model(trainer.model).get_input_embeddings()
    rows = getattr(embedded, "num_embeddings", math.inf)
    if tokenizer.pad_token_id >= rows:
        raise ValueError(
            f"the tokenizer's pad_token={tokenizer.pad_token!r} has the id {tokenizer.pad_token_id}, and the model "
            f"embeds {rows} tokens. Set tokenizer.pad_token to a token of the model's vocabulary, or call "
            "model.resize_token_embeddings(len(tokenizer)) first."
        )


def _refuse_call(trainer: Any, function: Any, title: str, name: str, columns: Sequence[str] | None) -> None:
    """Refuse a reward function that cannot be called with what TRL and the dataset pass to it."""
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # a builtin that does not tell
        return
    own = set(columns or ()) - {"prompt", "completion", "completion_ids"}
    if trainer.args.remove_unused_columns:
        own &= set(_SIGNATURE_COLUMNS)
    always = _ALWAYS if trainer.environment_factories is None else (*_ALWAYS, "environments")
    twice = own & set(always)
    if twice:
        raise ValueError(
            f"{name} has a column {min(twice)!r}, which TRL passes to reward functions itself. Rename the column."
        )
    passed, parameters = {*always, *own}, signature.parameters.values()
    unnamed = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_ONLY]
    if unnamed:
        raise ValueError(
            f"reward function {title!r} takes {_quoted(unnamed)} by position only, and TRL passes everything by name. "
            f"Delete the '/' in its signature: def {title}({', '.join(unnamed)}, **kwargs)."
        )
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        surplus = [key for key in sorted(passed) if key not in signature.parameters]
        if surplus:
            raise ValueError(
                f"reward function {title!r} does not take {_quoted(surplus)}, which TRL passes by name. Use **kwargs "
                f"as its last parameter: def {title}(..., **kwargs)."
            )
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind in by_name and p.name not in passed]
    kept = ", with remove_unused_columns=True," if trainer.args.remove_unused_columns else ""
    # a rollout_func may bring columns of its own
    if needed and columns is not None and trainer.rollout_func is None:
        raise ValueError(
            f"reward function {title!r} needs {_quoted(needed)}, and {name}{kept} has no such column. TRL passes "
            f"{_quoted((*_ALWAYS[:3], *sorted(own)))}. Use these names, or give the parameter a default."
        )


def _quoted(names: Any) -> str:
    return ", ".join(repr(name) for name in names) or "nothing"
