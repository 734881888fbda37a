"""Runs beside each other: means over seeds, paired differences and their intervals."""

import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from trl_steady.report.history import History

_SEED = re.compile(r"(.*?)[-_./ ]*seed[-_ ]?(\d+)(?:\.json)?/*")
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
    """Return name -> seed -> run, from path -> run. A path that ends with `seed3` is the run with seed 3 of a name.

    A run whose name and seed another has keeps its whole path as its name.
    """
    named: dict[str, dict[int, History]] = {}
    matches = {path: _SEED.fullmatch(path) for path in runs}
    for path, run in runs.items():
        match = matches[path]
        name = path
        seed = 0
        if match and match[1] not in runs and int(match[2]) not in named.get(match[1], {}):
            name = match[1]
            seed = int(match[2])
        named.setdefault(name, {})[seed] = run
    return named


def compared(runs: Mapping[str, Mapping[int, History]]) -> tuple[str, dict[str, Comparison]]:
    """Compare the runs of each name with those of the first, seed by seed.

    Returns:
        The metric of the endpoint, which all runs have logged, and the comparisons by name. The endpoint is the mean
        of the last sixth of a run. Without a common metric, both are empty.
    """
    endpoint = _common_endpoint(runs)
    if not endpoint:
        return "", {}
    ends: dict[str, dict[int, float]] = {}
    for name, seeds in runs.items():
        ends[name] = {seed: _end(run[endpoint].finite.values) for seed, run in seeds.items()}
    baseline = next(iter(ends))
    comparisons: dict[str, Comparison] = {}
    for name, by_seed in ends.items():
        gains: list[float] = []
        if name != baseline:
            for seed in sorted(by_seed.keys() & ends[baseline].keys()):
                gains.append(by_seed[seed] - ends[baseline][seed])
        mean = float(np.mean(list(by_seed.values())))
        comparisons[name] = Comparison(len(by_seed), mean, np.array(gains))
    return endpoint, comparisons


def _common_endpoint(runs: Mapping[str, Mapping[int, History]]) -> str:
    """Return the first endpoint that all runs have logged, or ""."""
    for key in _ENDPOINTS:
        is_common = True
        for seeds in runs.values():
            for run in seeds.values():
                if not len(run.finite_values(key)):
                    is_common = False
        if is_common:
            return key
    return ""


def _end(values: np.ndarray) -> float:
    return float(values[-max(1, len(values) // 6) :].mean())
