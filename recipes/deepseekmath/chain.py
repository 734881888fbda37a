"""The task "add up digits modulo ten, one step for each digit". A small model learns it, and each step can be checked.

For 3 8 1 4 the answer is 3 1 2 6: each step adds the next digit to the step before, and the last step is the result. A
wrong chain can end at the right result, as a wrong solution of a word problem can.
"""

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from common import run, smollm2
from moe import digits
from trl_steady import StepRewards

Problem = Sequence[int]

LENGTH = digits.DIGITS  # digits of a problem, and steps of its answer
END = digits.END
TRAINING = 4_000
WORKED_STEPS = 130  # of the warm start
SMALL, ANY, LARGE = [12] * 5 + [1] * 5, [1] * 10, [0] * 5 + [1] * 5
"""How often each digit is drawn: in worked problems, in training and held-out problems, in out-of-domain problems."""


def answer(problem: Problem) -> str:
    """Return all steps, and the end-of-sequence token."""
    return "".join(str(total % 10) for total in itertools.accumulate(problem)) + END


def result(text: str) -> str | None:
    """Return the last step of an answer without its end; None if it has another length than an answer."""
    return text[-1] if len(text) == LENGTH and text.isdecimal() else None


def right_steps(problem: Problem, steps: Iterable[str]) -> list[bool]:
    """Return for each step if it is the step before, as written, plus the problem's digit."""
    written = ["0", *steps]
    return [
        i < len(problem) and (before + step).isdecimal() and (int(before) + problem[i]) % 10 == int(step)
        for i, (before, step) in enumerate(itertools.pairwise(written))
    ]


def draw(count: int, weights: Sequence[int], seed: int) -> list[tuple[int, ...]]:
    """Return different problems, whose digits have these weights."""
    rng, drawn = random.Random(seed), dict[tuple[int, ...], None]()
    while len(drawn) < count:
        drawn[tuple(rng.choices(range(10), weights, k=LENGTH))] = None
    return list(drawn)


@dataclass
class Chain:
    """The task, with the interface of `common.small_model.Task`.

    Args:
        start: Folder of the model after its warm start. If it has no model, `load` makes one.
        rewards: "outcome": 1 if the result is right. "process": a tenth for each right step.
    """

    start: Path
    rewards: str = "outcome"

    PREAMBLE = digits.BEGIN
    STOP = ""

    def prompt(self, problem: Problem) -> str:
        """Return the digits and a colon."""
        return f"{digits.BEGIN}{''.join(map(str, problem))}:"

    def is_right(self, problem: Problem, completion: str) -> bool:
        """Return True if the result is right."""
        text, end, _ = completion.partition(END)
        return bool(end) and result(text) == str(sum(problem) % 10)

    def reward(
        self,
        completions: list[str],
        problem: list[list[int]],
        completion_ids: list[list[int]],
        log_metric: Any,
        **_: Any,
    ) -> list[Any]:
        """Return the rewards that `rewards` selects. Log the shares of right results and steps in both cases."""
        tokens = [[digits.TOKENS[i] for i in ids] for ids in completion_ids]
        right = [float(self.is_right(p, "".join(own))) for p, own in zip(problem, tokens, strict=True)]
        steps = [
            right_steps(p, itertools.takewhile(lambda token: token != END, own))
            for p, own in zip(problem, tokens, strict=True)
        ]
        log_metric("right", sum(right) / len(right))
        log_metric("right_steps", sum(map(sum, steps)) / (LENGTH * len(steps)))
        if self.rewards == "outcome":
            return right
        return [
            StepRewards.at_tokens(
                [own / LENGTH for own in values], [*range(1, len(values)), len(ids)] if values else []
            )
            for values, ids in zip(steps, completion_ids, strict=True)
        ]

    def load(self, folder: Path, quantised: bool) -> Any:
        """Load the model from `start`, in NF4 or float32. Make it first if it is missing."""
        device = "cuda:0" if torch.cuda.is_available() else "cpu"

        def warm_up(model: Any, tokenizer: Any) -> None:
            worked = draw(WORKED_STEPS * digits.WORKED_BATCH, SMALL, seed=0)
            digits.teach(model.to(device), tokenizer, [(self.prompt(problem), answer(problem)) for problem in worked])

        start = run.starting_model(self.start, folder, lambda: digits.untaught(dense=True), warm_up)
        model = AutoModelForCausalLM.from_pretrained(
            start,
            dtype=torch.float32,
            device_map=device,
            quantization_config=smollm2.nf4() if quantised else None,
        )
        return model, AutoTokenizer.from_pretrained(start, padding_side="left")

    def split(self, held_out: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Return training and held-out problems, the same for every seed."""
        problems = draw(held_out + TRAINING, ANY, seed=1)
        return problems[held_out:], problems[:held_out]

    def large(self, count: int) -> list[tuple[int, ...]]:
        """Return out-of-domain problems, which have large digits only."""
        return draw(count, LARGE, seed=2)
