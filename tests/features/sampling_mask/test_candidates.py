"""Candidates as data: converted, cut, picked and joined, compared with plain lists."""

import itertools

import pytest
import torch
from benchmarks.padding import peak_bytes
from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict

from tests.tools.sets import candidate_sets, lists
from trl_steady.features.sampling_mask import candidates as data
from trl_steady.features.sampling_mask.candidates import MAX_CANDIDATES, CandidateSets

SETS = [[5, 7], [], [3], [], [9, 0, 4], []]


def same(found: CandidateSets, sets: list[list[int]]) -> bool:
    """Whether tokens, offsets and dtypes are those of the lists."""
    is_typed = (found.ids.dtype, found.offsets.dtype) == (torch.int32, torch.int64)
    offsets = [0, *itertools.accumulate(map(len, sets))]
    return is_typed and found.ids.tolist() == [*itertools.chain(*sets)] and found.offsets.tolist() == offsets


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("at_a_time", [1, 2, 4, 100])
def test_sets_are_built_read_joined_and_taken_like_lists(at_a_time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 4 positions, each with none, one or three tokens. No token is in two sets, and no set is in order."""
    monkeypatch.setattr(data, "_AT_A_TIME", at_a_time)
    ragged = [
        [[10 * i + 3 - j for j in range(size)] for i, size in enumerate(sizes)]
        for length in range(5)
        for sizes in itertools.product((0, 1, 3), repeat=length)
    ]
    for sets in ragged:
        found, sizes = candidate_sets(sets), [len(each) for each in sets]
        assert same(found, sets) and len(found) == len(sets) and found.counts.tolist() == sizes
        assert found.positions.tolist() == [row for row, size in enumerate(sizes) for _ in range(size)]
        for cut in range(len(sets) + 1):
            assert same(CandidateSets.cat([candidate_sets(sets[:cut]), candidate_sets(sets[cut:])]), sets)
        last = len(sets) - 1
        for index in ([], [-1, -1], [last, -1, 0, 0], [-1, 0, last, -1], [*range(len(sets))][::-1]):
            if sets or max(index, default=-1) < 0:
                taken = found.take(torch.tensor(index, dtype=torch.long))
                assert same(taken, [sets[i] if i >= 0 else [] for i in index])


def test_found_a_mask_are_empty_if_too_large_or_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = torch.tensor([MAX_CANDIDATES, MAX_CANDIDATES + 1, 0])
    mask = torch.arange(2 * MAX_CANDIDATES) < sizes.unsqueeze(-1)
    assert CandidateSets.from_mask(mask).counts.tolist() == [MAX_CANDIDATES, 0, 0]
    vocabulary = 7
    draws = torch.rand(20, vocabulary, generator=torch.Generator().manual_seed(0))
    mask = draws < torch.linspace(0, 1, 20)[:, None]
    mask[5], mask[11] = True, False
    sets = [row.nonzero().flatten().tolist() for row in mask]
    assert {len(each) for each in sets} == {*range(vocabulary + 1)}
    for limit in range(vocabulary + 2):
        monkeypatch.setattr(data, "MAX_CANDIDATES", limit)
        expected = [each if len(each) <= min(limit, vocabulary - 1) else [] for each in sets]
        assert same(CandidateSets.from_mask(mask), expected)
        assert same(candidate_sets(sets).without_large(vocabulary), expected)


@pytest.mark.parametrize("sets", [SETS, [[]] * 6], ids=["full", "empty"])
@pytest.mark.parametrize("width", [1, 3, 6])
def test_trl_shuffles_and_divides_samples(sets: list[list[int]], width: int) -> None:
    rows = [sets[start : start + width] for start in range(0, 6, width)]
    samples = candidate_sets(sets).split(width)
    assert [lists(CandidateSets(*sample)) for sample in samples] == rows
    torch.manual_seed(1)
    shuffled = shuffle_sequence_dict({"numbers": torch.arange(len(rows)), "sets": samples})
    taken = candidate_sets(sets).take(torch.arange(6).view(-1, width)[shuffled["numbers"]].flatten())
    parts = [CandidateSets(*each) for part in split_tensor_dict(shuffled, len(rows)) for each in part["sets"]]
    assert lists(CandidateSets.cat(parts)) == lists(taken)


def test_has_is_membership_and_an_empty_set_has_all() -> None:
    for tokens in itertools.product((0, 3, 5), (9, 0), (3, 7), (9, 3), (9, 4, 3, 5), (5, 9)):
        expected = [not each or token in each for token, each in zip(tokens, SETS, strict=True)]
        assert candidate_sets(SETS).has(torch.tensor(tokens)).tolist() == expected


@pytest.mark.parametrize("at_a_time", [1, 3, 100])
def test_parts_of_sets_have_all_tokens(at_a_time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`has` and `without_large` see each set whole, wherever a part ends."""
    monkeypatch.setattr(data, "_AT_A_TIME", at_a_time)
    monkeypatch.setattr(data, "MAX_CANDIDATES", 2)
    sets = candidate_sets(SETS)
    for position, tokens in enumerate(SETS):
        for token in tokens:
            asked = torch.full((len(SETS),), -1)
            asked[position] = token
            assert sets.has(asked).tolist() == [not each or i == position for i, each in enumerate(SETS)]
    assert same(sets.without_large(vocabulary=100), [each if len(each) <= 2 else [] for each in SETS])


@pytest.mark.parametrize("call", ["take", "has", "without_large"])
def test_no_call_needs_much_more_memory_than_the_tokens(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """512 sets of 512 tokens, as `top_k` alone keeps them. Indices of all tokens would take six times their memory."""
    monkeypatch.setattr(data, "_AT_A_TIME", 4096)
    number = 512
    sets = CandidateSets.from_counts(torch.arange(number * number), torch.full((number,), number))
    arguments = {"take": torch.arange(number), "has": torch.zeros(number), "without_large": 100_000}
    monkeypatch.setattr(data, "MAX_CANDIDATES", number - 1)  # or nothing would be left out
    _, peak = peak_bytes(lambda: getattr(sets, call)(arguments[call]))
    # the tokens that are returned, and a part's indices and copies, at most 32 bytes for each of its tokens
    assert 0 < peak <= sets.ids.nbytes + 32 * (4096 + number) + 100 * number
