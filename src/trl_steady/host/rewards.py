"""Rewards as they come from the reward functions, and advantages as TRL's table of completions shows them."""

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
    """`trl.GRPOTrainer` that lets what reward functions return be read before TRL takes it for numbers."""

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: list[Any], completion_ids_list: list[list[int]]
    ) -> Tensor:
        functions: list[Any] = [
            function
            if isinstance(function, torch.nn.Module)  # whose logits TRL reads itself
            else _then(cast(Callable[..., Any], function), functools.partial(self.read_rewards, index))
            for index, function in enumerate(self.reward_funcs)
        ]
        with overridden(self, {"reward_funcs": functions}):
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self.keep_rewards(rewards, completions, completion_ids_list)
        return rewards

    def read_rewards(self, function: int, returned: Sequence[Any]) -> Sequence[Any]:
        """What TRL is to see of what the reward function of that number returned for this process's completions."""
        return returned

    def keep_rewards(self, rewards: Tensor, completions: list[Any], completion_ids: list[list[int]]) -> None:
        """Called with the rewards (N, K) of all processes and this one's completions, before TRL logs them."""

    def relog_rollout(
        self, count: int, advantages: Sequence[float] | None, columns: Mapping[str, Sequence[Any]]
    ) -> None:
        """Change what the table of completions says of the last rollout.

        Args:
            count: Completions of the rollout, over all processes.
            advantages: (count,) in place of TRL's, None to keep them.
            columns: name -> (count,) more columns; one that has nothing but None is not begun.
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
            # every column of TRL's table is as long as the prompts
            column.extend([None] * (len(self._logs["prompt"]) - count - len(column)))
            column.extend(values)


def _then(function: Callable[..., Any], read: Callable[[Any], Any]) -> Callable[..., Any]:
    """`function`, whose result goes through `read`; async if it is."""

    async def reading_later(*arguments: Any, **keywords: Any) -> Any:
        return read(await function(*arguments, **keywords))

    def reading(*arguments: Any, **keywords: Any) -> Any:
        return read(function(*arguments, **keywords))

    return reading_later if is_async_callable(function) else reading
