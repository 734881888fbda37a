"""A checkpoint gives back the objects that a script has put into rollouts and metrics, or plain types or text."""

import datetime
import decimal
import enum
import fractions
import types
import warnings
from collections import OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trl_steady.core.state_file import read_state, write_state


class Word(enum.StrEnum):
    FIRST = "first"


class Number(enum.IntEnum):
    SEVEN = 7


class Impedance(complex):
    pass


class Vector(torch.Tensor):
    pass


class Weird:
    def __str__(self) -> str:
        return "weird"


RECORDS = np.rec.fromrecords([(1, 0.5), (2, 1.5)], names="a,b")  # as `df.to_records()`
KEPT: list[Any] = [
    *(None, True, 3, 0.1, 1 + 2j, "text", b"bytes", bytearray(b"more"), Path("a") / "b"),
    *(np.float64(0.1), np.float32(0.1), np.int64(3), np.bool_(True), np.str_("text"), np.datetime64("2020-01-02")),
    *(np.ones((2, 3), np.float16), np.arange(6).reshape(2, 3).T, np.array(["a", "bc"]), np.array(3.0)),
    *(torch.tensor(0.5), torch.arange(3, dtype=torch.int32), torch.ones(2, dtype=torch.bfloat16)),
    *((1, "two"), [[], {}], {"a": [np.float64(1)]}, {1, 2}),
]


def loaded(value: Any, folder: Path) -> Any:
    write_state({"column": [value]}, folder / "state.pt")
    return read_state(folder / "state.pt", "cpu")["column"][0]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        *((value, value) for value in KEPT),
        (Word.FIRST, "first"),
        (Number.SEVEN, 7),
        (OrderedDict(a=1), {"a": 1}),
        (defaultdict(list, a=[1]), {"a": [1]}),
        (types.MappingProxyType({"a": Path("b")}), {"a": Path("b")}),
        (deque([1, 2]), [1, 2]),
        (range(3), [0, 1, 2]),
        (decimal.Decimal("1.5"), 1.5),
        (fractions.Fraction(1, 4), 0.25),
        (frozenset({1}), {1}),
        (Impedance(1, 2), 1 + 2j),
        ({frozenset({1}), range(2)}, {(1,), (0, 1)}),
        ({frozenset({1}): "a", (frozenset({2}), 3): "b"}, {(1,): "a", ((2,), 3): "b"}),
        (np.array([None, Path("a")], dtype=object), [None, Path("a")]),
        (RECORDS[0], (1, 0.5)),
        (RECORDS, [(1, 0.5), (2, 1.5)]),
        (np.asarray(RECORDS), [(1, 0.5), (2, 1.5)]),
        (torch.eye(2).to_sparse(), torch.eye(2)),
        (torch.ones(2).as_subclass(Vector), torch.ones(2)),
        (torch.ones(2, requires_grad=True) * 2, torch.full((2,), 2.0)),
    ],
    ids=repr,
)
def test_what_is_saved_is_loaded(tmp_path: Path, given: Any, expected: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = loaded(given, tmp_path)
    assert type(found) is type(expected)
    if isinstance(expected, (torch.Tensor, np.ndarray)):
        assert found.dtype == expected.dtype and found.shape == expected.shape and bool((found == expected).all())
        assert not getattr(found, "requires_grad", False)
    else:
        assert found == expected


@pytest.mark.parametrize("given", [Weird(), datetime.date(2020, 1, 2), len, Weird], ids=str)
def test_other_objects_become_text_with_a_warning(tmp_path: Path, given: Any) -> None:
    with pytest.warns(UserWarning, match=rf"a checkpoint holds a .*{type(given).__qualname__} of a rollout as text"):
        assert loaded(given, tmp_path) == str(given)
