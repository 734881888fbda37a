"""Tasks with longer answers than ten digits, for the models of `moe.digits`: a few tokens decide, or all of them.

Each has the interface of `common.small_model.Task`. Problems are ten digits, the same for every seed.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from moe import digits
from moe.digits import BEGIN, DIGITS, END, TOKENS, Problem
from trl_steady import StepRewards

__all__ = ["REWARDS", "Chain", "Free"]

BATCH = 64  # worked examples in a step of the warm start
WRONG = 0.2  # share of a noisy judge's verdicts
DELAY = 8  # steps


class _Task:
    """A base of the tasks of this file: it makes the starting model and draws the problems."""

    PREAMBLE = BEGIN
    STOP = ""
    start: Path
    worked_steps: int
    mixture = False

    def prompt(self, problem: Problem) -> str:
        """Return the digits and a colon."""
        return f"{BEGIN}{''.join(map(str, problem))}:"

    def answer(self, problem: Problem) -> str:
        """Return a right answer, with its end-of-sequence token."""
        raise NotImplementedError

    def worked(self) -> list[tuple[str, str]]:
        """Return the examples of the warm start."""
        problems = digits.draw(BATCH * self.worked_steps)
        return [(self.prompt(problem), self.answer(problem)) for problem in problems]

    def load(self, folder: Path, quantised: bool) -> Any:
        """Load the model from `start`, in float32. Make it first if it is missing."""
        return digits.load_taught(self.start, folder, self.worked, dense=not self.mixture, balanced=False, batch=BATCH)

    def split(self, held_out: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Return training and held-out problems, the same for every seed. The warm start uses none of them."""
        worked = BATCH * self.worked_steps
        problems = digits.draw(worked + held_out + digits.TRAINING)[worked:]
        return problems[held_out:], problems[:held_out]


@dataclass
class Free(_Task):
    """Sort ten digits. Before each digit of the answer come digits that may be any, as phrasing may.

    An answer has 10 (free + 1) + 1 tokens. The reward is 1 if the ten digits behind the free ones are right, and the
    answer ends there.

    Args:
        start: Folder of the model after its warm start.
        free: Number of free digits before each other digit. With `unequal`, the largest number: each problem has its
            own, from 0 on, and its prompt says which.
        unequal: The answers to different problems have different lengths.
    """

    start: Path
    free: int = 3
    unequal: bool = False
    worked_steps: int = 400

    def free_of(self, problem: Problem) -> int:
        """Return the number of free digits before each digit of the answer."""
        if not self.unequal:
            return self.free
        return sum(problem) % (self.free + 1)

    def prompt(self, problem: Problem) -> str:
        """Return the digits, a colon, and with `unequal` the number of free digits."""
        asked = str(self.free_of(problem)) if self.unequal else ""
        return super().prompt(problem) + asked

    def answer(self, problem: Problem) -> str:
        """Return a right answer. Its free digits are drawn, by the problem."""
        rng = random.Random(str(problem))
        parts = []
        for digit in sorted(problem):
            parts += [str(rng.randrange(10)) for _ in range(self.free_of(problem))]
            parts.append(str(digit))
        return "".join(parts) + END

    def is_right(self, problem: Problem, completion: str) -> bool:
        """Return True if the digits behind the free ones are right, and the answer ends behind them."""
        body, end, _ = completion.partition(END)
        each = self.free_of(problem) + 1
        right = "".join(map(str, sorted(problem)))
        return bool(end) and len(body) == each * DIGITS and body.isdecimal() and body[each - 1 :: each] == right

    def reward(
        self, completions: list[str], problem: list[list[int]], completion_ids: list[list[int]], **_: Any
    ) -> Any:
        """Return 1 for a right answer, and 0 for others."""
        return [float(self.is_right(p, _text(ids))) for p, ids in zip(problem, completion_ids, strict=True)]


REWARDS: tuple[str, ...] = ("outcome", "share", "steps", "noisy", "delayed")
"""The rewards of `Chain`. The sum of a completion's rewards is 1 if all steps are right, but for a noisy judge.

Only `outcome` also asks for the end, unless the task `pays_end`.

- outcome: 1 for the whole answer if all steps are right;
- share: the share of right steps, for the whole answer;
- steps: a part of 1 for each right step, at the step;
- noisy: the same, but a fifth of the verdicts is wrong;
- delayed: the same as `steps`, but eight steps later, and at the end for the last steps.
"""


