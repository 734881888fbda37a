"""Evaluations: metrics that no reward touches, a sampling of their own, and no trace in the training."""

import math
import random
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from accelerate.utils import gather_object
from torch import Tensor

from trl_steady.config.evaluation import Functions
from trl_steady.config.shared import SharedOptions
from trl_steady.core.feature import Feature
from trl_steady.core.types import Evaluation
from trl_steady.features.reward_model.reward_function import RewardAdapter
from trl_steady.functional.answers import maj_at_k, pass_at_k
from trl_steady.rewards.group import GroupReward
from trl_steady.rewards.steps import StepRewards
from trl_steady.trl_bridge.evaluation import call_as_rewards, sample_as
from trl_steady.trl_bridge.models import keep_random_state
from trl_steady.trl_bridge.rewards import group_size

_Judged = tuple[float | None, Hashable | None]
"""A metric of a completion, None if it does not apply, and the completion's answer, None without one."""
_RIGHT = object()
"""Stands for all right answers to a problem, which may be written in several ways."""


class Evaluations(Feature):
    """Judges the completions of evaluations with `eval_metrics`, and samples them with `eval_generation`."""

    args: SharedOptions
    _rows: list[tuple[_Judged, ...]] | None = None
    """The functions' results for each completion of all processes, while an evaluation runs."""

    def on_init_end(self) -> None:
        """Refuse rewards of ours that only a rollout can compute. They would fail in the first evaluation."""
        metrics = self.args.eval_metrics or Functions()
        assert isinstance(metrics, Functions)
        for metric in metrics:
            if isinstance(metric, GroupReward | RewardAdapter):
                why = f"a {type(metric).__name__} is no function of completions alone"
                self.refuse(
                    f"eval_metrics={metrics!r}", why, "Put it into reward_funcs: evaluations log its rewards too."
                )

    def around_evaluation(self, evaluation: Evaluation, call_next: Callable[[Evaluation], Any]) -> Any:
        """Evaluate with the sampling of evaluations, and restore the random state of the training."""
        if not self.args.evaluates_apart:
            return call_next(evaluation)
        sampling = self.args.eval_generation or {}
        assert not isinstance(sampling, str)  # parsed by transformers.TrainingArguments
        self._rows = []
        try:
            with _random_states_kept(), sample_as(self.trainer, sampling):
                output = call_next(evaluation)
            self._log(self._rows[: evaluation.rows])
        finally:
            self._rows = None
        return output

    def on_rewards(self, rewards: Tensor, completions: list[Any], completion_ids: list[list[int]]) -> None:
        """Judge the completions of a batch, and gather what all processes have found."""
        metrics = self.args.eval_metrics
        rollout = self.trainer.rollout_in_progress
        if self._rows is None or not metrics or rollout is None:
            return
        assert isinstance(metrics, Functions)
        judged = call_as_rewards(self.trainer, metrics, metrics.names, rollout, completion_ids, _judged)
        self._rows += gather_object(list(zip(*judged, strict=True)))

    def _log(self, rows: Sequence[tuple[_Judged, ...]]) -> None:
        """Hand the metrics of all rows to TRL, which logs them. Each process has all rows."""
        metrics = self.args.eval_metrics or Functions()
        assert isinstance(metrics, Functions)
        logged = self.trainer.logged_values["eval"]
        size = group_size(self.trainer)
        for number, name in enumerate(metrics.names):
            column = [row[number] for row in rows]
            logged[name] = [_mean([value for value, _ in column if value is not None])]
            groups = [column[start : start + size] for start in range(0, len(column), size)]
            for estimate, value in _estimates(groups, size).items():
                logged[f"{name}/{estimate}"] = [value]


@contextmanager
def _random_states_kept() -> Generator[None]:
    """Restore the random state of Python, NumPy and torch at the end of this context."""
    python = random.getstate()
    arrays = np.random.get_state()
    with keep_random_state():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)


def _judged(returned: Any) -> _Judged:
    """Return the number and the answer that a function has returned for a completion. NaN is None, as in TRL.

    Steps are worth their sum, as in the log of rewards.
    """
    answer: Hashable | None = None
    if isinstance(returned, tuple):
        returned, answer = returned
    if isinstance(returned, StepRewards):
        returned = math.fsum(returned.values)
    if returned is None or math.isnan(returned):
        return None, None
    return float(returned), answer


def _mean(values: Sequence[float]) -> float:
    """Return the mean, or NaN, which TRL logs as None, of no values."""
    if not values:
        return math.nan
    return math.fsum(values) / len(values)


def _estimates(groups: Sequence[Sequence[_Judged]], size: int) -> dict[str, float]:
    """Return pass@k, and maj@k if there are answers, of the groups of several prompts, for k = 1, 2, 4 and so on.

    There are none of a metric whose values are not all 0 or 1.
    """
    judged = [[pair for pair in group if pair[0] is not None] for group in groups]
    pairs = [pair for group in judged for pair in group]
    if size == 1 or not {value for value, _ in pairs} <= {0.0, 1.0}:
        return {}
    has_answers = any(answer is not None for _, answer in pairs)
    found: dict[str, float] = {}
    k = 1
    while k <= size:
        large = [group for group in judged if len(group) >= k]
        rights = [[value == 1 for value, _ in group] for group in large]
        found[f"pass@{k}"] = _mean([pass_at_k(group, True, k) for group in rights])
        if has_answers:
            found[f"maj@{k}"] = _mean([maj_at_k(_votes(group), _RIGHT, k) for group in large])
        k *= 2
    return found


def _votes(group: Sequence[_Judged]) -> list[Hashable | None]:
    """Return the answers of a group, with one answer for all right ones."""
    votes: list[Hashable | None] = []
    for value, answer in group:
        is_right = value == 1 and answer is not None
        votes.append(_RIGHT if is_right else answer)
    return votes
