"""Statistics over batches, processes and time, computed from totals that can be added.

Quantiles and effective sample sizes of small batches cannot be averaged to those of the whole. Each batch therefore
yields totals, a float64 vector. The totals are added, and the statistic is computed from their sum. Only `greatest`
values are joined by `torch.maximum`.

Values may have any shape. A mask of this shape tells which of them count (True). Selecting them by an index would make
the CPU wait for a GPU.
"""

import functools
import math

import torch
from torch import Tensor

_PER_DECADE = 50
_EDGES = 1e-9 * 10 ** (torch.arange(12 * _PER_DECADE + 1, dtype=torch.float64) / _PER_DECADE)  # up to 1e3
_edges_on = functools.cache(_EDGES.to)  # a device, to which they are copied once


def mean_totals(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the totals of values that `mean` needs.

    >>> mean(mean_totals(torch.tensor([1.0, 2.0])) + mean_totals(torch.tensor([6.0])))
    3.0
    """
    values, counts = _counted(values, mask)
    return torch.stack([values.sum(), counts.sum()])


def mean(totals: Tensor) -> float:
    """Return the mean of all values in `totals`, or NaN if there are none."""
    total, count = map(float, totals)
    if not count:
        return math.nan
    return total / count


def greatest(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the greatest value, (1,), or -inf if there are none."""
    values, counts = _counted(values, mask)
    return values.where(counts > 0, -torch.inf).max().view(1)


def sample_size_totals(log_weights: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the totals of log importance weights that `effective_sample_size` needs."""
    log_weights, counts = _counted(log_weights, mask)
    weights = log_weights.exp() * counts
    return torch.stack([weights.sum(), (weights**2).sum(), counts.sum()])


def effective_sample_size(totals: Tensor) -> float:
    """Return Kish's effective sample size as a share of the n samples, (sum w)² / (n sum w²).

    It is 1 for equal weights, 1/n if one sample has all the weight, and NaN if there are no samples, or if their
    weights are all too large or too small for float64.

    >>> log_weights = torch.tensor([1.0, 1.0, 1.0, 3.0]).log()
    >>> round(effective_sample_size(sample_size_totals(log_weights)), 6)  # 36 / (4 * 12)
    0.75
    """
    total, squares, count = map(float, totals)
    if not count or not squares:
        return math.nan
    return total * total / (count * squares)  # total**2 would raise an OverflowError


def histogram(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """Count values without NaN for `quantile`, in bins 4.7 % wide on both sides of zero, from 1e-9 to 1e3."""
    values, counts = _counted(values, mask)
    counts = counts * ~values.isnan()
    values = values.nan_to_num()
    bins = torch.bucketize(values.abs(), _edges_on(values.device)) * values.sign().long()
    return counts.new_zeros(2 * len(_EDGES) + 1).scatter_add_(0, (bins + len(_EDGES)).flatten(), counts.flatten())


def quantile(counts: Tensor, share: float) -> float:
    """Return the value that a `share` of the values in a `histogram` does not exceed, to within 2.4 % of itself.

    Values below 1e-9 in size are returned as 0, and values from 1e3 on as 977, with their sign. The result is NaN if
    there are no values.

    >>> counts = histogram(torch.tensor([-0.5, 0.0, 0.001, 0.002])) + histogram(torch.tensor([0.003]))
    >>> quantile(counts, 0.4), round(quantile(counts, 0.8), 5)
    (0.0, 0.00204)
    """
    reached = counts.cumsum(0)
    if not reached[-1]:
        return math.nan
    position = int((reached < share * reached[-1]).sum()) - len(_EDGES)
    if position == 0:
        return 0.0
    index = min(abs(position), len(_EDGES) - 1)
    middle = _EDGES[index] * 10 ** (-0.5 / _PER_DECADE)
    return math.copysign(float(middle), position)


def _counted(values: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return float64 values, 0 in place of those that do not count, and 1 for each value that counts, otherwise 0."""
    counts = torch.ones_like(values, dtype=torch.float64)
    if mask is not None:
        counts = counts * mask
    return values.detach().double().where(counts > 0, 0), counts
