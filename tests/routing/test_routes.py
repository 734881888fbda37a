"""Routes as data, like mathematics: worked by hand, there and back, and what is refused."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.tools.passes import to_engine
from trl_steady.routing.routes import (
    dtype_of,
    from_engine,
    is_route,
    no_route,
    no_routes,
    shared,
)


def experts(of: Tensor) -> list[Any]:
    return of.squeeze((-2, -1)).tolist()


@pytest.mark.parametrize(
    ("num_experts", "dtype", "missing"),
    [
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
    assert not is_route(no_routes((3, 1), dtype, torch.device("cpu"))).any()


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
    [(7, torch.uint8), (254, torch.uint8), (255, torch.int16), (2**15 - 1, torch.int16), (2**15, torch.int32)],
)
@pytest.mark.parametrize("source", ["int64", "lists"])
def test_an_engines_routes_keep_their_experts(highest: int, dtype: torch.dtype, source: str) -> None:
    given = drawn(highest)
    taken = from_engine(given.tolist() if source == "lists" else given.numpy().astype(source))
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
    filled = drawn(7)[:, :1].repeat(1, len(layers), 1)
    given = torch.zeros(7, 4, 2, dtype=torch.int32)
    given[:, layers] = filled
    assert torch.equal(to_engine(from_engine(given, layers=layers)), filled)
    assert torch.equal(to_engine(from_engine(filled, layers=layers)), filled)


def test_routes_of_a_smaller_model_are_refused() -> None:
    with pytest.raises(ValueError, match="routes of 3 layers, and the model has routers in its decoder layers 1, 3"):
        from_engine(drawn(7), layers=[1, 3])


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 3, 2), dtype=np.int32), r"token 0 in layer 0 are \[0, 0\]"),
        ([[[1, 0], [2, 3]], [[3, 1], [0, 0]]], r"token 1 in layer 1 are \[0, 0\]"),
        ([[[4, 2, 1, 4]]], r"token 0 in layer 0 are \[4, 2, 1, 4\]"),
        ([[[1, 0]], [[3, -1]]], r"token 1 in layer 0 are \[3, -1\]"),
        ([[[-1, -1, 0]]], r"token 0 in layer 0 are \[-1, -1, 0\]"),
    ],
)
def test_rows_that_an_engine_has_not_filled_in_are_refused(array: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_engine(array)


# Of the same beginning


@pytest.mark.parametrize("none", [255, -1])
def test_sequences_that_begin_alike_share_the_routes_of_the_first_that_has_some(none: int) -> None:
    dtype = torch.uint8 if none == 255 else torch.int16
    routes_of_rows = torch.tensor(
        [[1, none, none, 4], [5, 6, 7, 8], [9, 10, none, 12], [13, 14, none, 16]],
        dtype=dtype,
    )[..., None, None]
    prefixes = torch.tensor([[3, 4, 5], [3, 4, 6], [3, 4, 5], [3, 4, 5]])
    given = routes_of_rows.clone()
    result = shared(routes_of_rows, prefixes)
    assert torch.equal(routes_of_rows, given)
    assert experts(result) == [[1, 10, none, 4], [5, 6, 7, 8], [1, 10, none, 12], [1, 10, none, 16]]
    assert torch.equal(shared(result, prefixes), result)
