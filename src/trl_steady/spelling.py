"""Suggestions for misspelt names."""

import difflib
from collections.abc import Iterable
from typing import Any

__all__ = ["near"]


def near(given: Any, names: Iterable[Any], form: str = "{!r}") -> str:
    """Return " Did you mean ...?" for the name that is most like what was given, "" where none is.

    Args:
        given: What may be misspelt, in whatever case.
        names: The known names; what is no text is left out.
        form: How to write the name, as for `str.format`.
    """
    by_case = {name.lower(): name for name in names if isinstance(name, str)}
    matches = difflib.get_close_matches(str(given).lower(), by_case, n=1, cutoff=0.7)
    return f" Did you mean {form.format(by_case[matches[0]])}?" if matches else ""
