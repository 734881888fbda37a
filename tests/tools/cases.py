"""Parameters of which `make test` runs a part, and `make test-slow` the others."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def cases(values: Iterable[Any], fast: Collection[Any] | int) -> list[Any]:
    """A test's parameters, of which `make test` runs those in `fast`, or the first so many. Tuples are several."""

    def slow(value: Any) -> Any:
        return pytest.param(*(value if isinstance(value, tuple) else [value]), marks=pytest.mark.slow)

    each = list(values)
    quick = each[:fast] if isinstance(fast, int) else fast
    assert all(value in each for value in quick), f"no case of these: {quick}"
    return [value if value in quick else slow(value) for value in each]
