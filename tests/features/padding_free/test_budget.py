"""Micro-batches by tokens: no more than the budget, and no fewer sequences than fit in it."""

import itertools
import random
from collections.abc import Sequence

import pytest

from tests.oracles import padding as oracles
from tests.oracles.padding import Taken
from trl_steady.features.padding_free.packing import Length, partition

BUDGETS = (1, 7, 18, 19, 20, 33, 50, 75, 10_000)


def _partition(processes: Sequence[Sequence[Taken]], budget: int, *, padded: bool) -> list[int]:
    lengths = [
        [Length(s.prompt, s.completion, -1 if s.question is None else s.question) for s in p] for p in processes
    ]
    return partition(lengths, budget, padded=padded)


def _drawn(seed: int, processes: int, *, shared: bool) -> list[list[Taken]]:
    draw = random.Random(seed)
    of_question = [draw.randint(1, 9) for _ in range(4)]

    def one() -> Taken:
        question = draw.choice([0, 1, 2, 3])
        prompt = of_question[question] if shared else draw.randint(1, 9)
        return Taken(prompt, draw.randint(0, 9), question if shared else None)

    count = draw.randint(1, 14)
    return [[one() for _ in range(count)] for _ in range(processes)]


@pytest.mark.parametrize("processes", [1, 2, 5])
@pytest.mark.parametrize("kind", ["apart", "shared", "padded"])
def test_as_many_as_fit_on_all_processes(processes: int, kind: str) -> None:
    for seed, budget in itertools.product(range(12), BUDGETS):
        sequences = _drawn(seed, processes, shared=kind == "shared")
        counts = _partition(sequences, budget, padded=kind == "padded")
        assert oracles.fault(counts, sequences, budget, kind == "padded") is None
