"""Check what reward functions return before TRL converts it to numbers."""

import inspect
import math
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from trl_steady.rewards.splitters import Steps
from trl_steady.rewards.steps import StepRewards

__all__ = ["as_rewards", "has_nan", "refuse_infinite"]


def as_rewards(name: str, returned: Any) -> list[Any]:
    """Return the rewards of a function as a list with a number, None or `StepRewards` for each completion.

    Raises:
        ValueError: the function returned something else. The message names the function, the value and what to return.
    """
    if inspect.iscoroutine(returned):
        returned.close()  # it will never be awaited
        raise ValueError(
            f"reward function {name!r} returned {returned!r}. Use async def for the function itself, so that TRL "
            "awaits it."
        )
    if isinstance(returned, StepRewards | Mapping | str | bytes | set) or not isinstance(returned, Iterable):
        raise ValueError(
            f"reward function {name!r} returned {reprlib.repr(returned)}. Return a list with one reward for "
            "each completion."
        )
    # convert a tensor or array at once: on a GPU each item would need its own transfer
    rewards: list[Any] = list(getattr(returned, "tolist", lambda: returned)())
    rewards = [each.item() if isinstance(each, Tensor) and each.ndim == 0 else each for each in rewards]
    for completion, reward in enumerate(rewards):
        if reward is not None and not isinstance(reward, StepRewards) and not _is_number(reward):
            raise ValueError(
                f"reward function {name!r} returned {reprlib.repr(reward)} for completion {completion}. Return a "
                "float or None. For step rewards return StepRewards(values, ends), StepRewards.per_turn(values) or, "
                "for a splitter's Steps, steps.rewards(values)."
            )
    return rewards


def _is_number(reward: Any) -> bool:
    if isinstance(reward, str | bytes | Steps) or getattr(reward, "ndim", 0):
        return False
    try:
        float(reward)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def has_nan(rewards: Iterable[Any]) -> bool:
    """Return whether any of the rewards that are numbers is NaN."""
    return any(not isinstance(reward, StepRewards | None) and math.isnan(reward) for reward in rewards)


def refuse_infinite(names: Sequence[str], rewards: Tensor, count: int) -> None:
    """Raise on rewards that are infinite, or become infinite in float32.

    Args:
        names: (K,) names of the reward functions.
        rewards: (N, K) rewards of all processes, the same on each process, so that all of them raise.
        count: Completions per process.

    Raises:
        ValueError: a reward is infinite. The message names the function and the completion, by its index on its
            process.
    """
    infinite = rewards.isinf()
    if not infinite.any():
        return
    row, function = infinite.nonzero()[0].tolist()
    process = f" of process {row // count}" if len(rewards) > count else ""
    raise ValueError(
        f"reward function {names[function]!r} returned {rewards[row, function].item()} for completion {row % count}"
        f"{process}, after conversion to float32. Return a finite number, or None for no reward."
    )
