"""Statistics of samples that come in batches, over processes and time: what adds up, and what follows from the sum.

A mean of quantiles or of effective sample sizes over small batches is none of the whole. Here each batch gives totals,
a float64 vector; totals add; and the statistic is read off their sum.
"""

import math

import torch
from torch import Tensor

__all__ = [
    "LARGEST_COUNT",
    "count_mean",
    "count_quantile",
    "count_totals",
    "effective_sample_size",
    "histogram",
    "mean",
    "mean_totals",
    "quantile",
    "sample_size_totals",
]

LARGEST_COUNT = 4096
_PER_DECADE = 50
_EDGES = 1e-9 * 10 ** (torch.arange(12 * _PER_DECADE + 1, dtype=torch.float64) / _PER_DECADE)  # to 1e3


def mean_totals(values: Tensor) -> Tensor:
    """What `mean` needs of (n,) values.

    >>> mean(mean_totals(torch.tensor([1.0, 2.0])) + mean_totals(torch.tensor([6.0])))
    3.0
    """
    values = values.double()
    return torch.stack([values.sum(), values.new_tensor(len(values))])


def mean(totals: Tensor) -> float:
    """Of all values that went into `totals`; NaN where there were none."""
    total, count = (float(x) for x in totals)
    return total / count if count else math.nan


def sample_size_totals(log_weights: Tensor) -> Tensor:
    """What `effective_sample_size` needs of (n,) log importance weights."""
    weights = log_weights.double().exp()
    return torch.stack([weights.sum(), (weights**2).sum(), weights.new_tensor(len(weights))])


def effective_sample_size(totals: Tensor) -> float:
    """Kish's (sum w)² / (n sum w²), as a share of the n samples: 1 for equal weights, 1/n where one has all of it.

    NaN where there were none.

    >>> log_weights = torch.tensor([1.0, 1.0, 1.0, 3.0]).log()
    >>> round(effective_sample_size(sample_size_totals(log_weights)), 6)  # 36 / (4 * 12)
    0.75
    """
    total, squares, count = (float(x) for x in totals)
    return total**2 / (count * squares) if count else math.nan


def histogram(values: Tensor) -> Tensor:
    """Counts for `quantile` of (n,) values but NaN, in bins 4.7 % wide on both sides of zero, 1e-9 to 1e3."""
    values = values[~values.isnan()].double()
    bins = torch.bucketize(values.abs(), _EDGES.to(values.device)) * values.sign().long()
    return torch.bincount(bins + len(_EDGES), minlength=2 * len(_EDGES) + 1).double()


def count_totals(counts: Tensor) -> Tensor:
    """How many of (n,) counts are 0, 1, 2 and so on; from `LARGEST_COUNT` on they count as that."""
    return torch.bincount(counts.long().clamp(max=LARGEST_COUNT), minlength=LARGEST_COUNT + 1).double()


def count_mean(totals: Tensor) -> float:
    """Of all counts that went into `totals`; NaN where there were none.

    >>> totals = count_totals(torch.tensor([1, 1])) + count_totals(torch.tensor([3, 7]))
    >>> count_mean(totals), count_quantile(totals, 0.5), count_quantile(totals, 0.75)
    (3.0, 1, 3)
    """
    number = float(totals.sum())
    counts = torch.arange(len(totals), dtype=totals.dtype, device=totals.device)
    return float(totals @ counts) / number if number else math.nan


def count_quantile(totals: Tensor, share: float) -> float:
    """The count that a `share` of those in `totals` does not exceed; NaN where there were none."""
    reached = totals.cumsum(0)
    return int((reached < share * reached[-1]).sum()) if reached[-1] else math.nan


def quantile(counts: Tensor, share: float) -> float:
    """The value that a `share` of those counted by `histogram` does not exceed, to within 2.4 % of itself.

    0 stands for anything below 1e-9 in size, 977 for all from 1e3 on; NaN where nothing was counted.

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
