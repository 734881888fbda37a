"""Kept tokens as data: there and back, cut, picked and joined, beside plain lists."""

import itertools

import pytest
import torch
from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict

from trl_steady.sampling.kept import MAX_KEPT, KeptTokens

# Of up to 4 positions, with none, one or three tokens at every place; no token is in two sets, none are in order.
RAGGED = [
    [[10 * i + 3 - j for j in range(size)] for i, size in enumerate(sizes)]
    for length in range(5)
    for sizes in itertools.product((0, 1, 3), repeat=length)
]
SETS = [[5, 7], [], [3], [], [9, 0, 4], []]


def test_lists_there_and_back() -> None:
    for sets in RAGGED:
        kept, sizes = KeptTokens.of(iter(sets)), [len(each) for each in sets]
        assert kept.lists() == sets
        assert len(kept) == len(sets)
        assert kept.counts.tolist() == sizes
        assert kept.ids.tolist() == list(itertools.chain(*sets))
        assert kept.rows.tolist() == [row for row, size in enumerate(sizes) for _ in range(size)]
        assert kept.offsets.tolist() == [0, *itertools.accumulate(sizes)]
        assert (kept.ids.dtype, kept.offsets.dtype) == (torch.int32, torch.int64)


def test_from_counts_of_any_integers() -> None:
    for sets in RAGGED:
        expected = KeptTokens.of(sets)
        for dtype in (torch.int32, torch.int64):
            ids = torch.tensor(list(itertools.chain(*sets)), dtype=dtype)
            kept = KeptTokens.of_counts(ids, torch.tensor([len(each) for each in sets], dtype=dtype))
            assert kept.ids.tolist() == expected.ids.tolist()
            assert kept.offsets.tolist() == expected.offsets.tolist()
            assert (kept.ids.dtype, kept.offsets.dtype) == (torch.int32, torch.int64)


def test_from_a_mask_as_from_the_lists_less_those_that_are_too_large() -> None:
    vocabulary = 7
    is_kept = (
        torch.rand(20, vocabulary, generator=torch.Generator().manual_seed(0)) < torch.linspace(0, 1, 20)[:, None]
    )
    is_kept[5], is_kept[11] = True, False
    sets = [row.nonzero().flatten().tolist() for row in is_kept]
    assert {len(each) for each in sets} == {*range(vocabulary + 1)}
    for limit in range(vocabulary + 2):
        kept = KeptTokens.of_mask(is_kept, limit)
        assert kept.lists() == [each if len(each) <= min(limit, vocabulary - 1) else [] for each in sets]
        assert (kept.ids.dtype, kept.offsets.dtype) == (torch.int32, torch.int64)
    sizes = torch.tensor([MAX_KEPT, MAX_KEPT + 1, 0])
    assert KeptTokens.of_mask(torch.arange(2 * MAX_KEPT) < sizes.unsqueeze(-1)).counts.tolist() == [MAX_KEPT, 0, 0]


@pytest.mark.parametrize(
    ("sets", "position"), [([[1], [], [2, 3, 2]], 2), ([[0], [4, -1]], 1), ([[-100]], 0), ([[6, 6], [1, 1]], 0)]
)
def test_a_set_with_a_token_twice_or_a_negative_one_is_refused(sets: list[list[int]], position: int) -> None:
    with pytest.raises(ValueError, match=f"position {position} are"):
        KeptTokens.of(sets)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_take_is_that_of_a_list_and_empty_for_minus_one(dtype: torch.dtype) -> None:
    for sets in RAGGED:
        kept = KeptTokens.of(sets)
        last = len(sets) - 1
        for index in ([], [-1], [-1, -1], [last, -1, 0, 0], [-1, 0, last, -1], [*range(len(sets))][::-1]):
            if not sets and max(index, default=-1) >= 0:
                continue
            taken = kept.take(torch.tensor(index, dtype=dtype))
            assert taken.counts.tolist() == [len(sets[i]) if i >= 0 else 0 for i in index]
            assert taken.ids.tolist() == [token for i in index if i >= 0 for token in sets[i]]


