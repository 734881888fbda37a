"""Reward functions for TRL that score the steps of completions with any callable."""

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from trl_steady.rewards.splitters import Splitter, Steps
from trl_steady.rewards.steps import StepRewards

Rewards = list[StepRewards | None]


def scored_steps(
    scorer: Callable[..., Any], splitter: Splitter, *, name: str | None = None
) -> Callable[..., Rewards] | Callable[..., Awaitable[Rewards]]:
    """Return a reward function that splits completions into steps and scores all steps in one call.

    It is async if the scorer is async.

    Args:
        scorer: Called with keyword arguments: `prompts` (B,), `steps` (B,) lists of texts, `completions` (B,), and
            everything else that TRL passes to reward functions except a dataset column named `steps`. For each
            completion, it returns one score per step, or None for no reward.
        splitter: Splits a completion into steps, for example `by_blank_line()`.
        name: Name under which TRL logs the reward. Default: the scorer's name.

    >>> from trl_steady.rewards import by_regex
    >>> lengths = scored_steps(lambda prompts, steps, **_: [[len(s) for s in row] for row in steps], by_regex("\\n"))
    >>> lengths(prompts=["?"], completions=["a\\nbcd"])[0].values
    (2.0, 3.0)
    """

    def ask(completions: Sequence[Any], columns: dict[str, Any]) -> tuple[list[Steps], Any]:
        split = [splitter(completion) for completion in completions]
        texts = [list(steps.texts) for steps in split]
        arguments = {**columns, "completions": completions, "steps": texts}
        return split, scorer(**arguments)

    def fit(split: list[Steps], scores: Iterable[Sequence[float] | None]) -> Rewards:
        rewards: Rewards = []
        for steps, values in zip(split, scores, strict=True):
            if values is None:
                rewards.append(None)
            else:
                rewards.append(steps.rewards(values))
        return rewards

    async def later(completions: Sequence[Any], **columns: Any) -> Rewards:
        split, scores = ask(completions, columns)
        return fit(split, await scores)

    def now(completions: Sequence[Any], **columns: Any) -> Rewards:
        split, scores = ask(completions, columns)
        return fit(split, scores)

    function = scorer
    while isinstance(function, functools.partial):  # as TRL does
        function = function.func
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    reward = later if is_async else now
    reward.__name__ = name or getattr(function, "__name__", type(function).__name__)
    return reward
