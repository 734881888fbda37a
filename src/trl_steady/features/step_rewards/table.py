"""The rewards of a rollout as one table of steps, for any mixture of plain and step rewards."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trl_steady.functional.advantages import total_rewards

_NO_STEP = torch.iinfo(torch.int64).max  # an end beyond every completion


class RewardedCompletion(NamedTuple):
    """A completion without its scalar rewards, in a plain form that can be sent to other processes."""

    tokens: int
    """Number of tokens."""
    sampled_end: int
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
        by_end: dict[int, dict[int, float]] = {}  # end -> function -> reward
        for function, number in enumerate(numbers):
            if math.isnan(number):
                continue
            for end, value in completion.steps.get(function, [(completion.tokens, number)]):
                at_end = by_end.setdefault(end, {})
                at_end[function] = at_end.get(function, 0.0) + value
        has_reward = not all(map(math.isnan, numbers))
        last_end = max(by_end, default=-1)
        if cover and has_reward and last_end < completion.sampled_end:
            by_end[completion.sampled_end] = {0: 0.0}  # any function will do
        rows.append(sorted(by_end.items()))

    functions = scalars.size(1)
    width = max(map(len, rows), default=0)
    width = max(width, 1)
    ends: list[int] = []
    rewards: list[list[float]] = []  # (N · S, K) by function
    for row in rows:
        for end, at_end in row:
            ends.append(end)
            rewards.append([at_end.get(function, math.nan) for function in range(functions)])
        for _ in range(width - len(row)):
            ends.append(_NO_STEP)
            rewards.append([math.nan] * functions)
    # sum as TRL does: function by function, in its dtype
    totals = total_rewards(scalars.new_tensor(rewards), weights)
    all_ends = torch.tensor(ends, device=scalars.device)
    size = (len(rows), width)
    return StepTable(totals.view(size), all_ends.view(size), is_rewarded)
