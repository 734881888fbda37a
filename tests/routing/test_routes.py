"""Routes as data, like mathematics: worked by hand, there and back, and what is refused."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from trl_steady.routing.routes import (
    Routed,
    aligned,
    dtype_of,
    from_engine,
    is_route,
    no_route,
    no_routes,
    shared,
    stitched,
    to_engine,
)

NONE = 255


def routes(*experts: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """(T, 1, 1): one expert a token."""
    return torch.tensor(experts, dtype=dtype).reshape(-1, 1, 1)


def experts(of: Tensor) -> list[Any]:
    return of.squeeze((-2, -1)).tolist()


@pytest.mark.parametrize(
    ("num_experts", "dtype", "missing"),
    [
        (1, torch.uint8, 255),
        (8, torch.uint8, 255),
        (255, torch.uint8, 255),
        (256, torch.int16, -1),
        (2**15, torch.int16, -1),
        (2**15 + 1, torch.int32, -1),
    ],
)
def test_the_dtype_has_room_for_every_expert_and_for_none(num_experts: int, dtype: torch.dtype, missing: int) -> None:
    assert dtype_of(num_experts) == dtype
    assert no_route(dtype) == missing
    last = torch.tensor([[num_experts - 1]]).to(dtype)
    assert last.item() == num_experts - 1
    assert is_route(last).all()
    assert not is_route(no_routes((3, 1), dtype)).any()


def test_no_routes() -> None:
    nothing = no_routes((2, 3, 4, 5), torch.int16)
    assert nothing.shape == (2, 3, 4, 5)
    assert nothing.dtype == torch.int16
    assert (nothing == -1).all()


def test_where_there_is_a_route() -> None:
    some = torch.tensor([[[0, 1], [255, 255]], [[3, 0], [254, 0]]], dtype=torch.uint8)
    assert is_route(some).tolist() == [[True, False], [True, True]]
    # 255 is an expert where there are more than 255
    assert is_route(torch.tensor([[255, 256], [-1, -1]], dtype=torch.int16)).tolist() == [True, False]


def test_an_engines_routes_by_hand() -> None:
    taken = from_engine([[[3, 0], [1, 2]], [[-1, -1], [2, 3]]])
    assert taken.dtype == torch.uint8
    assert taken.tolist() == [[[3, 0], [1, 2]], [[255, 255], [2, 3]]]
    back = to_engine(taken)
    assert back.dtype == torch.int32
    assert back.tolist() == [[[3, 0], [1, 2]], [[-1, -1], [2, 3]]]


def drawn(highest: int) -> Tensor:
    """(T, L, K) as engines give it: distinct experts up to the highest, which is there, and rows without."""
    generator = torch.Generator().manual_seed(highest)
    given = torch.rand(7, 3, highest + 1, generator=generator).argsort(-1)[..., :2].int()
    given[torch.rand(7, 3, generator=generator) < 0.3] = -1
    given[0, 0], given[0, 1] = torch.tensor([highest, 0]), -1
    return given


@pytest.mark.parametrize(
    ("highest", "dtype"),
    [
        *((highest, torch.uint8) for highest in (1, 7, 253, 254)),
        *((highest, torch.int16) for highest in (255, 256, 2**15 - 1)),
        (2**15, torch.int32),
    ],
)
@pytest.mark.parametrize("source", ["int32", "int64", "tensor", "lists"])
def test_there_and_back(highest: int, dtype: torch.dtype, source: str) -> None:
    given = drawn(highest)
    array: Any = {"tensor": given, "lists": given.tolist()}.get(source)
    taken = from_engine(given.numpy().astype(source) if array is None else array)
    assert taken.dtype == dtype
    assert torch.equal(is_route(taken), given[..., 0] >= 0)
    assert torch.equal(taken[is_route(taken)].int(), given[given[..., 0] >= 0])
    assert torch.equal(to_engine(taken), given)


@pytest.mark.parametrize("source", ["uint8", "int16", "uint16"])
def test_an_engine_of_narrow_integers(source: str) -> None:
    assert to_engine(from_engine(np.array([[[0, 255]], [[7, 3]]], dtype=source))).tolist() == [[[0, 255]], [[7, 3]]]


@pytest.mark.parametrize("layers", [[1, 3], [0, 1, 2, 3], [3]])
def test_an_engine_that_has_rows_for_layers_without_routers(layers: list[int]) -> None:
    """Which nobody has filled in."""
    own = drawn(7)[:, :1].repeat(1, len(layers), 1)
    given = torch.zeros(7, 4, 2, dtype=torch.int32)
    given[:, layers] = own
    assert torch.equal(to_engine(from_engine(given, layers=layers)), own)
    assert torch.equal(to_engine(from_engine(own, layers=layers)), own)


def test_an_engine_of_a_smaller_model() -> None:
    with pytest.raises(ValueError, match="routes of 3 layers, and the model has routers in its decoder layers 1, 3"):
        from_engine(drawn(7), layers=[1, 3])


def test_an_engine_that_has_no_routes_at_all() -> None:
    taken = from_engine(np.full((2, 1, 2), -1))
    assert taken.dtype == torch.uint8
    assert not is_route(taken).any()
    assert from_engine(np.zeros((0, 2, 2), dtype=np.int32)).shape == (0, 2, 2)


def test_what_an_engine_gave_is_not_written_to() -> None:
    given = torch.tensor([[[-1, -1]], [[1, 0]]])
    kept = given.clone()
    taken = from_engine(given)
    to_engine(taken).fill_(7)
    taken.fill_(9)
    assert torch.equal(given, kept)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 3, 2), dtype=np.int32), r"token 0 in layer 0 are \[0, 0\]"),
        ([[[1, 0], [2, 3]], [[3, 1], [0, 0]]], r"token 1 in layer 1 are \[0, 0\]"),
        ([[[2, 2, 1]]], r"token 0 in layer 0 are \[2, 2, 1\]"),
        ([[[2, 1, 2]]], r"token 0 in layer 0 are \[2, 1, 2\]"),
        ([[[4, 2, 1, 4]]], r"token 0 in layer 0 are \[4, 2, 1, 4\]"),
        ([[[1, 0]], [[3, -1]]], r"token 1 in layer 0 are \[3, -1\]"),
        ([[[1, 0]], [[-1, 3]]], r"token 1 in layer 0 are \[-1, 3\]"),
        ([[[-1, -1, 0]]], r"token 0 in layer 0 are \[-1, -1, 0\]"),
        ([[0, 1]], r"shape \(tokens, layers, experts per token\), not torch.int64 of shape \(1, 2\)"),
        ([[[[0, 1]]]], r"not torch.int64 of shape \(1, 1, 1, 2\)"),
        (np.array([[[0.0, 1.0]]]), "integers .* not torch.float64"),
        (torch.tensor([[[0, 1]]], dtype=torch.bfloat16), "integers .* not torch.bfloat16"),
    ],
)
def test_what_an_engine_cannot_mean(array: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_engine(array)


def test_experts_of_different_layers_and_tokens_may_be_the_same() -> None:
    given = [[[1, 0], [1, 0]], [[0, 1], [1, 0]]]
    assert from_engine(given).tolist() == given


def test_a_single_turn_is_itself_with_a_row_for_the_last_token() -> None:
    short, full = Routed([5, 6, 7], routes(1, 2)), Routed([5, 6], routes(3, 4))
    one, two = stitched([[short, full]])
    assert one.ids == [5, 6, 7]
    assert experts(one.routes) == [1, 2, NONE]
    assert two.ids == [5, 6]
    assert experts(two.routes) == [3, 4]
    assert experts(short.routes) == [1, 2]


def test_the_first_turn_wins_and_the_next_has_the_token_between() -> None:
    first = Routed([10, 11, 12], routes(1, 2))
    second = Routed([10, 11, 12, 13, 14], routes(91, 92, 3, 4))
    third = Routed([10, 11, 12, 13, 14, 15], routes(81, 82, 83, 84, 5))
    (whole,) = stitched([[first], [second], [third]])
    assert whole.ids == third.ids
    assert experts(whole.routes) == [1, 2, 3, 4, 5, NONE]


def test_a_row_for_the_last_token_wins_as_well() -> None:
    first = Routed([10, 11], routes(1, 2))
    second = Routed([10, 11, 12], routes(91, 92, 3))
    (whole,) = stitched([[first], [second]])
    assert experts(whole.routes) == [1, 2, 3]


def test_a_later_turn_has_what_the_first_left_out() -> None:
    """A cached prefix, say, whose routes an engine did not return."""
    first = Routed([10, 11, 12], routes(NONE, 2))
    second = Routed([10, 11, 12, 13], routes(1, 92, NONE))
    third = Routed([10, 11, 12, 13, 14], routes(91, 82, 3, 4))
    (whole,) = stitched([[first], [second], [third]])
    assert experts(whole.routes) == [1, 2, 3, 4, NONE]


def test_each_layer_is_put_together_by_itself() -> None:
    missing = [NONE, NONE]
    first = Routed([1, 2], torch.tensor([[[1, 2], missing]], dtype=torch.uint8))
    second = Routed([1, 2, 3], torch.tensor([[[7, 8], [3, 4]], [[5, 6], missing]], dtype=torch.uint8))
    (whole,) = stitched([[first], [second]])
    assert whole.routes.tolist() == [[[1, 2], [3, 4]], [[5, 6], missing], [missing, missing]]


def test_sequences_without_more_turns_stay_where_they_are() -> None:
    first = [Routed([1, token], routes(token)) for token in (20, 21, 22)]
    second = [Routed([1, 20, 5], routes(90, 30)), Routed([1, 22, 6], routes(90, 32))]
    third = [Routed([1, 22, 6, 7], routes(90, 90, 42))]
    whole = stitched([first, second, third])
    assert [each.ids for each in whole] == [[1, 20, 5], [1, 21], [1, 22, 6, 7]]
    assert [experts(each.routes) for each in whole] == [[20, 30, NONE], [21, NONE], [22, 32, 42, NONE]]


def test_the_same_tokens_going_on_differently_keep_their_own_routes() -> None:
    first = [Routed([1, 2], routes(10, 11)), Routed([1, 2], routes(20, 21))]
    second = [Routed([1, 2, 3], routes(90, 90, 12)), Routed([1, 2, 4], routes(90, 90, 22))]
    whole = stitched([first, second])
    assert [each.ids for each in whole] == [[1, 2, 3], [1, 2, 4]]
    assert [experts(each.routes) for each in whole] == [[10, 11, 12], [20, 21, 22]]


def test_one_of_them_going_on_as_far_as_the_other_and_farther() -> None:
    first = [Routed([1, 2], routes(10, 11)), Routed([1, 2], routes(20, 21))]
    second = [Routed([1, 2, 3], routes(90, 90, 12)), Routed([1, 2, 3, 4], routes(90, 90, 22, 23))]
    whole = stitched([first, second])
    assert [experts(each.routes) for each in whole] == [[10, 11, 12], [20, 21, 22, 23]]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_sequence_that_begins_another_is_not_taken_for_it(is_first: bool) -> None:
    """The shorter one was cut and did not go on."""
    shorter, longer = Routed([1, 2], routes(10, 11)), Routed([1, 2, 3], routes(20, 21, 22))
    first = [shorter, longer] if is_first else [longer, shorter]
    whole = stitched([first, [Routed([1, 2, 3, 4], routes(90, 90, 90, 23))]])
    told = {tuple(each.ids): experts(each.routes) for each in whole}
    assert told == {(1, 2): [10, 11], (1, 2, 3, 4): [20, 21, 22, 23]}
    assert whole[0 if is_first else 1].ids == [1, 2]


def test_a_sequence_and_one_that_it_begins_both_go_on() -> None:
    first = [Routed([1, 2], routes(10, 11)), Routed([1, 2, 3], routes(20, 21, 22))]
    second = [Routed([1, 2, 7], routes(90, 90, 12)), Routed([1, 2, 3, 4], routes(90, 90, 90, 23))]
    whole = stitched([first, second])
    assert [experts(each.routes) for each in whole] == [[10, 11, 12], [20, 21, 22, 23]]


def test_their_order_tells_them_apart_where_their_tokens_do_not() -> None:
    first = [Routed([1, 2], routes(10, 11)), Routed([1, 2, 3], routes(20, 21, 22))]
    second = [Routed([1, 2, 3, 9], routes(90, 90, 12, 13)), Routed([1, 2, 3, 4], routes(90, 90, 90, 23))]
    whole = stitched([first, second])
    assert [each.ids for each in whole] == [[1, 2, 3, 9], [1, 2, 3, 4]]
    assert [experts(each.routes) for each in whole] == [[10, 11, 12, 13], [20, 21, 22, 23]]


@pytest.mark.parametrize("later", [[1, 9, 3], [1], [2, 1, 2]])
def test_a_turn_that_goes_on_with_nothing(later: list[int]) -> None:
    with pytest.raises(ValueError, match="turn 2 of a rollout has sequences that begin with none of those before it"):
        stitched([[Routed([1, 2], routes(1, 2))], [Routed(later, routes(*later))]])


def test_a_turn_that_goes_on_with_one_sequence_twice() -> None:
    later = [Routed([1, 2, 3], routes(1, 2, 3)), Routed([1, 2, 4], routes(1, 2, 4))]
    with pytest.raises(ValueError, match="turn 3"):
        stitched([[Routed([1, 2], routes(1, 2))], [], later])


@pytest.mark.parametrize("rows", [0, 1, 4, 5])
def test_rows_for_neither_all_tokens_nor_all_but_the_last(rows: int) -> None:
    wrong = Routed([1, 2, 3], routes(*range(rows)))
    message = f"routes of {rows} tokens of a sequence of 3"
    with pytest.raises(ValueError, match=message):
        stitched([[wrong]])
    with pytest.raises(ValueError, match=message):
        stitched([[Routed([1], routes(1))], [wrong]])
    with pytest.raises(ValueError, match=message):
        aligned([wrong], torch.tensor([[1, 2, 3]]), torch.ones(1, 3))


def test_rows_are_where_their_tokens_are() -> None:
    """Prompts padded at the left, completions at the right."""
    sequences = [Routed([7, 8, 9], routes(1, 2)), Routed([5, 6, 7, 8, 9], routes(11, 12, 13, 14, 15))]
    ids = torch.tensor([[0, 0, 7, 8, 9, 0], [5, 6, 7, 8, 9, 0]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 0]])
    batch = aligned(sequences, ids, mask)
    assert batch.shape == (2, 6, 1, 1)
    assert batch.dtype == torch.uint8
    assert experts(batch) == [[NONE, NONE, 1, 2, NONE, NONE], [11, 12, 13, 14, 15, NONE]]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_several_layers_and_experts_in_each_dtype(dtype: torch.dtype) -> None:
    own = torch.arange(3 * 2 * 2).reshape(3, 2, 2).to(dtype)
    batch = aligned([Routed([7, 8, 9], own)], torch.tensor([[0, 7, 8, 9]]), torch.tensor([[0, 1, 1, 1]]))
    assert batch.dtype == dtype
    assert torch.equal(batch[0, 1:], own)
    assert (batch[0, 0] == no_route(dtype)).all()


def test_a_sequence_cut_at_its_end() -> None:
    """Its last token has had a row then."""
    long = Routed([7, 8, 9, 10], routes(1, 2, 3))
    batch = aligned([long], torch.tensor([[0, 7, 8, 9]]), torch.tensor([[0, 1, 1, 1]]))
    assert experts(batch) == [[NONE, 1, 2, 3]]


def test_a_completion_that_is_masked_out_is_padding() -> None:
    """As one that was cut at the longest length is, where such are left out of the loss."""
    sequences = [Routed([7, 8, 9], routes(1, 2)), Routed([7, 8], routes(3, 4)), Routed([7, 8], routes(5, 6))]
    ids = torch.tensor([[0, 7, 8, 9], [0, 7, 8, 0], [0, 7, 8, 0]])
    mask = torch.tensor([[0, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0]])
    batch = aligned(sequences, ids, mask)
    assert experts(batch) == [[NONE, 1, NONE, NONE], [NONE, 3, 4, NONE], [NONE] * 4]


def test_padding_between_prompt_and_completion_has_no_route() -> None:
    ids, mask = torch.tensor([[7, 0, 0, 8, 9]]), torch.tensor([[1, 0, 0, 1, 1]])
    assert experts(aligned([Routed([7, 8, 9], routes(1, 2))], ids, mask)) == [[1, NONE, NONE, 2, NONE]]


@pytest.mark.parametrize("own", [[7, 8], [7, 9, 8], [8, 9], [7, 8, 10, 11]])
def test_other_tokens_than_were_routed(own: list[int]) -> None:
    """Too few, in another order, without the first, another one."""
    ids = torch.tensor([[7, 8, 9], [7, 8, 9]])
    sequences = [Routed([7, 8, 9], routes(1, 2)), Routed(own, routes(*range(len(own))))]
    with pytest.raises(ValueError, match="sequence 1 of the rollout has other tokens"):
        aligned(sequences, ids, torch.ones_like(ids))


@pytest.mark.parametrize("number", [1, 3])
def test_more_or_fewer_sequences_than_rows(number: int) -> None:
    with pytest.raises(ValueError, match=f"{number} sequences have routes, and the batch has 2"):
        aligned([Routed([7], routes(1))] * number, torch.tensor([[7], [7]]), torch.ones(2, 1))


WIDE = routes(300, -1, dtype=torch.int16)
NARROW = routes(3, NONE)


@pytest.mark.parametrize("wide_first", [True, False])
def test_sequences_of_different_dtypes_keep_their_experts(wide_first: bool) -> None:
    """As an engine's routes have, of which the highest expert of each decides."""
    both = [Routed([7, 8], WIDE), Routed([7, 8], NARROW)]
    batch = aligned(both if wide_first else both[::-1], torch.tensor([[7, 8], [7, 8]]), torch.ones(2, 2))
    assert experts(to_engine(batch)) == ([[300, -1], [3, -1]] if wide_first else [[3, -1], [300, -1]])


