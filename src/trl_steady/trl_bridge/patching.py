"""Replace attributes of an object."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def patched(target: object, values: Mapping[str, Any]) -> Generator[None]:
    """Replace attributes of an object inside this context."""
    attributes = vars(target)
    before = dict(attributes)
    attributes.update(values)
    try:
        yield
    finally:
        for name in values:
            if name in before:
                attributes[name] = before[name]
            else:
                del attributes[name]


def replace(target: object, values: Mapping[str, Any]) -> None:
    """Replace attributes of an object for good."""
    vars(target).update(values)
