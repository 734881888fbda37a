"""The larger of two numbers: verifiable, few tokens, half known to a small model; test problems are kept apart."""

import itertools
import random
from pathlib import Path
from typing import Any

from common import smollm2

EXAMPLES = ((55, 98), (71, 26), (12, 34))
NUMBERS = range(10, 100)


# What every prompt begins with: the token that SmolLM2 saw at the start of each document, then solved examples.
PREAMBLE = "<|endoftext|>" + "".join(f"max({a}, {b}) = {max(a, b)}\n" for a, b in EXAMPLES)
STOP = "\n"  # an answer ends with its line


def prompt(problem: tuple[int, int]) -> str:
    """Solved examples, then the problem, to be answered up to the end of the line."""
    return f"{PREAMBLE}max({problem[0]}, {problem[1]}) ="


def is_right(problem: tuple[int, int], completion: str) -> bool:
    """Whether the first line is the answer and nothing else."""
    return completion.split("\n")[0].strip() == str(max(problem))


def reward(completions: list[str], problem: list[list[int]], **_: Any) -> list[float]:
    """1 for a right answer."""
    return [float(is_right((p[0], p[1]), text)) for p, text in zip(problem, completions, strict=True)]


def load(folder: Path, quantised: bool) -> Any:
    """SmolLM2 as it is; the examples in the prompt show what is asked."""
    return smollm2.load(folder, quantised=quantised)


def split(held_out: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """All ordered pairs of different two-digit numbers, the same `held_out` of them apart for every seed.

    A pair and its mirror image lie on the same side, so that no held-out problem is a training problem turned round.

    Returns:
        Training problems and held-out problems.
    """
    pairs = [pair for pair in itertools.combinations(NUMBERS, 2) if not {pair, pair[::-1]} & set(EXAMPLES)]
    rng = random.Random(0)
    rng.shuffle(pairs)
    test = [pair if rng.random() < 0.5 else pair[::-1] for pair in pairs[:held_out]]
    train = [turned for pair in pairs[held_out:] for turned in (pair, pair[::-1])]
    return train, test
