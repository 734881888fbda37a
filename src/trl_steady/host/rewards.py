"""Access to the return values of reward functions, and to the advantages in TRL's table of completions."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from trl.trainer.utils import is_async_callable

from trl_steady.host.checkpoints import CheckpointingTrainer
from trl_steady.host.names import overridden

__all__ = ["RewardedTrainer"]


class RewardedTrainer(CheckpointingTrainer):
    """`trl.GRPOTrainer` with a hook that converts the return values of reward functions before TRL reads them."""

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: list[Any], completion_ids_list: list[list[int]]
    ) -> Tensor:
        functions: list[Any] = [
            function
            if isinstance(function, torch.nn.Module)  # TRL reads the logits of a reward model itself
            else _then(cast(Callable[..., Any], function), functools.partial(self.read_rewards, index))
            for index, function in enumerate(self.reward_funcs)
        ]
        with overridden(self, {"reward_funcs": functions}):
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self.keep_rewards(rewards, completions, completion_ids_list)
        return rewards

    def read_rewards(self, function: int, returned: Sequence[Any]) -> Sequence[Any]:
        """Return the rewards that TRL gets from reward function number `function`, for this process's completions."""
        return returned

    def keep_rewards(self, rewards: Tensor, completions: list[Any], completion_ids: list[list[int]]) -> None:
        """Process the rewards (N, K) of all processes and the completions of this process, before TRL logs them."""

    def relog_rollout(
        self, count: int, advantages: Sequence[float] | None, columns: Mapping[str, Sequence[Any]]
    ) -> None:
        """Change the rows of the last rollout in the table of completions.

        Args:
            count: Number of completions of the rollout, over all processes.
            advantages: (count,) values that replace TRL's; None keeps TRL's.
            columns: name -> (count,) values of an additional column. A new column with only None is not added.
        """
        if advantages is not None:
            column = self._logs["advantages"]
            for _ in range(min(count, len(column))):
                column.pop()
            column.extend(advantages)
        for name, values in columns.items():
            if name not in self._logs["extra"] and all(value is None for value in values):
                continue
            column = self._logs["extra"][name]
            # every column of TRL's table must be as long as the column of prompts
            column.extend([None] * (len(self._logs["prompt"]) - count - len(column)))
            column.extend(values)


def _then(function: Callable[..., Any], read: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a function that applies `read` to the result of `function`; it is async if `function` is."""

    async def reading_later(*arguments: Any, **keywords: Any) -> Any:
        return read(await function(*arguments, **keywords))

    def reading(*arguments: Any, **keywords: Any) -> Any:
        return read(function(*arguments, **keywords))

    return reading_later if is_async_callable(function) else reading
