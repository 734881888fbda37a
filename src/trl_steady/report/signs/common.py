"""The result of a sign, and the signs that several symptoms have. Their arguments stand in symptoms.toml."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from trl_steady.report.history import History, Series
from trl_steady.report.statistics import (
    HEALTHY_TREND,
    Fall,
    blocks,
    chance_of,
    deepest_fall,
    mostly_bad,
    noise,
    running_median,
    trend,
)

SURE_FALL = 6.0
"""Standard errors of a fall to half, at the end of a run. Real runs that learn end below 5.1, lost ones above 14."""
SURE_DIP = 8.0
"""Standard errors of a fall to a third, while a run trains. A real run that recovered had a dip of 6.8."""
LEAST_GOOD = 0.05
"""Share of the range of a reward below which it has never been good."""
SURE_LOSS = 5.0
"""Standard errors of a fall to less than a tenth."""


class Found(NamedTuple):
    """Signs of a symptom."""

    since: int
    """The optimizer step at which it began."""
    metric: str
    """The metric that shows it, or "" for a setting or a warning."""
    evidence: str
    """The numbers that show it."""
    facts: Mapping[str, bool] = {}
    """Facts that the log shows beside it. Advice can depend on them as on settings."""


# Signs of several symptoms.


def beyond(history: History, limits: Sequence[Mapping[str, Any]]) -> Found | None:
    """Find the metric that was beyond its limit first, of those that were logged. `exceeds` has the arguments."""
    known: list[str] = []
    signs: list[Found] = []
    for limit in limits:
        key = limit["key"]
        if not history.is_flagged(key, "sum"):  # the limits are of means
            known.append(key)
            sign = exceeds(history, **limit)
            if sign is not None:
                signs.append(sign)
    if not known:
        raise KeyError(f"{limits[0]['key']} as a mean")
    history.require(*known)
    if not signs:
        return None
    return min(signs, key=lambda sign: sign.since)


def exceeds(
    history: History,
    key: str,
    limit: float,
    unit: str = "%",
    below: bool = False,
    q: float | None = 0.75,
    least: int = 3,
    stays: bool = False,
    of_rollouts: bool = False,
) -> Found | None:
    """Find a metric that is above a limit, or below it, for at least `least` rollouts.

    `q` is the quantile over the updates of a rollout that is compared with the limit. With `stays`, it has no trend
    to the better side. With `of_rollouts`, it is a share of the answers or groups of a rollout: then means are
    compared, because a rollout of few groups has 0 or 1, and a stretch that chance gives does not count.
    """
    if key not in history.keys:
        return None
    if of_rollouts:
        q = None
    steps, values = blocks(history, key, q)
    if below:
        side = "below"
        is_beyond = values < limit
    else:
        side = "above"
        is_beyond = values > limit
    where = mostly_bad(is_beyond, least)
    if where is None:
        return None
    if stays:
        improvement = trend(values) if below else -trend(values)
        if improvement > HEALTHY_TREND:
            return None
    usual = float(np.median(values[where]))
    if of_rollouts:
        usual = float(np.mean(values[where]))
        is_within = usual >= limit if below else usual <= limit
        if is_within or _may_be_chance(history, is_beyond, where):
            return None
    return Found(int(steps[where.start]), key, f"{_with_unit(usual, unit)}, {side} {_with_unit(limit, unit)}")


def _may_be_chance(history: History, is_beyond: np.ndarray, where: slice) -> bool:
    """Tell whether one in a hundred runs has such a stretch by chance, wherever it begins."""
    if where.start == 0 and history.is_over:  # the whole run has not been chosen
        return False
    others = len(is_beyond) - len(is_beyond[where])
    beyond = int(is_beyond.sum() - is_beyond[where].sum())
    usual = (beyond + 1) / (others + 2)
    if not history.is_over:
        # A run that trains is looked at often, with few other logs at first. A level at the limit exceeds it in half
        # of the logs.
        usual = max(usual, 0.5)
    return chance_of(is_beyond[where], usual) * len(is_beyond) > 0.01


def _with_unit(number: float, unit: str) -> str:
    if unit == "%":
        number = 100 * number
    return f"{number:.3g} {unit}".rstrip()


def noted(history: History, texts: Sequence[str]) -> Found | None:
    """Find warnings of the run that have one of these texts."""
    notes: list[str] = []
    for note in history.run["notes"]:
        if any(text in str(note) for text in texts):
            notes.append(str(note))
    if not notes:
        return None
    return Found(0, "", " ".join(notes))


def parted(history: History, rising: Sequence[str], falling: Sequence[str]) -> Found | None:
    """Find a metric that falls from its peak while another rises or stays up. The first known ones are compared."""
    up = history.first(*rising)
    down = history.first(*falling)
    rise = blocks(history, up)
    fall = blocks(history, down)
    if len(fall.values) < 6 or not len(rise.values):
        return None
    smooth = running_median(fall.values)
    peak = int(smooth.argmax())
    end = float(np.median(fall.values[-3:]))
    has_fallen = smooth[peak] - end >= 2 * noise(fall.values)
    falls_on = trend(fall.values[peak:]) <= -HEALTHY_TREND
    stays_low = lasting_fall(history, fall.values) is not None  # at its floor, it falls no more
    if not has_fallen or not (falls_on or stays_low):
        return None
    until = max(fall.steps[peak], rise.steps[0])  # the first log of ten steps comes after an evaluation at step 5
    before = rise.values[rise.steps <= until]
    after = rise.values[rise.steps > until]
    if not len(before) or len(after) < 3:
        return None
    gained = float(np.median(after[-3:]) - np.median(before[-3:]))
    if gained < 0:
        return None
    at_the_peak = smooth >= smooth[peak] - noise(fall.values) / 2
    began = int(fall.steps[at_the_peak][-1])
    return Found(began, down, f"{smooth[peak]:.3g} to {end:.3g}, {up} {gained:+.3g}")


def lasting_fall(history: History, values: np.ndarray, spread: float = 0.0) -> Fall | None:
    """Return a fall to half that has lasted to the end.

    Args:
        history: The log.
        values: A reward, or another metric of which more is better, in blocks.
        spread: Its usual standard deviation within a group, or 0.
    """
    fall = deepest_fall(values)
    if fall is None:
        return None
    lost = fall.high - fall.low
    worst = values.min(initial=0)
    if history.is_over:
        halfway = worst + (fall.high - worst) / 2
        sure = SURE_FALL
    else:  # it may recover
        halfway = worst + (fall.high - worst) / 3
        sure = SURE_DIP
    if worst == 0 and fall.low < fall.high / 10:
        sure = SURE_LOSS
    after = values[fall.start :]
    is_low_now = after[-max(len(after) // 3, 3) :].mean() <= halfway
    least = spread / 2 or 3 * noise(values)
    if fall.z < sure or fall.low > halfway or lost < least or not is_low_now:
        return None
    logs = len(history["reward"].values) / max(len(values), 1)  # in each value, which may be a mean of several
    return fall if _was_good(values, fall, logs) else None


def _was_good(values: np.ndarray, fall: Fall, logs: float) -> bool:
    """Tell whether at least three logs before a fall had a reward to lose: more than rare successes."""
    worst = values.min(initial=0)
    good = worst + LEAST_GOOD * (values.max(initial=1) - worst)
    return bool((values[: fall.start] >= good).sum() * logs >= 3)


# Helpers about a series.


def mean_over_tokens(history: History, key: str) -> str:
    """Return the key of a metric that is a mean over tokens. Raises KeyError if this log has a sum over them."""
    if history.is_flagged(key, "sum"):
        raise KeyError(f"{key} as a mean over tokens")
    return key


def per_rollout(history: History, key: str) -> Series:
    """Return a metric that is a mean over tokens, as one median for each rollout. Raises as `mean_over_tokens`."""
    return blocks(history, mean_over_tokens(history, key))


def of_all_groups(history: History, key: str) -> str:
    """Return the key of a metric of all groups. Raises KeyError if this log leaves out groups without an advantage."""
    if history.is_flagged(key, "kept_only"):
        raise KeyError(f"{key} of all groups")
    return key


def lasts(history: History, bad: np.ndarray, *, to_end: bool = False, least: int = 3) -> slice | None:
    """Return the stretch of bad values.

    In a run that is over, one is enough if all values are bad or, with `to_end`, if the last are.
    """
    good = np.flatnonzero(~bad)
    start = int(good[-1]) + 1 if len(good) else 0
    if history.is_over and start < len(bad) and (to_end or start == 0):
        return slice(start, len(bad))
    return mostly_bad(bad, least)


def not_numbers(history: History, keys: Sequence[str], *, to_end: bool = False, least: int = 3) -> Found | None:
    """Find metrics that stop being numbers, all of those that were logged. `lasts` has the other arguments."""
    known: list[str] = []
    since: list[int] = []
    for key in keys:
        if key not in history.keys:
            continue
        known.append(key)
        steps, values = history[key]
        where = lasts(history, ~np.isfinite(values), to_end=to_end, least=least)
        if where is None:
            return None
        since.append(int(steps[where.start]))
    if not since:
        return None
    return Found(max(since), ", ".join(known), "NaN")


def never_a_number(history: History, key: str) -> Found | None:
    """Find a metric that is NaN in each log, of at least two."""
    steps, values = history[key]
    if len(values) < 2 or np.isfinite(values).any():
        return None
    return Found(int(steps[0]), key, f"NaN in {len(values)} logs")


def alike(values: np.ndarray) -> bool:
    """Tell whether all values are the same, up to rounding."""
    return float(np.ptp(values)) <= 1e-9 * float(np.abs(values).max(initial=0)) + 1e-30


def median_gap(steps: np.ndarray) -> float:
    """Return the usual number of steps from one log to the next."""
    if len(steps) < 2:
        return math.inf
    return float(np.median(np.diff(steps)))
