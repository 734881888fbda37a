"""Runs beside each other: means over seeds, paired differences and their intervals."""

import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from trl_steady.report.history import History

_ENDPOINTS = ("held-out greedy accuracy", "eval_reward", "reward")


class Comparison(NamedTuple):
    """The runs of one name beside those of another: seeds, mean of the endpoint, and (n,) its paired differences."""

    seeds: int
    mean: float
    gains: np.ndarray


def interval(gains: np.ndarray) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of the mean of (n,) differences, with 10,000 resamples."""
    picks = np.random.default_rng(0).integers(0, len(gains), (10_000, len(gains)))
    low, high = np.percentile(gains[picks].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)


def by_name(runs: Mapping[str, History]) -> dict[str, dict[int, History]]:
    """Return name -> seed -> run, from path -> run. A path that ends with `seed3` is the run with seed 3 of a name."""
    found: dict[str, dict[int, History]] = {}
    for path, run in runs.items():
        match = re.fullmatch(r"(.*?)[-_./ ]*seed[-_ ]?(\d+)(?:\.json)?/*", path)
        name, seed = (match[1], int(match[2])) if match and int(match[2]) not in found.get(match[1], {}) else (path, 0)
        found.setdefault(name, {})[seed] = run
    return found


def compared(runs: Mapping[str, Mapping[int, History]]) -> tuple[str, dict[str, Comparison]]:
    """Compare the runs of each name with those of the first, seed by seed.

    Returns:
        The metric of the endpoint, which all runs have logged, and the comparisons by name. The endpoint is the mean
        of the last sixth of a run. Without a common metric, both are empty.
    """
    everyone = [run for seeds in runs.values() for run in seeds.values()]
    shared = (key for key in _ENDPOINTS if all(key in run.keys and len(run[key].finite.values) for run in everyone))
    if (figure := next(shared, None)) is None:
        return "", {}
    ends = {
        name: {seed: _end(run[figure].finite.values) for seed, run in seeds.items()} for name, seeds in runs.items()
    }
    first, found = next(iter(ends)), dict[str, Comparison]()
    for name, of in ends.items():
        both = sorted(of.keys() & ends[first].keys()) if name != first else ()
        gains = np.array([of[seed] - ends[first][seed] for seed in both])
        found[name] = Comparison(len(of), float(np.mean(list(of.values()))), gains)
    return figure, found


def _end(values: np.ndarray) -> float:
    return float(values[-max(1, len(values) // 6) :].mean())