@pytest.mark.parametrize("wide_first", [True, False])
def test_turns_of_different_dtypes_keep_their_experts(wide_first: bool) -> None:
    wide, narrow = routes(300, -1, 301, dtype=torch.int16), routes(3, NONE, 4)
    first = Routed([7, 8], WIDE if wide_first else NARROW)
    (whole,) = stitched([[first], [Routed([7, 8, 9, 10], narrow if wide_first else wide)]])
    assert experts(to_engine(whole.routes)) == ([300, -1, 4, -1] if wide_first else [3, -1, 301, -1])


# Of the same beginning


@pytest.mark.parametrize("none", [255, -1])
def test_sequences_that_begin_alike_share_the_routes_of_the_first_that_has_some(none: int) -> None:
    dtype = torch.uint8 if none == 255 else torch.int16
    own = torch.tensor(
        [[1, none, none, 4], [5, 6, 7, 8], [9, 10, none, 12], [13, 14, none, 16]],
        dtype=dtype,
    )[..., None, None]
    prefixes = torch.tensor([[3, 4, 5], [3, 4, 6], [3, 4, 5], [3, 4, 5]])
    given = own.clone()
    result = shared(own, prefixes)
    assert torch.equal(own, given)
    assert experts(result) == [[1, 10, none, 4], [5, 6, 7, 8], [1, 10, none, 12], [1, 10, none, 16]]
    assert torch.equal(shared(result, prefixes), result)


