"""Comparisons with a bound."""

import torch
from torch import Tensor


def within(error: Tensor | float, bound: Tensor | float, *, granted: Tensor | float = 0.0) -> bool:
    """Return whether no error exceeds its bound.

    `granted` is the part of an error that is there on every machine: half a bin of a histogram, the last digit of a
    printed figure, a cast to bfloat16. The bound is for the rest.
    """
    errors, bounds = (torch.as_tensor(each, dtype=torch.float64).detach() for each in (error, bound))
    return bool(((errors - granted).clamp(min=0) <= bounds).all())
