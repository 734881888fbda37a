"""Trainers with dynamic sampling that keep what each round gave, and a rollout made of it by hand."""

import itertools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import trl
from torch import Tensor

import trl_steady
from tests.oracles.trust_regions import variance_filter
from tests.tools import tiny

SIZE = 4
PREFIX = "dynamic_sampling/"


def number(prompt: str) -> int:
    """The number of a row of `tiny.dataset`, which its prompt begins with."""
    return int(prompt.strip("ab").split("+")[0])


def planted(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Equal for the prompts with an even number."""
    rewards = tiny.reward(completion_ids)
    return [value if number(prompt) % 2 else 1.0 for prompt, value in zip(prompts, rewards, strict=True)]


def second(completion_ids: list[list[int]], log_extra: Any, log_metric: Any, **_: Any) -> list[float | None]:
    """Return None for some. It logs too."""
    log_extra("length", [len(ids) for ids in completion_ids])
    log_metric("longest", max(map(len, completion_ids)))
    return [None if sum(ids) % 3 == 0 else float(len(ids)) for ids in completion_ids]


def everything(rewards: torch.Tensor, rows: list[dict[str, Any]]) -> bool:
    """The filter that keeps every group. At the top level, so that it can be saved."""
    return True


class Answer(NamedTuple):
    prompt: str
    ids: tuple[int, ...]
    reward: Any


class Rollout(NamedTuple):
    rounds: list[list[Answer]]
    weights: dict[str, Tensor]
    samples: dict[str, Any]


class Watched:
    """A mixin that keeps the rounds of each rollout, as the reward function sees them, and what became of them."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self.rollouts: list[Rollout] = []
        self.rounds: list[list[Answer]] = []
        super().__init__(*arguments, **keywords)

    def _generate_and_score_completions(self: Any, inputs: Any) -> dict[str, Any]:
        self.rounds = []
        weights = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        samples = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        self.rollouts.append(Rollout(self.rounds, weights, dict(samples)))
        return samples

    def watch(self, function: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        def reward(prompts: Any, completion_ids: Any, **columns: Any) -> list[Any]:
            rewards = function(prompts=prompts, completion_ids=completion_ids, **columns)
            each = zip(prompts, map(tuple, completion_ids), rewards, strict=True)
            self.rounds.append([Answer(*values) for values in each])
            return rewards

        return reward


def build(
    model: Any, output: Path, method: str = "GRPO", reward: Any = planted, keywords: Any = None, **options: Any
) -> Any:
    """A trainer with the option, whose batches of 16 have 4 groups."""
    config = getattr(trl_steady, f"{method}Config")
    args: Any = tiny.arguments(config, output, **{"dynamic_sampling": True, **options})
    given = {"train_dataset": tiny.dataset(), "processing_class": tiny.tokenizer(), **(keywords or {})}
    model = str(model) if isinstance(model, Path) else model
    kind: Any = type(method, (Watched, getattr(trl_steady, f"{method}Trainer")), {})
    trainer = kind(model, reward, args, **given)
    trainer.reward_funcs[0] = trainer.watch(trainer.reward_funcs[0])
    return trainer


def groups(answers: Sequence[Any]) -> list[list[Any]]:
    return [list(answers[start : start + SIZE]) for start in range(0, len(answers), SIZE)]


def differs(group: Sequence[Answer]) -> bool:
    return len({answer.reward for answer in group}) > 1


def of_large_variance(first: Sequence[Sequence[Answer]]) -> Callable[[Sequence[Answer]], bool]:
    """RAGEN-2's filter, from a rollout's first round: later groups need the least variance that stays in it."""
    rewards = [answer.reward for group in first for answer in group]
    kept = itertools.compress(first, variance_filter(rewards, len(first[0])))
    least = min(map(variance, kept), default=1e-9)
    return lambda group: variance(group) >= least * (1 - 1e-6)


def variance(group: Sequence[Answer]) -> float:
    return statistics.pvariance([answer.reward for answer in group])


def chosen(rounds: Sequence[Sequence[Answer]], keeps: Callable[[list[Answer]], bool] = differs) -> list[list[Answer]]:
    """The groups of a rollout: those of the first round, the rejected ones replaced by later ones in their order."""
    first, later = groups(rounds[0]), [group for answers in rounds[1:] for group in groups(answers) if keeps(group)]
    return [group if keeps(group) or not later else later.pop(0) for group in first]


def sequences(samples: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    """The prompt and the completion of each sample."""
    tokenizer = tiny.tokenizer()
    columns = (samples[f"{of}_{what}"] for of in ("prompt", "completion") for what in ("ids", "mask"))
    return [
        (tokenizer.decode(prompt[is_prompt.bool()]), tuple(ids[is_token.bool()].tolist()))
        for prompt, is_prompt, ids, is_token in zip(*columns, strict=True)
    ]


def metric(trainer: trl.GRPOTrainer, name: str) -> list[float]:
    return [row[name] for row in trainer.state.log_history if name in row]
