"""A public task: sums of single digits. The package `reasoning-gym` makes the questions and scores the answers.

Questions for training have one or two terms. Held-out questions have two, or three.
"""

from collections import defaultdict
from functools import cached_property
from pathlib import Path
from typing import Any

from common import smollm2

DRAWN = 2000  # questions from the package; nearly all of one or two terms are among them
EXAMPLES = 6
SEEDS = {"questions": 0, "examples": 1}

Problem = tuple[str, str]
"""An expression, such as "3 + 4 - 2", and its value."""


def package() -> Any:
    """Return the module `reasoning_gym`."""
    try:
        import reasoning_gym
    except ImportError as missing:
        raise SystemExit(
            f"The public task needs another package ({missing}). Install it: pip install reasoning-gym"
        ) from missing
    return reasoning_gym


class ChainSum:
    """The task, for SmolLM2. Solved examples in the prompt show it."""

    STOP = "\n"  # an answer ends with its line break

    @cached_property
    def examples(self) -> list[Problem]:
        """The solved examples. They have two terms."""
        return self._draw(2, 2, SEEDS["examples"])[:EXAMPLES]

    @cached_property
    def PREAMBLE(self) -> str:
        """The beginning of every prompt: the token that SmolLM2 saw at the start of each document, then examples."""
        return "<|endoftext|>" + "".join(f"{expression} = {value}\n" for expression, value in self.examples)

    def prompt(self, problem: Problem) -> str:
        """Return solved examples, then the question. The model answers up to the end of the line."""
        return f"{self.PREAMBLE}{problem[0]} ="

    def is_right(self, problem: Problem, completion: str) -> bool:
        """Return True if the package gives the first line its full score. More text in the line lowers the score.

        A special token ends the line too, because texts for a reward have none.
        """
        line = completion.split("\n")[0].split("<|")[0]
        return self._scorer.score_answer(line, {"answer": problem[1]}) == 1.0

    def reward(self, completions: list[str], problem: list[list[str]], **_: Any) -> list[float]:
        """Return 1 for a right answer and 0 for a wrong one."""
        return [float(self.is_right((p[0], p[1]), text)) for p, text in zip(problem, completions, strict=True)]

    def load(self, folder: Path, quantised: bool) -> Any:
        """Load SmolLM2 unchanged."""
        return smollm2.load(folder, quantised=quantised)

    def split(self, held_out: int) -> tuple[list[Problem], list[Problem]]:
        """Split all questions of one or two terms. The held-out ones have two, and are the same for every seed.

        No held-out question is a training question or an example, nor is it one with its terms swapped: "4 + 3".

        Returns:
            Training questions and held-out questions.
        """
        alike: defaultdict[str, list[Problem]] = defaultdict(list)
        for problem in self._draw(1, 2, SEEDS["questions"]):
            alike[_sorted(problem)].append(problem)
        for example in self.examples:
            alike.pop(_sorted(example), None)
        training: list[Problem] = []
        asked: list[Problem] = []
        for problems in alike.values():
            is_held_out = len(asked) < held_out and " " in problems[0][0]
            (asked if is_held_out else training).extend(problems)
        return training, asked[:held_out]

    def longer(self, held_out: int) -> list[Problem]:
        """Return held-out questions of three terms."""
        return self._draw(3, 3, SEEDS["questions"])[:held_out]

    def _draw(self, least: int, most: int, seed: int) -> list[Problem]:
        """Return different questions, in the package's order."""
        terms = {"min_terms": least, "max_terms": most, "min_digits": 1, "max_digits": 1}
        drawn = package().create_dataset("chain_sum", **terms, size=DRAWN, seed=seed)
        return list({entry["metadata"]["expression"]: entry["answer"] for entry in drawn}.items())

    @cached_property
    def _scorer(self) -> Any:
        return package().create_dataset("chain_sum", size=1, seed=0)


def _sorted(problem: Problem) -> str:
    """Return an expression of up to two terms with its summands in order: "3 + 4" for "4 + 3"."""
    return " + ".join(sorted(problem[0].split(" + ")))
