"""Agreement among processes, and the rows of one among those of all."""

from accelerate import Accelerator
from accelerate.utils import gather_object


def own_rows(accelerator: Accelerator, count: int) -> slice:
    """Return the rows of this process in what all processes have gathered, each `count` rows."""
    first = accelerator.process_index * count
    return slice(first, first + count)


def first_reason(reason: str | None) -> str | None:
    """Return the first reason of any process, so that all decide alike. Otherwise they would wait for one another."""
    return next(filter(None, gather_object([reason])), None)


def any_process(is_so: bool) -> bool:
    """Return True if something is so on any process. Every process must call this function."""
    return first_reason("yes" if is_so else None) is not None
