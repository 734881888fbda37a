"""Labels of a rollout's answers by a rule, and of their steps by continuations."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import gather_object

from trl_steady.functional.reward_models import step_labels
from trl_steady.host.models import text_tokenizer
from trl_steady.host.rollouts import continued

__all__ = ["label_steps", "verdicts"]

_NOT_COLUMNS = ("trainer_state", "log_extra", "log_metric", "environments", "completion_ids")


def verdicts(
    label_fn: Callable[..., Any], prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Any]
) -> list[bool | None]:
    """Return what the rule says of each answer: right, wrong, or None for no verdict.

    Raises:
        ValueError: The rule returned something else.
    """
    columns = {name: column for name, column in columns.items() if name not in _NOT_COLUMNS}
    found = list(label_fn(prompts=prompts, completions=completions, **columns))
    if len(found) != len(completions):
        raise ValueError(
            f"label_fn returned {len(found)} verdicts for {len(completions)} completions. Return one for each."
        )
    for verdict in found:
        if verdict is not None and verdict not in (0, 1):
            raise ValueError(f"label_fn returned {verdict!r}. Return True, False, or None for no verdict.")
    return [None if verdict is None else bool(verdict) for verdict in found]


def label_steps(
    trainer: Any,
    label_fn: Callable[..., Any],
    prompts: Sequence[Any],
    completions: Sequence[Any],
    columns: Mapping[str, Any],
    *,
    prompt_ids: Sequence[list[int]],
    completion_ids: Sequence[list[int]],
    ends: Sequence[Sequence[int]],
    known: Sequence[bool | None],
    continuations: int,
) -> list[list[float]]:
    """Return labels of the steps of this process's answers: does any of N continuations from its end come out right?

    The policy continues all steps but the last of each answer at once. A step that ends its answer has the answer's
    label. NaN: the rule has no verdict on any continuation. Math-Shepherd (arXiv 2312.08935).

    Every process must call this function.

    Args:
        trainer: The trainer.
        label_fn: The rule.
        prompts: (B,) as reward functions get them, as the next two.
        completions: (B,)
        columns: Name -> (B,) columns of the dataset.
        prompt_ids: (B,) token ids.
        completion_ids: (B,) token ids.
        ends: (B,) number of tokens before the end of each step.
        known: (B,) verdict on each whole answer.
        continuations: N.
    """
    open_steps = [(row, end) for row, own in enumerate(ends) for end in own if end < len(completion_ids[row])]
    texts = [prompt_ids[row] + completion_ids[row][:end] for row, end in open_steps for _ in range(continuations)]
    # engines of several processes need the same number of texts on each
    most = max(gather_object([len(texts)]))
    dummies = [prompt_ids[0]] * (most - len(texts))
    rest = continued(trainer, [*texts, *dummies], len(completion_ids))[: len(texts)] if most else []
    limit, tokenizer = trainer.max_completion_length, text_tokenizer(trainer)
    rows = [row for row, _ in open_steps for _ in range(continuations)]
    whole = [
        completion_ids[row][:end] + own[: limit - end]
        for (row, end), own in zip(
            itertools.chain.from_iterable([s] * continuations for s in open_steps), rest, strict=True
        )
    ]
    # transformers decodes no text as one empty text
    contents = tokenizer.batch_decode(whole, skip_special_tokens=True) if whole else []
    as_completions = [
        text if isinstance(completions[row], str) else [{**completions[row][0], "content": text}]
        for row, text in zip(rows, contents, strict=True)
    ]
    repeated = {
        name: [column[row] for row in rows]
        for name, column in columns.items()
        if name not in _NOT_COLUMNS and isinstance(column, list)
    }
    found = verdicts(label_fn, [prompts[row] for row in rows], as_completions, repeated) if rows else []
    reached = torch.tensor([verdict is True for verdict in found]).view(-1, continuations)
    is_known = torch.tensor([verdict is not None for verdict in found]).view(-1, continuations).any(1)
    of_open: Iterator[float] = iter(step_labels(reached).where(is_known, torch.nan).tolist())
    return [
        [next(of_open) if end < len(completion_ids[row]) else float(known[row] is True) for end in own]
        for row, own in enumerate(ends)
    ]