def test_joined_is_the_sum_of_lists() -> None:
    for sets in RAGGED:
        for cut in range(len(sets) + 1):
            joined = KeptTokens.joined([KeptTokens.of(sets[:cut]), KeptTokens.of(sets[cut:])])
            assert joined.offsets.tolist() == KeptTokens.of(sets).offsets.tolist()
            assert joined.ids.tolist() == KeptTokens.of(sets).ids.tolist()


@pytest.mark.parametrize("sets", [SETS, SETS[::-1], [[]] * 6], ids=["full", "reversed", "empty"])
@pytest.mark.parametrize("width", [1, 2, 3, 6])
def test_of_samples_trl_shuffles_and_divides_rows(sets: list[list[int]], width: int) -> None:
    rows = [sets[start : start + width] for start in range(0, 6, width)]
    samples = KeptTokens.of(sets).of_samples(width)
    assert [KeptTokens(*sample).lists() for sample in samples] == rows
    assert [int(offsets[0]) for _, offsets in samples] == [0] * len(rows)
    torch.manual_seed(1)
    numbers = torch.arange(len(rows))
    shuffled = shuffle_sequence_dict({"numbers": numbers, "kept": samples})
    order = shuffled["numbers"]
    assert len(rows) == 1 or order.tolist() != numbers.tolist()
    taken = KeptTokens.of(sets).take(torch.arange(6).view(-1, width)[order].flatten())
    assert KeptTokens.joined([KeptTokens(*own) for own in shuffled["kept"]]).lists() == taken.lists()
    for chunks in {1, len(rows)}:
        parts = [KeptTokens(*own) for part in split_tensor_dict(shuffled, chunks) for own in part["kept"]]
        assert KeptTokens.joined(parts).lists() == taken.lists()


def test_sets_of_the_limit_stay_and_larger_ones_are_emptied() -> None:
    sets = [[], [8], [5, 1, 3], [2, 9, 4, 0], [7, 6, 5, 4, 3], [], [1]]
    for limit in range(6):
        left = KeptTokens.of(sets).without_large(vocabulary=10, limit=limit)
        assert left.lists() == [each if len(each) <= limit else [] for each in sets]
    sizes = [MAX_KEPT, MAX_KEPT + 1, MAX_KEPT - 1]
    left = KeptTokens.of([range(size) for size in sizes]).without_large(vocabulary=2 * MAX_KEPT)
    assert left.counts.tolist() == [MAX_KEPT, 0, MAX_KEPT - 1]


def test_sets_of_the_whole_vocabulary_are_emptied_whatever_the_limit() -> None:
    sets = [[2, 0, 1, 3], [3, 1, 0], [], [1], [0, 1, 2, 3]]
    for limit in (4, 5, MAX_KEPT):
        assert KeptTokens.of(sets).without_large(4, limit).lists() == [[], [3, 1, 0], [], [1], []]
    assert KeptTokens.of(sets).without_large(5).lists() == sets


def test_has_is_membership_and_an_empty_set_has_all() -> None:
    for tokens in itertools.product((0, 3, 5), (9, 0), (3, 7), (9, 3), (9, 4, 3, 5), (5, 9)):
        expected = [not each or token in each for token, each in zip(tokens, SETS, strict=True)]
        assert KeptTokens.of(SETS).has(torch.tensor(tokens)).tolist() == expected
    assert KeptTokens.of([[], []]).has(torch.tensor([0, 1])).tolist() == [True, True]


def test_to_a_device_moves_all_of_it() -> None:
    moved = KeptTokens.of(SETS).to(torch.device("meta"))
    assert (moved.ids.device.type, moved.offsets.device.type) == ("meta", "meta")


def test_no_positions_are_no_sets() -> None:
    none = KeptTokens.of([])
    assert len(none.without_large(3)) == len(none.take(torch.tensor([], dtype=torch.long))) == 0
    assert none.has(torch.tensor([])).tolist() == []
    assert none.lists() == []
