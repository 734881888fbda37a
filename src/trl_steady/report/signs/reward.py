"""Signs in the reward: it is missing, constant, flat, or it falls."""

import math

import numpy as np

from trl_steady.report.history import History, Series, counted
from trl_steady.report.signs.common import Found, alike, lasting_fall, not_numbers, of_all_groups
from trl_steady.report.statistics import (
    HEALTHY_TREND,
    Fall,
    blocks,
    change,
    last_sixth,
    noise,
    sixths,
    trend,
)

TOP_QUARTER = 0.75
"""A share above it has little room to rise: at most a third more can be gained."""
ONE_SIDED = 1.64
"""Standard errors that a mean is off by in one of 20 cases, in one direction."""


def learnt(history: History) -> Series:
    """Return the reward, or the share of right answers where a reward model that is retrained gives it."""
    if "reward_model/true" in history.keys:
        return blocks(history, "reward_model/true")
    return blocks(history, "reward")


def is_share(values: np.ndarray) -> bool:
    """Tell whether all values are between 0 and 1."""
    return bool(values.min(initial=0) >= 0 and values.max(initial=1) <= 1)


def is_solved(reward: np.ndarray) -> np.ndarray:
    """Tell which rewards are at the top, if the reward is a share."""
    return (reward >= 0.9) & is_share(reward)


def as_share(values: np.ndarray) -> np.ndarray | None:
    """Return a reward as a share of its range, or None if that is not known.

    The worst reward is 0, or the lowest of a log. The best is 1, or one above that several logs have.
    """
    best = max(values.max(initial=0), 1.0)
    if best > 1 and (values == best).sum() < 2:
        return None
    worst = values.min(initial=0)
    return (values - worst) / (best - worst)


