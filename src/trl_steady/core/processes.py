"""Rows of one process among those of all."""

from accelerate import Accelerator


def own_rows(accelerator: Accelerator, count: int) -> slice:
    """Return the rows of this process in what all processes have gathered, each `count` rows."""
    first = accelerator.process_index * count
    return slice(first, first + count)
