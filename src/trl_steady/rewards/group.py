"""The wrapper for a reward function that judges all completions of one prompt together.

`features/group_rewards.py` calls it.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any


class GroupReward:
    """A reward function that gets all completions of one prompt at once, for example to rank them.

    Put it into `reward_funcs` of a trainer of trl-steady: `GRPOTrainer(..., reward_funcs=GroupReward(rank))`. The
    trainer calls the function once for each group, also if several processes have members of it.

    Args:
        function: TRL calls it like any reward function, with the rows of one group: G `prompts`, `completions`,
            `completion_ids`, values of each column. It returns G rewards: numbers, `StepRewards`, or None for no
            reward. If it is async, it runs for all groups of a process at once.

    Raises:
        ValueError: `function` cannot be called.

    >>> @GroupReward
    ... def shortest(completion_ids, **_):
    ...     least = min(map(len, completion_ids))
    ...     return [float(len(ids) == least) for ids in completion_ids]
    >>> shortest.__name__  # TRL logs rewards/shortest/mean
    'shortest'
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        if not callable(function):
            raise ValueError(
                f"GroupReward({function!r}) has no function. Give one that rewards a group's completions."
            )
        self.function = function
        named = function
        while isinstance(named, functools.partial):
            named = named.func
        self.__name__ = getattr(named, "__name__", type(named).__name__)  # as TRL names reward functions
        with contextlib.suppress(Exception):  # the check of columns reads what the function asks for
            self.__signature__ = inspect.signature(function, follow_wrapped=False)
        self.judge: Callable[[Mapping[str, Any]], list[Any]] | None = None
        """Returns the rewards of a process's completions. A trainer sets it for each rollout."""

    def __call__(self, **arguments: Any) -> list[Any]:
        """Return a reward for each completion of this process. Raises ValueError in a trainer of TRL."""
        if self.judge is None:
            raise ValueError(
                f"GroupReward({self.__name__}) judges in rollouts of trl-steady's trainers. Import the trainer from "
                "trl_steady, and call super() in overrides of its rollout."
            )
        return self.judge(arguments)
