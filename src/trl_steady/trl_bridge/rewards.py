"""The rewards of a rollout: what TRL's reward functions return, and which groups of them are equal.

This file knows TRL's method for rewards, and how its advantages compare those of a group.
"""

import asyncio
import atexit
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from trl.trainer.utils import is_async_callable, shutdown_event_loop_in_daemon, start_event_loop_in_daemon

from trl_steady.core.feature import Trainer
from trl_steady.core.processes import own_rows
from trl_steady.core.types import Rollout
from trl_steady.functional.advantages import all_equal, total_rewards
from trl_steady.trl_bridge.patching import patched
from trl_steady.trl_bridge.trl_state import as_trl_trainer, trl_class


def wrap_reward_functions(functions: Sequence[Any], processors: Sequence[Callable[[int, Any], Any]]) -> list[Any]:
    """Return reward functions whose results pass through all `processors`.

    A processor gets the number of the function and its result, and returns the result for the next one. TRL reads the
    logits of a reward model (`torch.nn.Module`) itself, so these are returned as they are.
    """

    def wrap(number: int, function: Callable[..., Any]) -> Callable[..., Any]:
        def process(returned: object) -> object:
            for processor in processors:
                returned = processor(number, returned)
            return returned

        async def call_async(*arguments: object, **keywords: object) -> Any:
            return process(await function(*arguments, **keywords))

        def call(*arguments: object, **keywords: object) -> Any:
            return process(function(*arguments, **keywords))

        return call_async if is_async_callable(function) else call

    wrapped: list[Any] = []
    for number, function in enumerate(functions):
        is_model = isinstance(function, torch.nn.Module)
        wrapped.append(function if is_model else wrap(number, function))
    return wrapped


def read_rewards(
    trainer: Trainer, read: Callable[[Tensor, list[Any], list[list[int]]], None]
) -> AbstractContextManager[None]:
    """Call `read` with the rewards that TRL's rollout gets, the completions and their token ids."""
    calculate = as_trl_trainer(trainer)._calculate_rewards
    pending = as_trl_trainer(trainer)._pending_extra_logs

    def calculate_and_read(
        inputs: object, prompts: list[Any], completions: list[Any], ids: list[Any], *args: object, **kwargs: object
    ) -> Tensor:
        sampled = [list(row) for row in ids]  # what is trained, also if a reward function changes its arguments
        rewards = calculate(inputs, prompts, completions, ids, *args, **kwargs)
        if trainer.rollout_in_progress is not None:
            give_rewards(trainer, trainer.rollout_in_progress, rewards, prompts, completions)
        read(rewards, completions, sampled)
        table = as_trl_trainer(trainer)._logs
        for column in pending:
            if column not in table["extra"]:  # as when an evaluation adds one: TRL needs columns of one length
                table["extra"][column].extend([None] * len(table["prompt"]))
        for column in table["extra"]:  # TRL would show earlier values beside these completions
            pending[column] = pending[column] or [None] * len(prompts)
        return rewards

    return patched(trainer, {"_calculate_rewards": calculate_and_read})  # around a subclass's, which may change them


def with_exact_zeros(trainer: Trainer, run_rollout: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return TRL's samples, with advantages of exactly 0 in groups of equal rewards.

    TRL's mean and standard deviation of equal rewards may round. First, while TRL runs, the deviation of such rewards
    is made exactly 0, or infinite where TRL divides by it. Then their advantages, from which TRL has subtracted the
    mean, are set to 0.
    """
    module = sys.modules[trl_class(trainer).__module__]
    deviation, compared = module.nanstd, list[Tensor]()

    def exact(values: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
        compared.append(values)
        std = deviation(values, dim, keepdim)
        is_equal = all_equal(values, dim, keepdim=keepdim)
        if keepdim:  # in normalize_then_sum only. TRL divides by the deviation there, and infinity leaves exactly 0
            return std.masked_fill(is_equal, torch.inf)
        return std * ~is_equal

    # nanstd is the function to patch. TRL logs and divides by its result, and no other function sees the rewards that
    # TRL compares: with weights, clips and RLOO's KL.
    with patched(module, {"nanstd": exact}):
        samples = run_rollout()
    size = group_size(trainer)
    # (J, G, K) to normalise each function, or all rewards in any shape
    groups = compared[0]
    if groups.dim() != 3:
        groups = groups.reshape(-1, size, 1)
    is_equal = all_equal(groups, 1).all(-1).repeat_interleave(size)
    rows = own_rows(trainer.accelerator, len(samples["advantages"]))
    samples["advantages"] = samples["advantages"].masked_fill(is_equal[rows], 0.0)
    return samples


def give_rewards(
    trainer: Trainer, rollout: Rollout, rewards: Tensor, prompts: list[Any], completions: list[Any]
) -> None:
    """Give a rollout this process's completions, and the rewards it needs of those (N, K) of all processes."""
    size = group_size(trainer)
    rows = own_rows(trainer.accelerator, len(prompts))
    totals = total_rewards(rewards, trainer.reward_weights)
    groups = totals.view(-1, size)
    group_of_row = torch.arange(rows.start, rows.stop, device=rewards.device) // size
    rollout.prompts, rollout.completions = prompts, completions
    # copies, because views would keep those of all processes
    rollout.rewards_by_function = rewards[rows].clone()
    rollout.rewards = totals[rows].clone()
    rollout.group_rewards = groups[group_of_row]


def group_size(trainer: Trainer) -> int:
    """Return the number of completions of a prompt, in training or in an evaluation."""
    if trainer.model.training:
        return trainer.num_generations
    return as_trl_trainer(trainer).num_generations_eval


def run_async(trainer: Trainer, coroutines: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines at once, and wait for all.

    They run on the loop of TRL's async reward functions, which may have the same clients.
    """

    async def run_all() -> None:
        await asyncio.gather(*coroutines)

    start_async_loop(trainer)
    asyncio.run_coroutine_threadsafe(run_all(), as_trl_trainer(trainer).async_loop).result()


def start_async_loop(trainer: Trainer) -> None:
    """Start the loop that runs async reward functions, unless TRL has started it for those of its own."""
    if hasattr(trainer, "async_loop"):
        return
    thread, loop, is_running = start_event_loop_in_daemon(name="trl-steady-rewards")
    is_running.wait()
    atexit.register(shutdown_event_loop_in_daemon, thread, loop)
    as_trl_trainer(trainer).async_loop = loop
