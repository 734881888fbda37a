"""Suggestions for misspelt names."""

import difflib
from collections.abc import Iterable
from typing import Any

__all__ = ["near"]


def near(given: Any, names: Iterable[Any], form: str = "{!r}") -> str:
    """Return " Did you mean ...?" with the known name closest to `given`, or "" if none is close.

    Args:
        given: The name to look up. Case does not matter.
        names: The known names. Values that are not strings are ignored.
        form: Format of the suggested name, for `str.format`.
    """
    by_case = {name.lower(): name for name in names if isinstance(name, str)}
    matches = difflib.get_close_matches(str(given).lower(), by_case, n=1, cutoff=0.7)
    return f" Did you mean {form.format(by_case[matches[0]])}?" if matches else ""