def test_sequences_that_all_begin_in_their_own_way_share_nothing() -> None:
    own = torch.arange(3 * 2 * 2 * 2, dtype=torch.uint8).reshape(3, 2, 2, 2)
    assert torch.equal(shared(own, torch.tensor([[1, 2], [2, 1], [-1, 1]])), own)


def test_all_layers_are_those_of_one_sequence() -> None:
    own = torch.arange(2 * 1 * 3 * 2, dtype=torch.uint8).reshape(2, 1, 3, 2)
    assert torch.equal(shared(own, torch.tensor([[5], [5]]))[1], own[0])


def test_from_an_engine_to_a_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    draw = lambda tokens: torch.rand(tokens, 2, 6, generator=generator).argsort(-1)[..., :2].int()
    prompt, first, tool, second = [1, 2], [3, 4], [5], [6, 7]
    turn_1, turn_2 = draw(3), draw(6)
    (whole,) = stitched(
        [
            [Routed(prompt + first, from_engine(turn_1))],
            [Routed(prompt + first + tool + second, from_engine(turn_2))],
        ]
    )
    ids = torch.tensor([[0, *whole.ids, 0]])
    batch = aligned([whole], ids, ids != 0)
    none = torch.full((1, 2, 2), -1, dtype=torch.int32)
    expected = torch.cat([none, turn_1, turn_2[3:], none, none])
    assert torch.equal(to_engine(batch[0]), expected)
