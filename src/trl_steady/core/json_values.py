"""Settings as JSON, to be compared with those of another run."""

from collections.abc import Mapping, Sequence, Set
from typing import Any


def as_json(value: Any) -> Any:
    """Return a value as JSON types. Functions and objects become names."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, Set):  # whose order differs from one run of Python to the next
        return sorted(map(as_json, value), key=str)
    if isinstance(value, Sequence):
        return [as_json(item) for item in value]
    if hasattr(value, "tolist"):  # arrays, tensors and NumPy's numbers
        return as_json(value.tolist())
    return getattr(value, "__name__", type(value).__name__)
