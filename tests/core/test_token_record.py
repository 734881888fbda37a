"""What was recorded, over turns and on a padded batch: worked by hand, with routes of one expert as values."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.features.router_replay.passes import to_engine
from tests.tools.devices import bytes_held
from trl_steady.core.token_record import TokenRecord, Traced, aligned, stitched
from trl_steady.core.types import Turn

NONE = 255


def routes(*experts: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """(T, 1, 1): one expert a token."""
    return torch.tensor(experts, dtype=dtype).reshape(-1, 1, 1)


def experts(of: Tensor) -> list[Any]:
    return of.squeeze((-2, -1)).tolist()


def test_a_single_turn_is_itself_with_a_row_for_the_last_token() -> None:
    short, full = Traced([5, 6, 7], routes(1, 2)), Traced([5, 6], routes(3, 4))
    one, two = stitched([[short, full]])
    assert (one.ids, experts(one.values)) == ([5, 6, 7], [1, 2, NONE])
    assert (two.ids, experts(two.values)) == ([5, 6], [3, 4])
    assert experts(short.values) == [1, 2]


def test_the_first_turn_wins_and_later_ones_have_what_it_left_out() -> None:
    """The token between two turns, and a cached prefix, whose routes an engine did not return."""
    first = Traced([10, 11, 12], routes(NONE, 2))
    second = Traced([10, 11, 12, 13, 14], routes(1, 92, 3, 4))
    third = Traced([10, 11, 12, 13, 14, 15], routes(81, 82, 83, 84, 5))
    (whole,) = stitched([[first], [second], [third]])
    assert whole.ids == third.ids
    assert experts(whole.values) == [1, 2, 3, 4, 5, NONE]


def test_each_layer_is_put_together_by_itself() -> None:
    missing = [NONE, NONE]
    first = Traced([1, 2], torch.tensor([[[1, 2], missing]], dtype=torch.uint8))
    second = Traced([1, 2, 3], torch.tensor([[[7, 8], [3, 4]], [[5, 6], missing]], dtype=torch.uint8))
    (whole,) = stitched([[first], [second]])
    assert whole.values.tolist() == [[[1, 2], [3, 4]], [[5, 6], missing], [missing, missing]]


def test_sequences_without_more_turns_stay_where_they_are() -> None:
    first = [Traced([1, token], routes(token)) for token in (20, 21, 22)]
    second = [Traced([1, 20, 5], routes(90, 30)), Traced([1, 22, 6], routes(90, 32))]
    third = [Traced([1, 22, 6, 7], routes(90, 90, 42))]
    whole = stitched([first, second, third])
    assert [each.ids for each in whole] == [[1, 20, 5], [1, 21], [1, 22, 6, 7]]
    assert [experts(each.values) for each in whole] == [[20, 30, NONE], [21, NONE], [22, 32, 42, NONE]]


def test_their_order_tells_them_apart_where_their_tokens_do_not() -> None:
    first = [Traced([1, 2], routes(10, 11)), Traced([1, 2, 3], routes(20, 21, 22))]
    second = [Traced([1, 2, 3, 9], routes(90, 90, 12, 13)), Traced([1, 2, 3, 4], routes(90, 90, 90, 23))]
    whole = stitched([first, second])
    assert [each.ids for each in whole] == [[1, 2, 3, 9], [1, 2, 3, 4]]
    assert [experts(each.values) for each in whole] == [[10, 11, 12, 13], [20, 21, 22, 23]]


def test_a_turn_that_continues_no_sequence_or_one_twice_is_refused() -> None:
    for later in ([1, 9, 3], [1], [2, 1, 2]):
        with pytest.raises(ValueError, match=r"turn 2.*continue none"):
            stitched([[Traced([1, 2], routes(1, 2))], [Traced(later, routes(*later))]])
    twice = [Traced([1, 2, 3], routes(1, 2, 3)), Traced([1, 2, 4], routes(1, 2, 4))]
    with pytest.raises(ValueError, match="turn 3"):
        stitched([[Traced([1, 2], routes(1, 2))], [], twice])


@pytest.mark.parametrize("rows", [1, 4])
def test_rows_for_neither_all_tokens_nor_all_but_the_last_are_refused(rows: int) -> None:
    with pytest.raises(ValueError, match=f"values for {rows} tokens of a sequence of 3"):
        stitched([[Traced([1, 2, 3], routes(*range(rows)))]])


def test_rows_are_where_their_tokens_are() -> None:
    """Prompts padded at the left, completions at the right."""
    sequences = [Traced([7, 8, 9], routes(1, 2)), Traced([5, 6, 7, 8, 9], routes(11, 12, 13, 14, 15))]
    ids = torch.tensor([[0, 0, 7, 8, 9, 0], [5, 6, 7, 8, 9, 0]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 0]])
    batch = aligned(stitched([sequences]), ids, mask)
    assert (batch.shape, batch.dtype) == ((2, 6, 1, 1), torch.uint8)
    assert experts(batch) == [[NONE, NONE, 1, 2, NONE, NONE], [11, 12, 13, 14, 15, NONE]]


def test_other_tokens_than_were_recorded_are_refused() -> None:
    """Too few, in another order, another one, or no sequence at all."""
    ids = torch.tensor([[7, 8, 9], [7, 8, 9]])
    others = [[Traced(tokens, routes(*range(len(tokens))))] for tokens in ([7, 8], [7, 9, 8], [7, 8, 10, 11])]
    for other in (*others, []):
        with pytest.raises(ValueError, match="sequence 1 of the rollout has other tokens"):
            aligned(stitched([[Traced([7, 8, 9], routes(1, 2)), *other]]), ids, torch.ones_like(ids))


@pytest.mark.parametrize("wide_first", [True, False])
def test_sequences_and_turns_of_different_dtypes_keep_their_experts(wide_first: bool) -> None:
    """As an engine's routes have, of which the highest expert of each decides."""
    wide, narrow = routes(300, -1, 301, dtype=torch.int16), routes(3, NONE, 4)
    first = [Traced([7, 8], wide[:2] if wide_first else narrow[:2]), Traced([6, 8], narrow[:2])]
    whole = stitched([first, [Traced([7, 8, 9, 10], narrow if wide_first else wide)]])
    batch = aligned(whole, torch.tensor([[7, 8, 9, 10], [6, 8, 0, 0]]), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]))
    expected = [300, -1, 4, -1] if wide_first else [3, -1, 301, -1]
    assert experts(to_engine(batch)) == [expected, [3, -1, -1, -1]]


