"""The rewards of a rollout as one table of steps, for any mixture of plain and step rewards."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trl_steady.functional.advantages import total_rewards


class RewardedCompletion(NamedTuple):
    """A completion without its scalar rewards, in a plain form that can be sent to other processes."""

    tokens: int
    """Number of tokens."""
    own_end: int
    """Exclusive end of the last loss token."""
    steps: Mapping[int, Sequence[tuple[int, float]]]
    """Reward function -> (end in tokens, reward) of each step. Functions without `StepRewards` are missing."""


class StepTable(NamedTuple):
    """The steps of `N` completions."""

    rewards: Tensor
    """(N, S) weighted sums over reward functions, NaN = no such step."""
    ends: Tensor
    """(N, S) exclusive ends in tokens, increasing; a number beyond every completion where there is no such step."""
    is_rewarded: Tensor
    """(N,) bool, False for a completion for which every reward function returned None. It has no step."""


def tabulate(completions: Sequence[RewardedCompletion], scalars: Tensor, weights: Tensor, *, cover: bool) -> StepTable:
    """Combine the rewards of all reward functions into one table of steps.

    A plain number becomes a step that ends with the completion. Steps that end at the same token become one step, with
    the sum of their rewards.

    Args:
        completions: (N,) data of each completion.
        scalars: (N, K) rewards by function, NaN = None. If a function returned steps, these replace its scalar.
        weights: (K,) weights of the functions.
        cover: If no step reaches the last loss token, add a step of reward 0 that ends there. Then every loss token of
            a rewarded completion belongs to a step.
    """
    is_rewarded = ~scalars.isnan().all(1)
    rows: list[list[tuple[int, dict[int, float]]]] = []  # end and rewards by function of each step
    for completion, numbers in zip(completions, scalars.tolist(), strict=True):
        row: dict[int, dict[int, float]] = {}
        for function, number in enumerate(numbers):
            if math.isnan(number):
                continue
            for end, value in completion.steps.get(function, [(completion.tokens, number)]):
                at_end = row.setdefault(end, {})
                at_end[function] = at_end.get(function, 0.0) + value
        if cover and not all(map(math.isnan, numbers)) and max(row, default=-1) < completion.own_end:
            row[completion.own_end] = {0: 0.0}  # any function will do
        rows.append(sorted(row.items()))
    size = (len(rows), max(1, *map(len, rows)))
    missing = (torch.iinfo(torch.int64).max, dict[int, float]())
    steps = [step for row in rows for step in [*row, *[missing] * (size[1] - len(row))]]
    ends = torch.tensor([end for end, _ in steps], device=scalars.device)
    # sum as TRL does: function by function, in its dtype
    flat = scalars.new_tensor([[at_end.get(k, math.nan) for k in range(scalars.size(1))] for _, at_end in steps])
    rewards = total_rewards(flat, weights)
    return StepTable(rewards.view(size), ends.view(size), is_rewarded)
