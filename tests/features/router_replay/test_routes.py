"""Routes as data, like mathematics: worked by hand, there and back, and what is refused."""

import base64
import io
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.features.router_replay.passes import to_engine
from trl_steady.features.router_replay.routes import from_engine, is_route, route_dtype, share_prefix_routes


@pytest.mark.parametrize(
    ("num_experts", "dtype", "missing"),
    [(255, torch.uint8, 255), (256, torch.int16, -1), (2**15, torch.int16, -1), (2**15 + 1, torch.int32, -1)],
)
def test_the_dtype_has_room_for_every_expert_and_for_none(num_experts: int, dtype: torch.dtype, missing: int) -> None:
    assert route_dtype(num_experts) == dtype
    last = torch.tensor([[num_experts - 1]]).to(dtype)
    assert last.item() == num_experts - 1
    assert is_route(last).all()
    assert not is_route(torch.full_like(last, missing)).any()


def test_an_engines_routes_by_hand() -> None:
    taken = from_engine([[[3, 0], [1, 2]], [[-1, -1], [2, 3]]], [0, 1])
    assert taken.dtype == torch.uint8
    assert taken.tolist() == [[[3, 0], [1, 2]], [[255, 255], [2, 3]]]
    for source in ("uint8", "int16", "uint16"):
        array = np.array([[[0, 255]], [[7, 3]]], dtype=source)
        assert to_engine(from_engine(array, [0])).tolist() == [[[0, 255]], [[7, 3]]]


def drawn(highest: int) -> Tensor:
    """(T, L, K) as engines give it: distinct experts up to the highest, which is there, and rows without."""
    generator = torch.Generator().manual_seed(highest)
    given = torch.rand(7, 3, highest + 1, generator=generator).argsort(-1)[..., :2].int()
    given[torch.rand(7, 3, generator=generator) < 0.3] = -1
    given[0, 0], given[0, 1] = torch.tensor([highest, 0]), -1
    return given


@pytest.mark.parametrize(("highest", "dtype"), [(254, torch.uint8), (255, torch.int16), (2**15, torch.int32)])
def test_an_engines_routes_keep_their_experts(highest: int, dtype: torch.dtype) -> None:
    given = drawn(highest)
    file = io.BytesIO()
    np.save(file, given.numpy().astype("int64"))
    for source in (given.tolist(), base64.b64encode(file.getvalue()).decode()):
        taken = from_engine(source, range(3))
        assert taken.dtype == dtype
        assert torch.equal(is_route(taken), given[..., 0] >= 0)
        assert torch.equal(to_engine(taken), given)


def test_an_engine_may_have_rows_for_layers_without_routers() -> None:
    """Which nobody has filled in."""
    for layers in ([1, 3], [0, 1, 2, 3]):
        filled = drawn(7)[:, :1].repeat(1, len(layers), 1)
        given = torch.zeros(7, 4, 2, dtype=torch.int32)
        given[:, layers] = filled
        assert torch.equal(to_engine(from_engine(given, layers)), filled)
        assert torch.equal(to_engine(from_engine(filled, layers)), filled)
    with pytest.raises(IndexError):
        from_engine(drawn(7), [1, 3])


@pytest.mark.parametrize(
    ("array", "message"),
    [
        ([[[1, 0], [2, 3]], [[3, 1], [0, 0]]], r"token 1 in layer 1 are \[0, 0\]"),
        ([[[4, 2, 1, 4]]], r"token 0 in layer 0 are \[4, 2, 1, 4\]"),
        ([[[-1, -1, 0]]], r"token 0 in layer 0 are \[-1, -1, 0\]"),
    ],
)
def test_rows_that_an_engine_has_not_filled_in_are_refused(array: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_engine(array, range(len(array[0])))


@pytest.mark.parametrize("highest", [200, 500])
def test_an_expert_that_is_there_twice_is_found_in_any_two_places(highest: int) -> None:
    """It stands twice among 8, in the second layer of the last token. The row before it has no route."""
    experts = [highest, 0, 7, 3, 100, 64, 8, 1]
    good = torch.tensor([[experts, experts[::-1]], [[-1] * 8, experts], [experts, experts]])
    assert torch.equal(to_engine(from_engine(good, [0, 1])), good.int())
    for one, other in itertools.combinations(range(8), 2):
        bad = good.clone()
        bad[2, 1, other] = bad[2, 1, one]
        with pytest.raises(ValueError, match="token 2 in layer 1"):
            from_engine(bad, [0, 1])


def test_an_answer_without_tokens_has_no_routes() -> None:
    assert from_engine(np.zeros((0, 2, 8), dtype="int32"), [0, 1]).shape == (0, 2, 8)


@pytest.mark.parametrize("none", [255, -1])
def test_sequences_that_begin_alike_share_the_routes_of_the_first_that_has_some(none: int) -> None:
    dtype = torch.uint8 if none == 255 else torch.int16
    rows = [[1, none, none, 4], [5, 6, 7, 8], [9, 10, none, 12], [13, 14, none, 16]]
    given = torch.tensor(rows, dtype=dtype)[..., None, None]
    prefixes = torch.tensor([[3, 4, 5], [3, 4, 6], [3, 4, 5], [3, 4, 5]])
    result = share_prefix_routes(given, prefixes)
    assert given.squeeze((-2, -1)).tolist() == rows
    expected = [[1, 10, none, 4], [5, 6, 7, 8], [1, 10, none, 12], [1, 10, none, 16]]
    assert result.squeeze((-2, -1)).tolist() == expected
