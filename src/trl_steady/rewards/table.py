"""The rewards of a rollout as one table of steps, whatever its reward functions have returned."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["ScoredCompletion", "StepTable", "tabulate"]


class ScoredCompletion(NamedTuple):
    """What is known of one completion beside its scalar rewards; plain data, for other processes."""

    tokens: int
    """Its length."""
    own_end: int
    """Where its last loss token ends."""
    steps: Mapping[int, Sequence[tuple[int, float]]]
    """Reward function -> (end in tokens, reward) of each step; a function that returned no steps is not in it."""


class StepTable(NamedTuple):
    """Steps of `N` completions."""

    rewards: Tensor
    """(N, S) weighted sums over reward functions, NaN = no such step."""
    ends: Tensor
    """(N, S) in tokens, exclusive, increasing; a number beyond every completion where there is no such step."""


def tabulate(completions: Sequence[ScoredCompletion], scalars: Tensor, weights: Tensor, *, cover: bool) -> StepTable:
    """Put what the reward functions returned in one order.

    A plain number is a step that ends with the completion. Steps that end at the same token are one, worth their sum.

    Args:
        completions: (N,) what is known of each.
        scalars: (N, K) rewards by function, NaN = None; what a function's steps replace.
        weights: (K,) of the functions.
        cover: End a step of reward 0 with the last loss token where no step reaches it, so that every loss token of a
            completion with a verdict belongs to a step.
    """
    known = (~scalars.isnan()).tolist()
    rows: list[dict[int, dict[int, float]]] = []  # end -> reward function -> reward
    for completion, is_known, numbers in zip(completions, known, scalars.tolist(), strict=True):
        row: dict[int, dict[int, float]] = {}
        for function, number in enumerate(numbers):
            if not is_known[function]:
                continue
            whole = [(completion.tokens, number)]
            for end, value in completion.steps.get(function, whole):
                at_end = row.setdefault(end, {})
                at_end[function] = at_end.get(function, 0.0) + value
        if cover and any(is_known) and max(row, default=-1) < completion.own_end:
            row[completion.own_end] = {0: 0.0}  # any function will do
        rows.append(dict(sorted(row.items())))
    size = (len(rows), max(1, *map(len, rows)))
    missing, beyond = [torch.nan] * len(weights), torch.iinfo(torch.int64).max
    by_function, ends = [], []
    for row in rows:
        absent = size[1] - len(row)
        values = [[at_end.get(function, torch.nan) for function in range(len(weights))] for at_end in row.values()]
        by_function.append([*values, *[missing] * absent])
        ends.append([*row, *[beyond] * absent])
    # as TRL adds them up, function by function in its dtype
    flat = scalars.new_tensor(by_function).flatten(0, 1)
    rewards = (flat * weights.to(flat)).nansum(1).where(~flat.isnan().all(1), torch.nan)
    return StepTable(rewards.view(size), torch.tensor(ends, device=scalars.device))
