"""Statistics that one outlier does not move: medians of rollouts, ranks, and sums that grow while most are bad."""

import math

import numpy as np

from trl_steady.report.history import History, Series

HEALTHY_TREND = 2.6  # z-score that a series without a trend exceeds once in 200 times, in one direction


def blocks(history: History, key: str, quantile: float = 0.5) -> Series:
    """Return a quantile for each rollout, or for each of at most 200 longer stretches."""
    steps, values = history[key]
    is_number = ~np.isnan(values)
    steps = steps[is_number]
    values = np.clip(values[is_number], -1e30, 1e30)
    rollouts = len(values)
    if "reward" in history.keys:
        rollouts = len(history["reward"].steps)
    size = max(round(len(values) / max(rollouts, 1)), math.ceil(len(values) / 200), 1)
    rows = values[: len(values) // size * size].reshape(-1, size)
    method = "lower" if quantile < 0.5 else "higher"
    return Series(steps[: rows.size : size], np.quantile(rows, quantile, axis=1, method=method))


def stretch(bad: np.ndarray, least: int = 3) -> slice | None:
    """Return the stretch in which most are bad (CUSUM), if these are at least `least` and last to the end.

    The sum grows by 0.3 at a bad value and falls by 0.7 at a good one. The stretch is its climb from the lowest point.
    """
    sums = np.concatenate([[0.0], np.cumsum(bad - 0.7)])
    start = int(np.argmin(sums))
    end = start + int(np.argmax(sums[start:]))
    if sums[-1] - sums[start] < 0.3 * least - 0.05:
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


def trend(values: np.ndarray) -> float:
    """Return the z-score of Mann and Kendall's rank trend."""
    n = len(values)
    pairs = np.triu(np.sign(values[None, :] - values[:, None]), 1).sum()
    return float(pairs / math.sqrt(max(n * (n - 1) * (2 * n + 5) / 18, 1)))
