"""Labels of a rollout's completions by a rule, and of their steps by continuations."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object

from trl_steady.core.feature import Trainer
from trl_steady.functional.reward_models import step_labels
from trl_steady.trl_bridge.models import text_tokenizer
from trl_steady.trl_bridge.rollout import generate_continuations

_NOT_COLUMNS = ("trainer_state", "log_extra", "log_metric", "environments", "completion_ids")


class RolloutCompletions(NamedTuple):
    """B completions of this process's rollout."""

    prompts: Sequence[object]
    """As reward functions get them. So are the next."""
    completions: Sequence[Any]
    columns: Mapping[str, object]
    """Other arguments of reward functions, with columns of the dataset."""
    prompt_ids: Sequence[list[int]]
    completion_ids: Sequence[list[int]]
    ends: Sequence[list[int]]
    """For each completion, number of tokens before the end of each step, or before its only score."""


def get_verdicts(
    label_fn: Callable[..., Any],
    prompts: Sequence[object],
    completions: Sequence[object],
    columns: Mapping[str, object],
) -> list[bool | None]:
    """Return what the rule says of each completion: right, wrong, or None for no verdict.

    Raises:
        ValueError: The rule returned something else.
    """
    columns = {name: column for name, column in columns.items() if name not in _NOT_COLUMNS}
    verdicts = list(label_fn(prompts=prompts, completions=completions, **columns))
    if len(verdicts) != len(completions) or any(verdict not in (None, 0, 1) for verdict in verdicts):
        raise ValueError(
            f"label_fn returned {verdicts!r} for {len(completions)} completions. Return True, False, or None (no "
            "verdict) for each."
        )
    return [None if verdict is None else bool(verdict) for verdict in verdicts]


def label_steps(
    trainer: Trainer,
    label_fn: Callable[..., Any],
    rollout: RolloutCompletions,
    verdicts: Sequence[bool | None],
    continuations: int,
) -> list[list[float]]:
    """Return labels of the steps of completions: does any of N continuations from its end come out right?

    The policy continues all steps but the last of each completion at once. A step that ends its completion has the
    completion's label, which `verdicts` holds. NaN: the rule has no verdict on any continuation. Math-Shepherd (arXiv
    2312.08935).

    Every process must call this function.
    """
    prompt_ids, completion_ids = rollout.prompt_ids, rollout.completion_ids
    # the completion and the end of each step that does not end its completion, once for each continuation
    open_steps = [
        (index, end)
        for index, ends in enumerate(rollout.ends)
        for end in ends
        if end < len(completion_ids[index])
        for _ in range(continuations)
    ]
    prefixes = [prompt_ids[index] + completion_ids[index][:end] for index, end in open_steps]
    # engines of several processes need the same number of prompts on each
    most = max(gather_object([len(prefixes)]))
    dummies = [prompt_ids[0]] * (most - len(prefixes))
    rest = generate_continuations(trainer, [*prefixes, *dummies], len(completion_ids))[: len(prefixes)]
    continued = [
        (completion_ids[index][:end] + continuation)[: trainer.max_completion_length]
        for (index, end), continuation in zip(open_steps, rest, strict=True)
    ]
    found = _label_continued(trainer, label_fn, rollout, [index for index, _ in open_steps], continued)
    reached = torch.tensor([verdict is True for verdict in found]).view(-1, continuations)
    is_known = torch.tensor([verdict is not None for verdict in found]).view(-1, continuations).any(1)
    open_labels = iter(step_labels(reached).where(is_known, torch.nan).tolist())
    return [
        [next(open_labels) if end < len(completion_ids[index]) else float(verdicts[index] is True) for end in ends]
        for index, ends in enumerate(rollout.ends)
    ]


def _label_continued(
    trainer: Trainer,
    label_fn: Callable[..., Any],
    rollout: RolloutCompletions,
    indices: list[int],
    continued_ids: list[list[int]],
) -> list[bool | None]:
    """Return the rule's verdicts on continued completions, each of the completion number `indices[i]`."""
    if not indices:  # the rule need not expect an empty call
        return []
    texts = text_tokenizer(trainer).batch_decode(continued_ids, skip_special_tokens=True)
    originals = [rollout.completions[index] for index in indices]
    completions = [
        text if isinstance(original, str) else [{**original[0], "content": text}]
        for original, text in zip(originals, texts, strict=True)
    ]
    columns = {
        name: [column[index] for index in indices]
        for name, column in rollout.columns.items()
        if isinstance(column, list)
    }
    return get_verdicts(label_fn, [rollout.prompts[index] for index in indices], completions, columns)
