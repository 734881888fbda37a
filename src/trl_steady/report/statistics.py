"""Statistics that one outlier does not move: medians of rollouts, ranks, and sums that grow while most are bad."""

import math
from typing import NamedTuple

import numpy as np

from trl_steady.report.history import History, Series

HEALTHY_TREND = 2.6  # z-score that a series without a trend exceeds once in 200 times, in one direction


def blocks(history: History, key: str, quantile: float | None = 0.5) -> Series:
    """Return a quantile, or the mean, for each rollout, or for each of at most 200 longer stretches."""
    steps, values = history[key]
    is_number = ~np.isnan(values)
    steps = steps[is_number]
    values = np.clip(values[is_number], -1e30, 1e30)
    rollouts = len(values)
    if "reward" in history.keys:
        rollouts = len(history["reward"].steps)
    size = max(round(len(values) / max(rollouts, 1)), math.ceil(len(values) / 200), 1)
    rows = values[: len(values) // size * size].reshape(-1, size)
    firsts = steps[: rows.size : size]
    if quantile is None:
        return Series(firsts, rows.mean(axis=1))
    method = "lower" if quantile < 0.5 else "higher"
    return Series(firsts, np.quantile(rows, quantile, axis=1, method=method))


def mostly_bad(bad: np.ndarray, least: int = 3) -> slice | None:
    """Return the part in which most values are bad; None if there is none, or if the good ones after it outweigh it.

    It has at least `least` bad values. A sum grows by 0.3 at a bad value and falls by 0.7 at a good one (CUSUM). The
    part is its climb from the lowest point to the highest after it.
    """
    sums = np.concatenate([[0.0], np.cumsum(bad - 0.7)])
    start = int(np.argmin(sums))
    end = start + int(np.argmax(sums[start:]))
    if sums[-1] - sums[start] < 0.3 * least - 0.05:  # for rounding
        return None
    return slice(start, end)


def running_median(values: np.ndarray) -> np.ndarray:
    """Return the median of each value and of its neighbours: a twelfth of the series on each side."""
    wide = max(len(values) // 12, 1)
    medians = np.empty(len(values))
    for index in range(len(values)):
        medians[index] = np.median(values[max(index - wide, 0) : index + wide + 1])
    return medians


def sixths(values: np.ndarray) -> np.ndarray:
    """Return the medians of six parts of equal length."""
    return np.array([np.median(part) for part in np.array_split(values, 6)])


def noise(values: np.ndarray) -> float:
    """Return the standard deviation around a slow trend, if it is normal."""
    return 1.05 * float(np.median(np.abs(np.diff(values))))


def deviation(values: np.ndarray) -> float:
    """Return the standard deviation around a slow trend. Rare jumps count, as in a reward that is mostly 0."""
    if len(values) < 2:
        return 0.0
    return math.sqrt(float(np.mean(np.diff(values) ** 2)) / 2)


def _without_jump(values: np.ndarray) -> float:
    """Return the standard deviation around a slow trend, without the largest step."""
    steps = np.sort(np.abs(np.diff(values)))[:-1]
    return math.sqrt(float(np.mean(steps**2)) / 2)


def trend(values: np.ndarray) -> float:
    """Return the z-score of Mann and Kendall's rank trend."""
    n = len(values)
    pairs = np.triu(np.sign(values[None, :] - values[:, None]), 1).sum()
    return float(pairs / math.sqrt(max(n * (n - 1) * (2 * n + 5) / 18, 1)))


def chance_of(is_bad: np.ndarray, usual: float) -> float:
    """Return Chernoff's bound on the chance of at least as many bad values, if each is bad with a usual share."""
    share = float(is_bad.mean())
    usual = min(max(usual, 0.02), 1.0)
    if share <= usual:
        return 1.0
    exponent = share * math.log(share / usual)
    if share < 1:
        exponent += (1 - share) * math.log((1 - share) / (1 - usual))
    return math.exp(-len(is_bad) * exponent)


def chance_of_order(is_bad: np.ndarray) -> float:
    """Return the chance that as many bad values come late, anywhere, if the same values came in any order.

    It is Kolmogorov and Smirnov's one-sided chance: exact up to 200 values, else that of a Brownian bridge.
    """
    total = len(is_bad)
    bad = int(is_bad.sum())
    if bad in (0, total):
        return 1.0
    share = bad / total
    most = float((np.arange(1, total + 1) * share - np.cumsum(is_bad)).max())
    if total > 200:
        return math.exp(-2 * most**2 / (share * (1 - share) * total))
    drawn = np.arange(bad + 1)
    chances = np.zeros(bad + 1)  # of so many bad values that were drawn, if fewer never came than in `is_bad`
    chances[0] = 1.0
    for count in range(1, total + 1):
        is_next_bad = chances * (bad - drawn) / (total - count + 1)
        chances = chances - is_next_bad
        chances[1:] += is_next_bad[:-1]
        chances[count * share - drawn >= most - 1e-9] = 0.0
    return 1.0 - float(chances.sum())


class Change(NamedTuple):
    """The change of a level, with its uncertainty."""

    amount: float
    error: float
    """The standard error of `amount`."""

    @property
    def z(self) -> float:
        """The change in standard errors."""
        return self.amount / max(self.error, 1e-12)


def change(values: np.ndarray, first: int, last: int) -> Change:
    """Return the change from the mean of the first values to that of the last ones.

    Args:
        values: The values of a series.
        first: Number of values at the start.
        last: Number of values at the end.
    """
    amount = float(values[-last:].mean() - values[:first].mean())
    return Change(amount, deviation(values) * math.sqrt(1 / first + 1 / last))


class Fall(NamedTuple):
    """A level that was held, and a lower one that has lasted since."""

    start: int
    """The index of the first value of the lower level."""
    high: float
    low: float
    z: float
    """The difference in standard errors."""


def deepest_fall(values: np.ndarray, least_before: int = 3, least_after: int = 5) -> Fall | None:
    """Return the split of a series into a level and a lower one to its end whose difference is the surest.

    The level before is the mean of any stretch that ends at the split, so that a rise before it does not count.
    """
    n = len(values)
    if n < least_before + least_after:
        return None
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(least_before, n - least_after + 1)
    starts = np.arange(0, n)
    lengths = ends[None, :] - starts[:, None]
    is_long = lengths >= least_before
    lengths = np.maximum(lengths, 1)
    before = (sums[ends][None, :] - sums[:n][:, None]) / lengths
    after = (sums[n] - sums[ends]) / (n - ends)
    error = max(_without_jump(values), 1e-12) * np.sqrt(1 / lengths + 1 / (n - ends)[None, :])
    z = np.where(is_long, (before - after[None, :]) / error, -np.inf)
    start, split = np.unravel_index(int(z.argmax()), z.shape)
    return Fall(int(ends[split]), float(before[start, split]), float(after[split]), float(z[start, split]))


def last_sixth(values: np.ndarray) -> np.ndarray:
    """Return the last sixth of the values, or three if that is more."""
    return values[-max(len(values) // 6, 3) :]
