"""What a reward function returned, checked before TRL takes it for numbers."""

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
    """Return the rewards of a function as a list, one for each completion: numbers, None or `StepRewards`.

    Raises:
        ValueError: naming the function, what it returned and what to return.
    """
    if inspect.iscoroutine(returned):
        returned.close()  # nobody will await it
        raise ValueError(
            f"reward function {name!r} returned {returned!r}. Use async def for the function itself, so that TRL "
            "awaits it."
        )
    if isinstance(returned, StepRewards | Mapping | str | bytes | set) or not isinstance(returned, Iterable):
        raise ValueError(
            f"reward function {name!r} returned {reprlib.repr(returned)}. Return a list, one for each completion."
        )
    # a tensor or an array at once: on a GPU each item would be a transfer of its own
    rewards: list[Any] = list(getattr(returned, "tolist", lambda: returned)())
    rewards = [each.item() if isinstance(each, Tensor) and each.ndim == 0 else each for each in rewards]
    for completion, reward in enumerate(rewards):
        if reward is not None and not isinstance(reward, StepRewards) and not _is_number(reward):
            raise ValueError(
                f"reward function {name!r} returned {reprlib.repr(reward)} for completion {completion}. Return a "
                "float, None, or for steps StepRewards(values, ends), StepRewards.per_turn(values), or a splitter's "
                "Steps with .rewards(values)."
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
    """Whether a number among the rewards is NaN."""
    return any(not isinstance(reward, StepRewards | None) and math.isnan(reward) for reward in rewards)


def refuse_infinite(names: Sequence[str], rewards: Tensor, count: int) -> None:
    """Refuse rewards that are infinite, after float32 if not before.

    Args:
        names: (K,) of the reward functions.
        rewards: (N, K) of all processes, the same on each, so that all of them raise.
        count: completions of one process.

    Raises:
        ValueError: naming the function and the completion, by its index on its process.
    """
    infinite = rewards.isinf()
    if not infinite.any():
        return
    row, function = infinite.nonzero()[0].tolist()
    process = f" of process {row // count}" if len(rewards) > count else ""
    raise ValueError(
        f"reward function {names[function]!r} returned {rewards[row, function].item()} for completion {row % count}"
        f"{process}, in float32. Return a finite number, or None for no reward."
    )
