"""Labels of a rollout's completions by a rule, and of their steps by continuations."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object
from torch import Tensor

from trl_steady.core.feature import Trainer
from trl_steady.functional.reward_models import step_labels
from trl_steady.trl_bridge.generation import generate_continuations
from trl_steady.trl_bridge.models import text_tokenizer

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
    returned = list(label_fn(prompts=prompts, completions=completions, **columns))
    if len(returned) != len(completions) or any(verdict not in (None, 0, 1) for verdict in returned):
        raise ValueError(
            f"label_fn returned {returned!r} for {len(completions)} completions. Return True, False, or None (no "
            "verdict) for each."
        )
    verdicts: list[bool | None] = []
    for verdict in returned:
        verdicts.append(None if verdict is None else bool(verdict))
    return verdicts


def verdict_masks(verdicts: Sequence[bool | None]) -> tuple[Tensor, Tensor]:
    """Return (B,) bool, True where the verdict is right, and (B,) bool, True where there is a verdict."""
    is_right = torch.tensor([verdict is True for verdict in verdicts], dtype=torch.bool)
    is_known = torch.tensor([verdict is not None for verdict in verdicts], dtype=torch.bool)
    return is_right, is_known


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
    # of each step that does not end its completion, once for each continuation: the index of the completion, its
    # tokens up to the end of the step, and the prompt before them
    indices: list[int] = []
    beginnings: list[list[int]] = []
    prefixes: list[list[int]] = []
    for index, ends in enumerate(rollout.ends):
        for end in ends:
            if end >= len(completion_ids[index]):
                continue
            for _ in range(continuations):
                indices.append(index)
                beginnings.append(completion_ids[index][:end])
                prefixes.append(prompt_ids[index] + completion_ids[index][:end])
    # engines of several processes need the same number of prompts on each
    most = max(gather_object([len(prefixes)]))
    dummies = [prompt_ids[0]] * (most - len(prefixes))
    generated = generate_continuations(trainer, prefixes + dummies, len(completion_ids))[: len(prefixes)]
    continued: list[list[int]] = []
    for beginning, continuation in zip(beginnings, generated, strict=True):
        continued.append((beginning + continuation)[: trainer.max_completion_length])
    continued_verdicts = _label_continued(trainer, label_fn, rollout, indices, continued)
    is_right, is_known = verdict_masks(continued_verdicts)
    labels_of_open_steps = step_labels(is_right.view(-1, continuations))
    has_verdict = is_known.view(-1, continuations).any(1)
    open_labels = iter(labels_of_open_steps.where(has_verdict, torch.nan).tolist())
    labels: list[list[float]] = []
    for index, ends in enumerate(rollout.ends):
        labels.append([])
        for end in ends:
            if end < len(completion_ids[index]):
                labels[index].append(next(open_labels))
            else:
                labels[index].append(float(verdicts[index] is True))
    return labels


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
    prompts: list[object] = []
    completions: list[object] = []
    for index, text in zip(indices, texts, strict=True):
        prompts.append(rollout.prompts[index])
        original = rollout.completions[index]
        if isinstance(original, str):
            completions.append(text)
        else:
            completions.append([{**original[0], "content": text}])
    columns: dict[str, object] = {}
    for name, column in rollout.columns.items():
        if isinstance(column, list):
            columns[name] = [column[index] for index in indices]
    return get_verdicts(label_fn, prompts, completions, columns)
