"""The task "the larger of two numbers": easy to verify, few tokens, and a small model half knows it.

Held-out problems are never training problems.
"""

import itertools
import random
from pathlib import Path
from typing import Any

from common import smollm2

EXAMPLES = ((55, 98), (71, 26), (12, 34))
NUMBERS = range(10, 100)


# The beginning of every prompt: the token that SmolLM2 saw at the start of each document, then solved examples.
PREAMBLE = "<|endoftext|>" + "".join(f"max({a}, {b}) = {max(a, b)}\n" for a, b in EXAMPLES)
STOP = "\n"  # an answer ends with its line break


def prompt(problem: tuple[int, int]) -> str:
    """Return solved examples, then the problem. The model answers up to the end of the line."""
    return f"{PREAMBLE}max({problem[0]}, {problem[1]}) ="


def is_right(problem: tuple[int, int], completion: str) -> bool:
    """Return True if the first line is the answer and nothing else."""
    return completion.split("\n")[0].strip() == str(max(problem))


def reward(completions: list[str], problem: list[list[int]], **_: Any) -> list[float]:
    """Return 1 for a right answer and 0 for a wrong one."""
    return [float(is_right((p[0], p[1]), text)) for p, text in zip(problem, completions, strict=True)]


def load(folder: Path, quantised: bool) -> Any:
    """Load SmolLM2 unchanged. The examples in the prompt show the task."""
    return smollm2.load(folder, quantised=quantised)


def split(held_out: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Split all ordered pairs of different two-digit numbers. The held-out pairs are the same for every seed.

    No held-out problem is a training problem with its numbers swapped.

    Returns:
        Training problems and held-out problems.
    """
    pairs = [pair for pair in itertools.combinations(NUMBERS, 2) if not {pair, pair[::-1]} & set(EXAMPLES)]
    rng = random.Random(0)
    rng.shuffle(pairs)
    test = [pair if rng.random() < 0.5 else pair[::-1] for pair in pairs[:held_out]]
    train = [turned for pair in pairs[held_out:] for turned in (pair, pair[::-1])]
    return train, test
