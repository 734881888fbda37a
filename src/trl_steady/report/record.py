"""A record: numbers that a log shows together, and what counts as a number."""

import math
import re
from typing import NamedTuple

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_ROUNDED_ZERO = re.compile(r"\s*[-+]?0?\.0{2,}\s*$")
_WRAPPED = re.compile(rf"(?:np\.\w+|numpy\.\w+|tensor)\(\s*({NUMBER}|nan|-?inf)\s*(?:,[^()]*)?\)")
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")


class Rounded(float):
    """A zero that was printed with a fixed number of digits, such as 0.000: it may be a small number."""


class Record(NamedTuple):
    """Numbers that a log shows together."""

    form: str
    """"dict", "pairs", "cells", "line", "block", "table", "box", or "bar" for a progress bar without numbers."""
    label: str
    """The words before the step: "Global step", "rollout". For a bar, those before it."""
    step: int | None
    values: dict[str, float]
    last: int | None = None
    """The step at which the run will end."""
    is_cut: bool = False
    """True for a dictionary without its end."""


def number(text: str) -> float | None:
    """Return the number that a text shows, also as a string or as np.float64(...), or None if it shows none."""
    try:
        value = float(text)
    except ValueError:
        return _wrapped_number(text)
    if value == 0 and _ROUNDED_ZERO.match(text):
        return Rounded(value)
    return value


def _wrapped_number(text: str) -> float | None:
    text = text.strip()
    if text in ("None", "null"):  # TRL and JSON have it for NaN
        return math.nan
    if len(text) > 2 and text[0] == text[-1] and text[0] in "'\"":
        return number(text[1:-1])
    wrapped = _WRAPPED.fullmatch(text)
    if wrapped is not None:
        return number(wrapped[1])
    if _THOUSANDS.fullmatch(text):
        return float(text.replace(",", ""))
    return None
