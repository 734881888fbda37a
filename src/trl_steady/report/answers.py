"""Examples of rollouts: the best, the median and the worst answer of some groups."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

GROUPS = 3
"""Groups of a rollout that are kept, those whose rewards differ most."""
MOST_BYTES = 1_000_000
"""Size of the examples of a run. The oldest are dropped first."""


def chosen(rewards: np.ndarray, size: int) -> list[dict[int, str]]:
    """Return the answers of a rollout to keep: for each group, row -> "best", "median" or "worst".

    Args:
        rewards: (B,) rewards.
        size: Answers to a prompt, which are consecutive. With 1, they are compared with those to other prompts.
    """
    is_single, size = size == 1, min(size, len(rewards)) if size > 1 else len(rewards)
    groups = np.nan_to_num(rewards)[: len(rewards) // size * size].reshape(-1, size)
    found: list[dict[int, str]] = []
    for group in np.argsort(-np.ptp(groups, axis=1), kind="stable")[:GROUPS]:
        order = (group * size + np.argsort(-groups[group], kind="stable")).tolist()
        found.append({order[0]: "best", order[size // 2]: "median", order[-1]: "worst"} | {order[0]: "best"})
    return [{row: place} for group in found for row, place in group.items()] if is_single else found


def limited(rollouts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the last of these rollouts that take at most `MOST_BYTES` together."""
    sizes = np.cumsum([len(json.dumps(rollout)) for rollout in reversed(rollouts)])
    return list(rollouts[len(rollouts) - int((sizes <= MOST_BYTES).sum()) :])
