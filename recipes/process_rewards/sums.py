"""Adding up four numbers, a line for each sum: every line can be checked by itself; test problems are kept apart."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import smollm2
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
    """For 17, 25, 28 and 14: "17+25=42", "42+28=70" and "70+14=84", each on its line, and nothing after that."""
    total, written = problem[0], []
    for number in problem[1:]:
        written.append(f"{total}+{number}={total + number}")
        total += number
    return "\n".join(written)


def right_lines(problem: Problem, text: str) -> list[bool]:
    """Of each line of `text`, whether it is right.

    Line j is right if it is, to the character, '<result written in line j - 1>+<number j + 1>=<their sum>' and a line
    break, in the last of the lines that are asked for the end of the text. So a wrong result spoils its own line only,
    a line that is no sum also the next one, an answer that goes on after its last line has that line wrong, as has one
    that breaks off in the line where it does, and no line beyond those that are asked for is ever right.
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
    """An equal part of 1 for each right line: 1 for `answer(problem)`, less for any other text."""
    share = 1 / (len(problem) - 1)
    return lines(text).rewards([share * right for right in right_lines(problem, text)])


def outcome_reward(problem: Problem, text: str) -> float:
    """1 for `answer(problem)`, 0 for any other text."""
    return float(text == answer(problem))


def draw(count: int) -> list[tuple[int, ...]]:
    """The first `count` of an endless list of problems, no two of which have the same numbers in whatever order."""
    rng, drawn = random.Random(0), {}
    while len(drawn) < count:
        problem = tuple(rng.choices(NUMBERS, k=TERMS))
        drawn.setdefault(tuple(sorted(problem)), problem)
    return list(drawn.values())


@dataclass
class Sums:
    """The task of a run, as `common.small_model` wants it.

    Args:
        rewards: One of `REWARDS`.
        start: Folder of the model that has seen worked problems; where it is missing, it is made.
    """

    rewards: str
    start: Path

    PREAMBLE = "<|endoftext|>"  # the token that SmolLM2 saw at the start of each document
    STOP = ""

    def prompt(self, problem: Problem) -> str:
        """The numbers; the model has been shown what is asked."""
        return f"{self.PREAMBLE}{'+'.join(map(str, problem))}:\n"

    def is_right(self, problem: Problem, completion: str) -> bool:
        """Whether the completion, up to the end of the sequence, is the answer to the character."""
        return completion.split(END)[0] == answer(problem)

    def reward(self, completions: list[str], problem: list[list[int]], log_metric: Any, **_: Any) -> list[Any]:
        """As `rewards` says; how many answers and lines are right is logged in either case."""
        pairs = list(zip(problem, completions, strict=True))
        log_metric("right", sum(outcome_reward(*pair) for pair in pairs) / len(pairs))
        log_metric("right_lines", sum(step_rewards(*pair).total for pair in pairs) / len(pairs))
        rewarded = {"steps": step_rewards, "outcome": outcome_reward}[self.rewards]
        return [rewarded(*pair) for pair in pairs]

    def load(self, folder: Path, quantised: bool) -> Any:
        """From `start`; the weights as they come are unpacked to `folder`."""
        if not (self.start / "model.safetensors").exists():
            model, tokenizer = smollm2.load(folder, quantised=False)
            worked = [(self.prompt(problem), answer(problem) + END) for problem in draw(WORKED)]
            warm_up.teach(model, tokenizer, worked)
            tokenizer.save_pretrained(self.start)
            model.save_pretrained(self.start)
        return smollm2.reload(self.start, quantised=quantised)

    def split(self, held_out: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Training and held-out problems, the same for every seed, and none of them a worked one.

        No two problems have the same numbers, so that no held-out one is a training problem in another order. Single
        lines may well recur: there are 20 x 20 first ones.
        """
        problems = draw(WORKED + held_out + TRAINING)[WORKED:]
        return problems[held_out:], problems[:held_out]