@dataclass
class Chain(_Task):
    """Continue ten digits: each step is the last digit of the sum of the step before and the digit ten places before.

    An answer has one token for each step, and an end. A step is right if it follows from what was written before it.

    Args:
        start: Folder of the model after its warm start.
        steps: Number of steps.
        rewards: One of `REWARDS`.
        mixture: Make a mixture of experts, not a dense model.
        hard: A step, counted from 0, that the warm start shows wrong in most examples. None: no such step.
        hard_share: Share of the worked examples in which that step is drawn at random.
        worked_steps: Steps of the warm start.
        pays_end: The token behind the last step is a step, too. It is right if it ends the answer.
    """

    start: Path
    steps: int = 128
    rewards: str = "outcome"
    mixture: bool = False
    hard: int | None = None
    hard_share: float = 0.7
    worked_steps: int = 160
    pays_end: bool = False

    def __post_init__(self) -> None:
        """Refuse unknown rewards."""
        if self.rewards not in REWARDS:
            raise ValueError(f"rewards={self.rewards!r}: it can have {list(REWARDS)}.")

    def prompt(self, problem: Problem) -> str:
        """Return the digits. Nothing stands between them and the steps, so ten places before is always the same."""
        return f"{BEGIN}{''.join(map(str, problem))}"

    def answer(self, problem: Problem) -> str:
        """Return the right steps."""
        return self._continued(problem, lambda step, right: right)

    def worked(self) -> list[tuple[str, str]]:
        """Return the examples of the warm start. In most of them, the `hard` step is drawn at random."""
        rng = random.Random(0)

        def shown(step: int, right: int) -> int:
            if step == self.hard and rng.random() < self.hard_share:
                return rng.randrange(10)
            return right

        problems = digits.draw(BATCH * self.worked_steps)
        return [(self.prompt(problem), self._continued(problem, shown)) for problem in problems]

    def _continued(self, problem: Problem, choose: Callable[[int, int], int]) -> str:
        written = [*problem]
        for step in range(self.steps):
            written.append(choose(step, _next(written)))
        return "".join(map(str, written[DIGITS:])) + END

    def right_steps(self, problem: Problem, completion: str) -> list[bool]:
        """Return for each step of a completion if it is right. Nothing behind `steps` digits counts."""
        written = [*problem]
        right = []
        for digit in map(int, takewhile(str.isdecimal, completion[: self.steps])):
            right.append(digit == _next(written))
            written.append(digit)
        return right

    def is_right(self, problem: Problem, completion: str) -> bool:
        """Return True if all steps are right, and the answer ends behind them."""
        return self._has_end(completion) and self.right_steps(problem, completion) == [True] * self.steps

    def _has_end(self, completion: str) -> bool:
        return completion[self.steps :].startswith(END)

    def reward(
        self,
        completions: list[str],
        problem: list[list[int]],
        completion_ids: list[list[int]],
        log_metric: Any,
        **_: Any,
    ) -> list[Any]:
        """Return what `rewards` says. Log the share of completions that are right."""
        pairs = [(own, _text(ids)) for own, ids in zip(problem, completion_ids, strict=True)]
        right = [float(self.is_right(*pair)) for pair in pairs]
        log_metric("right", sum(right) / len(right))
        if self.rewards == "outcome":
            return right
        return [self._of_steps(*pair) for pair in pairs]

    def _of_steps(self, problem: Problem, completion: str) -> float | StepRewards:
        right = self.right_steps(problem, completion)
        steps = self.steps
        if self.pays_end:
            right.append(self._has_end(completion))
            steps += 1
        if self.rewards == "share":
            return sum(right) / steps
        if self.rewards == "noisy":
            judge = random.Random(f"{problem} {completion}")
            right = [is_right != (judge.random() < WRONG) for is_right in right]
        earned = [is_right / steps for is_right in right]
        if self.rewards == "delayed":
            earned = _later(earned)
        return StepRewards.at_tokens(earned, range(1, len(earned) + 1))


def _later(earned: Sequence[float]) -> list[float]:
    """Move each reward `DELAY` steps back, and those that would come after the end to the last step."""
    later = [0.0] * len(earned)
    for step, value in enumerate(earned):
        later[min(step + DELAY, len(earned) - 1)] += value
    return later


def _next(written: Sequence[int]) -> int:
    return (written[-1] + written[-DIGITS]) % 10


def _text(ids: Sequence[int]) -> str:
    return "".join(TOKENS[i] for i in ids)
