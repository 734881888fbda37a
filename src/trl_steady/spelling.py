"""Suggestions for misspelt names."""

import difflib
from collections.abc import Sequence

__all__ = ["near"]


def near(name: str, known: Sequence[str], prefix: str = "") -> str:
    """Return " Did you mean ...?" for a misspelt name, "" where nothing is like it."""
    matches = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {prefix}{matches[0]}?" if matches else ""
