"""Labels of a rollout's answers by a rule, and of their steps by continuations."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object

from trl_steady.core.feature import Trainer
from trl_steady.functional.reward_models import step_labels
from trl_steady.trl_bridge.models import text_tokenizer
from trl_steady.trl_bridge.rollout import generate_continuations

_NOT_COLUMNS = ("trainer_state", "log_extra", "log_metric", "environments", "completion_ids")


class Answers(NamedTuple):
    """B answers of this process's rollout."""

    prompts: Sequence[object]
    """As reward functions get them, as the next."""
    completions: Sequence[Any]
    columns: Mapping[str, object]
    """Other arguments of reward functions, with columns of the dataset."""
    prompt_ids: Sequence[list[int]]
    completion_ids: Sequence[list[int]]
    ends: Sequence[list[int]]
    """For each answer, number of tokens before the end of each step, or before its only score."""


def verdicts(
    label_fn: Callable[..., Any],
    prompts: Sequence[object],
    completions: Sequence[object],
    columns: Mapping[str, object],
) -> list[bool | None]:
    """Return what the rule says of each answer: right, wrong, or None for no verdict; raise a ValueError else."""
    columns = {name: column for name, column in columns.items() if name not in _NOT_COLUMNS}
    found = list(label_fn(prompts=prompts, completions=completions, **columns))
    if len(found) != len(completions) or any(verdict not in (None, 0, 1) for verdict in found):
        raise ValueError(
            f"label_fn returned {found!r} for {len(completions)} completions. Return True, False, or None (no "
            "verdict) for each."
        )
    return [None if verdict is None else bool(verdict) for verdict in found]


def label_steps(
    trainer: Trainer,
    label_fn: Callable[..., Any],
    answers: Answers,
    known: Sequence[bool | None],
    continuations: int,
) -> list[list[float]]:
    """Return labels of the steps of answers: does any of N continuations from its end come out right?

    The policy continues all steps but the last of each answer at once. A step that ends its answer has the answer's
    label, which `known` holds. NaN: the rule has no verdict on any continuation. Math-Shepherd (arXiv 2312.08935).

    Every process must call this function.
    """
    prompt_ids, completion_ids, completions = answers.prompt_ids, answers.completion_ids, answers.completions
    # each step that does not end its answer, once for each continuation
    open_steps = [
        (row, end)
        for row, ends_of_row in enumerate(answers.ends)
        for end in ends_of_row
        if end < len(completion_ids[row])
        for _ in range(continuations)
    ]
    texts = [prompt_ids[row] + completion_ids[row][:end] for row, end in open_steps]
    # engines of several processes need the same number of texts on each
    most = max(gather_object([len(texts)]))
    dummies = [prompt_ids[0]] * (most - len(texts))
    rest = generate_continuations(trainer, [*texts, *dummies], len(completion_ids))[: len(texts)]
    found: list[bool | None] = []
    if rows := [row for row, _ in open_steps]:
        whole = [
            (completion_ids[row][:end] + continuation)[: trainer.max_completion_length]
            for (row, end), continuation in zip(open_steps, rest, strict=True)
        ]
        contents = text_tokenizer(trainer).batch_decode(whole, skip_special_tokens=True)
        as_completions = [
            text if isinstance(completions[row], str) else [{**completions[row][0], "content": text}]
            for row, text in zip(rows, contents, strict=True)
        ]
        columns = {
            name: [column[row] for row in rows] for name, column in answers.columns.items() if isinstance(column, list)
        }
        found = verdicts(label_fn, [answers.prompts[row] for row in rows], as_completions, columns)
    reached = torch.tensor([verdict is True for verdict in found]).view(-1, continuations)
    is_known = torch.tensor([verdict is not None for verdict in found]).view(-1, continuations).any(1)
    of_open = iter(step_labels(reached).where(is_known, torch.nan).tolist())
    return [
        [next(of_open) if end < len(completion_ids[row]) else float(known[row] is True) for end in ends_of_row]
        for row, ends_of_row in enumerate(answers.ends)
    ]