def starts_high(values: np.ndarray) -> bool:
    """Tell whether a reward starts in the top quarter of its range, and has not lost half of that since."""
    shares = as_share(values)
    if shares is None or not len(shares):
        return False
    part = max(len(shares) // 6, 3)
    first = shares[:part].mean()
    return bool(first >= TOP_QUARTER and shares[-part:].mean() >= first / 2)


def learns(history: History) -> bool:
    """Tell whether the reward has risen and stays up, or is near its top, or cannot be judged: yet, or at all."""
    values = learnt(history).values
    if len(values) < 6 or history.is_flagged("reward", "kept_only"):
        return True
    spread = history.finite_values("reward_std")
    if np.ptp(values) < 0.01 * spread.max(initial=0):  # each group's mean is subtracted
        return True
    if starts_high(values):
        return True
    level = sixths(values)
    # the noise of a single log, or three errors of a sixth's median
    least = noise(values) * max(1.0, 3.75 * math.sqrt(6 / len(values)))
    has_risen = level.max() - level[0] > least
    third = len(values) // 3
    is_surely_up = change(values, third, third).z > HEALTHY_TREND
    is_up = level[-1] > (level[0] + level.max()) / 2
    is_lost = level.max() - level[-1] > noise(values)
    may_rise = trend(values) > 1.3 and not is_lost  # one of ten without a trend
    if (has_risen and is_up) or is_surely_up or may_rise:
        return True
    newest = is_solved(values)[-1 - len(values) // 6 :]
    return bool(newest.mean() > 0.5)


def _functions(history: History) -> list[str]:
    """Return the metrics that are the means of single reward functions."""
    return sorted(key for key in history.keys if key.startswith("rewards/") and key.endswith("/mean"))


# Signs. They have the name of the symptom.


def too_few_rollouts(history: History) -> Found | None:
    """Find a run that has ended before anything can be said."""
    count = 0
    if "reward" in history.keys:
        count = len(history["reward"].steps)
    elif max((len(history[key].steps) for key in history.keys), default=0) >= 6:
        return None  # other metrics can be judged
    if count >= 6:
        return None
    text = f"{counted(count, 'log')} of the reward"  # a log can be the mean of several rollouts
    if count:
        logs = max(len(history[key].steps) for key in history.keys)
        if logs >= history.last_step:
            text = counted(count, "rollout")
    return Found(0, "", text)


def reward_missing(history: History) -> Found | None:
    """Find a reward that is NaN, in total or in all functions, or that is no longer logged."""
    steps = history["reward"].steps
    found = not_numbers(history, ["reward"]) or not_numbers(history, _functions(history))
    if found is not None:
        return found
    usual = np.diff(steps).max(initial=1)
    last = max(history[key].steps[-1] for key in history.keys)  # in a gap of the log, nothing is missing
    missing = last - steps[-1]
    if len(steps) <= 2 or missing <= 4 * usual:
        return None
    return Found(int(steps[-1] + usual), "reward", f"not logged for {missing} steps")


def reward_constant(history: History) -> Found | None:
    """Find a reward that is the same in each log, of at least two, and in each group if that is logged."""
    steps, values = history[of_all_groups(history, "reward")].finite
    spread = history.finite_values("reward_std")
    if len(values) < 2 or np.ptp(values) or spread.any():
        return None
    if not history.is_over:
        # the next group may be the first that is not all wrong
        least = 20 if values[0] in (-1, 0, 1) else 10
        is_flat = len(values) >= least
    elif "reward_std" in history.keys:
        is_flat = len(spread) > 0
    else:
        is_flat = len(values) >= 3
    if not is_flat:
        return None
    return Found(int(steps[0]), "reward", f"{values[0]:.4g} in {counted(len(values), 'log')}")


def reward_part_missing(history: History) -> Found | None:
    """Find a reward function that has never returned a number, beside one that has."""
    functions = _functions(history)
    silent = [key for key in functions if not len(history[key].finite.values)]
    if not silent or silent == functions:
        return None
    least = 6 if history.is_over else 50  # it may judge rare prompts only
    if len(history["reward"].steps) < least:
        return None
    return Found(1, ", ".join(silent), "NaN in each log")


def reward_part_constant(history: History) -> Found | None:
    """Find reward functions that give all answers the same, while the total varies."""
    least = 10 if history.is_over else 30  # a rare success may still come
    total = history["reward"].finite.values
    if len(total) < least or alike(total):
        return None
    constant: list[str] = []
    texts: list[str] = []
    for key in _functions(history):
        values = history[key].finite.values
        spread = history.finite_values(key.removesuffix("mean") + "std")
        if len(values) < least or not alike(values) or spread.any() or _is_earned(history, key, values[0]):
            continue
        constant.append(key)
        texts.append(f"{values[0]:.3g}")
    if not constant:
        return None
    return Found(1, ", ".join(constant), f"{', '.join(texts)} in each of {len(total)} logs")


def parts_are_full(history: History) -> bool:
    """Tell whether no reward function is far below 1: a sum over several can be near 1, and far from its top."""
    for key in _functions(history):
        values = history.finite_values(key)
        if len(values) and last_sixth(values).mean() < 0.9:
            return False
    return True


def _is_earned(history: History, key: str, value: float) -> bool:
    """Tell whether a constant is no fault: a penalty that no answer gets, or points for all in a run that learns."""
    if value == 0:
        return any(word in key.lower() for word in ("penal", "punish", "overlong", "repet"))
    return value > 0 and learns(history)


def reward_falls(history: History) -> Found | None:
    """Find a reward that was good, and has fallen to half of that for good."""
    steps, values = blocks(history, of_all_groups(history, "reward"), None)
    spread = history.finite_values("reward_std")
    spread = spread[spread > 0]  # groups that are all wrong do not show how far answers differ
    fall = lasting_fall(history, values, float(spread.mean()) if len(spread) else 0.0)
    if fall is None:
        return None
    text = f"{fall.high:.3g} before, {fall.low:.3g} since"
    lengths = shrunk(history)
    if lengths:
        text = f"{text}; {lengths}"
    return Found(int(steps[fall.start]), "reward", text, {"shrinks": bool(lengths)})


def shrunk(history: History) -> str:
    """Return how long answers were and are if they have shrunk to a third or less, else an empty text."""
    key = "completions/mean_length"
    if key not in history.keys:
        return ""
    values = history.finite_values(key)
    if len(values) < 12:
        return ""
    first = float(np.median(values[:3]))
    last = float(sixths(values)[-1])
    if last > first / 3:
        return ""
    return f"{key} {first:.3g} to {last:.3g}"


def reward_part_falls(history: History) -> Found | None:
    """Find a reward function that falls to half for good while another rises, and the total does not fall."""
    functions = _functions(history)
    if len(functions) < 2:
        return None
    rising: list[str] = []
    falling: list[tuple[str, int, Fall]] = []
    for key in functions:
        steps, values = blocks(history, key, None)
        spread = history.finite_values(key.removesuffix("mean") + "std")
        fall = lasting_fall(history, values, float(spread.mean()) / 2 if len(spread) else 0.0)
        if fall is not None:
            falling.append((key, int(steps[fall.start]), fall))
        elif len(values) >= 6 and trend(values) > HEALTHY_TREND:
            rising.append(key)
    if not rising or not falling or reward_falls(history) is not None:
        return None
    key, since, fall = falling[0]
    return Found(since, key, f"{fall.high:.3g} before, {fall.low:.3g} since, while {', '.join(rising)} rises")


def usual_spread(history: History) -> float:
    """Return the usual standard deviation within a group; 0 if it is not known."""
    spread = history.finite_values("reward_std")
    if not len(spread):
        return 0.0
    return float(spread.mean())
