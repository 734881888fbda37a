"""What is read off a mask, how many sequences fit in a budget, and how often packing waits for a GPU."""

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.features.padding_free.tools import packing_of
from tests.oracles import padding as oracles
from tests.oracles.padding import Taken, padded
from tests.tools.devices import CUDA, pretended_gpu
from tests.tools.threads import Group
from trl_steady.features.padding_free import feature
from trl_steady.features.padding_free.feature import PaddingFree
from trl_steady.features.padding_free.packing import Length, pack, partition, sequence_lengths


def test_padding_may_hold_any_token(share: bool) -> None:
    """Prompts of the same tokens share, whatever stands before them; those of other tokens do not."""
    batch = padded([([1, 2, 3], [4]), ([2, 3], [5]), ([2, 3], [6]), ([1, 2, 3], [7])], left=1, right=1)
    for filler in (0, 1, 2):
        ids = batch.ids.where(batch.mask.bool(), filler)
        ids[1, 1] = 1  # the padded row now reads like the longer prompt
        other = batch.with_ids(ids)
        packing, expected = packing_of(other, share), packing_of(batch, share)
        assert torch.equal(packing.rows, expected.rows) and torch.equal(packing.columns, expected.columns)
        assert packing.segments == expected.segments


def test_padding_between_tokens_is_found() -> None:
    mask = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 0, 1, 1]])
    assert sequence_lengths(mask[:1], prompt_width=2) == [(1, 2, -1)]
    assert sequence_lengths(mask, prompt_width=2) is None
    assert sequence_lengths(mask.flip(1), prompt_width=3) is None
    assert sequence_lengths(torch.tensor([[1, 0, 1, 1]]), prompt_width=2) is None  # at the right of a prompt


@pytest.mark.parametrize("processes", [1, 2, 5])
@pytest.mark.parametrize("kind", ["apart", "shared", "padded"])
def test_as_many_sequences_as_fit_in_a_budget_on_all_processes(processes: int, kind: str) -> None:
    """No more than the budget, and no fewer sequences than fit in it."""

    def drawn(seed: int) -> list[list[Taken]]:
        draw = random.Random(seed)
        of_question = [draw.randint(1, 9) for _ in range(4)]
        count = draw.randint(1, 14)
        sequences: list[list[Taken]] = [[] for _ in range(processes)]
        for of_process in sequences:
            for _ in range(count):
                question = draw.choice([0, 1, 2, 3])
                prompt = of_question[question] if kind == "shared" else draw.randint(1, 9)
                of_process.append(Taken(prompt, draw.randint(0, 9), question if kind == "shared" else None))
        return sequences

    for seed, budget in itertools.product(range(12), (1, 7, 18, 19, 20, 33, 50, 75, 10_000)):
        sequences = drawn(seed)
        lengths = [
            [Length(s.prompt, s.completion, -1 if s.question is None else s.question) for s in of_process]
            for of_process in sequences
        ]
        counts = partition(lengths, budget, padded=kind == "padded")
        assert oracles.fault(counts, sequences, budget, kind == "padded") is None


@pytest.mark.parametrize("shares", [False, True])
def test_packing_waits_for_the_gpu_as_often_for_many_rows_as_for_few(shares: bool) -> None:
    """Groups of three answers to a prompt, of unequal lengths."""
    waits, prompt, width = [], 4, 9
    for groups in (2, 8):
        rows, columns = torch.arange(3 * groups).unsqueeze(-1), torch.arange(width)
        mask = (columns >= rows // 3 % prompt) & (columns < prompt + 1 + rows % (width - prompt))
        ids = torch.where(columns < prompt, 10 * (rows // 3), 100 * rows) + columns
        with pretended_gpu() as gpu:
            lengths = sequence_lengths(mask.to(CUDA), prompt_width=prompt, input_ids=ids.to(CUDA) if shares else None)
            assert lengths is not None
            read = len(gpu.waits)
            packing = pack(lengths, prompt_width=prompt, device=torch.device(CUDA))
            assert packing.rows.device == packing.columns.device == torch.device(CUDA)
            assert len(gpu.waits) == read
            waits.append(len(gpu.waits))
    assert waits[0] == waits[1]


def test_processes_form_equally_many_groups_where_one_of_them_pads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process has a sequence that is wider than the model allows without padding."""
    group = Group(2)
    monkeypatch.setattr(feature, "gather_object", group.gather)
    asked: Any = SimpleNamespace(args=SimpleNamespace(token_budget=9000))
    support: Any = SimpleNamespace(width_limit=4096, why_not_packed=None, is_shift_invariant=True)

    def batches(rank: int) -> list[list[int]]:
        completion = (1300, 300)[rank]
        lengths = [Length(3000, completion, 0)] * 4
        return PaddingFree._batches(asked, support, lengths, 3000 + completion, 3000, 4)

    first, second = group.run(batches)
    assert [len(each) for each in first] == [len(each) for each in second] == [2, 2]
