"""Sequences of a micro-batch: which of them a pass computes."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from trl_steady.core.devices import copy_async


def rows_to_compute(is_needed: Sequence[bool], *, least: int = 0) -> list[int]:
    """Return the rows that are needed, and others, so that each process has as many, and at least `least`."""
    needed: list[int] = []
    others: list[int] = []
    for row, needs_pass in enumerate(is_needed):
        if needs_pass:
            needed.append(row)
        else:
            others.append(row)
    count = max(gather_object([len(needed)]))
    count = max(count, least)
    return sorted(needed + others[: count - len(needed)])


def select_sequences(inputs: Mapping[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """Return some sequences of a micro-batch. An input that has no rows is the same for all."""
    indices = copy_async(torch.tensor(rows, dtype=torch.long), inputs["completion_ids"].device)

    selected: dict[str, Any] = {}
    for name, values in inputs.items():
        if not has_rows(values):
            selected[name] = values
        elif isinstance(values, Tensor):
            selected[name] = values[indices]
        else:
            selected[name] = [values[row] for row in rows]
    return selected


def has_rows(values: object) -> bool:
    """Return True if an input has a row for each sequence: a tensor, an array, a list or a tuple."""
    return isinstance(values, (list, tuple)) or getattr(values, "ndim", 0) > 0
