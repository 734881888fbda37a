"""Measure how far each inexact comparison of the tests stays from its bound: `pytest --headroom 4`.

A bound that was found on one CPU fails on another one, whose kernels round otherwise. With `--headroom FACTOR`, every
comparison that is not bit for bit has to keep its error below its bound by that factor, or, where the test wants a
difference, above it. This covers `torch.testing.assert_close`, `torch.allclose`, `pytest.approx` and `within`.
"""

import functools
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._comparison import default_tolerances

_HERE = Path(__file__).parents[1]
_COMPARES = re.compile(r"\b(approx|assert_close|allclose|within)\(")

_compared: list[tuple[float, str]] = []
"""Error over bound of each comparison of the running test, and its file and line."""


def within(error: Tensor | float, bound: Tensor | float, *, granted: Tensor | float = 0.0) -> bool:
    """Return whether no error exceeds its bound, and let `--headroom` see by how much.

    `granted` is the part of an error that is there on every machine: half a bin of a histogram, the last digit of a
    printed figure, a cast to bfloat16. The bound is for the rest.
    """
    errors, bounds = (torch.as_tensor(each, dtype=torch.float64).detach() for each in (error, bound))
    errors = (errors - granted).clamp(min=0)
    _note(_ratio(errors, bounds))
    return bool((errors <= bounds).all())


def _ratio(errors: Tensor, bounds: Tensor) -> float:
    """Return the largest error over its bound; 0 where nothing differs, NaN where nothing may differ."""
    if not bounds.any() or not errors.numel():
        return math.nan
    return float((errors / bounds).where(errors != 0, 0).max())


def _note(ratio: float) -> None:
    if math.isnan(ratio):
        return
    frame: Any = sys._getframe(2)
    while frame and (not str(frame.f_code.co_filename).startswith(str(_HERE)) or frame.f_globals is globals()):
        frame = frame.f_back
    place = f"{Path(frame.f_code.co_filename).relative_to(_HERE)}:{frame.f_lineno}" if frame else "?"
    _compared.append((ratio, place))


def _pairs(actual: Any, expected: Any) -> Iterable[tuple[Tensor, Tensor]]:
    """Return the tensors that `assert_close` compares with each other."""
    if isinstance(actual, Mapping) and isinstance(expected, Mapping):
        for key in actual.keys() & expected.keys():
            yield from _pairs(actual[key], expected[key])
    elif isinstance(actual, Sequence) and isinstance(expected, Sequence):
        for own, other in zip(actual, expected, strict=False):
            yield from _pairs(own, other)
    else:
        yield torch.as_tensor(actual), torch.as_tensor(expected)


def _of_tensors(actual: Tensor, expected: Tensor, rtol: float, atol: float) -> float:
    actual, expected = torch.broadcast_tensors(actual.detach().double(), expected.detach().double())
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    return _ratio((actual - expected).abs().where(~same, 0), atol + rtol * expected.abs())


def _assert_close(theirs: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(theirs)
    def assert_close(actual: Any, expected: Any, **options: Any) -> None:
        theirs(actual, expected, **options)
        for own, other in _pairs(actual, expected):
            rtol, atol = default_tolerances(own, other)
            rtol, atol = (rtol, atol) if options.get("rtol") is None else (options["rtol"], options["atol"])
            _note(_of_tensors(own, other, rtol, atol))

    return assert_close


def _allclose(theirs: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(theirs)
    def allclose(
        actual: Tensor, expected: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
    ) -> bool:
        _note(_of_tensors(actual, expected, rtol, atol))
        return theirs(actual, expected, rtol, atol, equal_nan)

    return allclose


def _equals(theirs: Callable[..., bool]) -> Callable[..., bool]:
    def equals(self: Any, actual: Any) -> bool:
        is_number = all(isinstance(each, int | float) for each in (actual, self.expected))
        if is_number and actual != self.expected and not math.isnan(self.expected):
            _note(_ratio(torch.tensor(float(abs(actual - self.expected))), torch.tensor(float(self.tolerance))))
        return theirs(self, actual)

    return equals


class Headroom:
    """Fails a test with a comparison that comes nearer to its bound than `factor`."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out the files that compare bits and names only."""
        measured = {path: bool(_COMPARES.search(path.read_text())) for path in {item.path for item in items}}
        config.hook.pytest_deselected(items=[item for item in items if not measured[item.path]])
        items[:] = [item for item in items if measured[item.path]]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Any:
        """Look at the comparisons of the test."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.testing, "assert_close", _assert_close(torch.testing.assert_close))
            patch.setattr(torch, "allclose", _allclose(torch.allclose))
            scalar = type(pytest.approx(1.0))
            patch.setattr(scalar, "__eq__", _equals(scalar.__eq__))
            _compared.clear()
            result = yield
        nearest: dict[str, float] = {}
        for ratio, place in _compared:
            factor = max(ratio, 1 / ratio) if ratio else math.inf
            nearest[place] = min(nearest.get(place, math.inf), factor)
        near = [f"{place}: {factor:.3g}" for place, factor in nearest.items() if factor < self._factor]
        if near:
            pytest.fail(f"nearer to the bound than a factor of {self._factor:g}: {', '.join(near)}", pytrace=False)
        return result
