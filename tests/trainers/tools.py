"""Rollouts and rewards that several trainers' tests use."""

from typing import Any

from tests.tools import tiny
from trl_steady.rewards import StepRewards


def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """An environment's rollout: two tokens of its own in every answer, and log-probs of an engine."""
    answers = [[(7 * i + 3 * t) % 200 + 45 for t in range(4 + i % 3)] for i in range(len(prompts))]
    return {
        "prompt_ids": [trainer.processing_class(p)["input_ids"] for p in prompts],
        "completion_ids": answers,
        "logprobs": [[-3.0] * len(a) for a in answers],
        "env_mask": [[1, 0, 0, *[1] * (len(a) - 3)] for a in answers],
    }


def by_steps(completion_ids: list[list[int]], **_: Any) -> list[StepRewards]:
    return [
        StepRewards.at_tokens([float(token % 7) for token in ids], range(1, len(ids) + 1)) for ids in completion_ids
    ]


def by_prompt(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The same for all answers to about half of the prompts."""
    numbers = [sum(prompt.encode()) for prompt in prompts]
    earned = tiny.reward(completion_ids)
    return [1.0 if number % 4 < 2 else reward for number, reward in zip(numbers, earned, strict=True)]