def recorded(turns: list[list[Traced]]) -> TokenRecord:
    """A record of the turns, whose last tokens were sampled."""
    record = TokenRecord("option", "Do without.")
    for sequences in turns:
        turn = Turn([routed.ids[:-1] for routed in sequences], None, [routed.ids[-1:] for routed in sequences])
        record.add(turn, [routed.values for routed in sequences])
    return record


def test_a_record_of_many_turns_holds_each_token_once() -> None:
    """Each turn has the values of all tokens so far, as an engine returns them."""
    given: list[list[Traced]] = []
    for length in range(50, 1050, 50):
        values = torch.full((length - 1, 4, 2), length // 50, dtype=torch.uint8)
        given.append([Traced([*range(start, start + length)], values) for start in (0, 7)])
    record = recorded(given)
    column = sum(traced.values.nbytes for traced in stitched(given))
    assert column == 2 * 1000 * 8
    assert column <= bytes_held(record) <= 1.1 * column
    ids = torch.tensor([traced.ids for traced in given[-1]])
    assert torch.equal(
        record.as_padded(ids, torch.ones_like(ids)), aligned(stitched(given), ids, torch.ones_like(ids))
    )


def test_a_record_names_its_option_and_the_turn_that_does_not_fit() -> None:
    first, second = Traced([1, 2], routes(1)), Traced([1, 2, 3], routes(1, 2))
    with pytest.raises(ValueError, match=r"option: turn 3 of a rollout .*continue none.* Do without\."):
        recorded([[first], [second], [Traced([5, 6], routes(1))]])
    record = recorded([[first], [second]])
    assert len(record.take([second.ids])) == 1  # after which another round begins
    record.add(Turn([[5]], None, [[6]]), [routes(1)])
    with pytest.raises(ValueError, match="turn 2"):
        record.add(Turn([[7]], None, [[6]]), [routes(1)])
