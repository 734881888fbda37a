"""Signs of a reward that does not rise."""

import numpy as np

from trl_steady.report.history import History
from trl_steady.report.signs.common import Found, alike, of_all_groups
from trl_steady.report.signs.groups import all_alike, all_cut_off
from trl_steady.report.signs.reward import ONE_SIDED, TOP_QUARTER, as_share, shrunk, starts_high, usual_spread
from trl_steady.report.statistics import HEALTHY_TREND, blocks, change, noise, trend


def reward_flat(history: History) -> Found | None:
    """Find a reward that has not risen in more than half of the training, and that would show it if it had."""
    steps, values = history[of_all_groups(history, "reward")].finite
    spread = usual_spread(history)
    if len(values) < 10 or share_done(history) < 0.5:
        return None
    if alike(values) or np.ptp(values) < 0.01 * spread:  # a constant, or each group's mean is subtracted
        return None
    third = len(values) // 3
    # the noise of few values is not well known: Student's t. A run that trains is looked at many times
    student = 1.5 / (len(values) - 2)
    certain = student + (ONE_SIDED if history.is_over else HEALTHY_TREND)
    rise = change(values, third, third)
    sinks = rise.z < -HEALTHY_TREND
    if starts_high(values) and not (sinks and _ends_low(values)):
        return None
    most = rise.amount + certain * rise.error
    if not history.is_over:  # what is left of the training may add as much again
        most /= share_done(history)
    if _has_risen(values, ONE_SIDED + student) or most > (spread or noise(values)) / 2:
        return None
    if trend(blocks(history, "reward", None).values) > ONE_SIDED + student:
        return None
    texts = [f"{values[:third].mean():.3g} in the first third of the logs, {values[-third:].mean():.3g} in the last"]
    is_still = not sinks and not all_alike(history) and not all_cut_off(history)
    for key, floor in _MOVES.items():
        if key in history.keys and is_still:
            text, has_moved = _movement(history, key, floor)
            texts.append(text)
            is_still = not has_moved
    is_still = is_still and len(texts) > 1
    lengths = shrunk(history) if sinks else ""
    if lengths:
        texts.append(lengths)
    facts = {
        "sinks": sinks,
        "shrinks": bool(lengths),
        "still": is_still,
        "frozen": is_still and _is_frozen(history),
    }
    return Found(int(steps[0]), "reward", "; ".join(texts), facts)


# what a policy that moves changes -> the least change of its level
_MOVES = {"kl": 0.02, "entropy": 0.05, "completions/mean_length": 1.0}


def _movement(history: History, key: str, floor: float) -> tuple[str, bool]:
    """Return the levels of a metric at the start and at the end, and whether it has moved by more than its noise."""
    values = history[key].finite.values
    third = len(values) // 3
    if third < 3:
        return f"{key} in few logs", False
    moved = change(values, third, third)
    before = float(values[:third].mean())
    has_moved = abs(moved.amount) > max(floor, 0.1 * abs(before)) and abs(moved.z) > HEALTHY_TREND
    return f"{key} {before:.3g} to {before + moved.amount:.3g}", has_moved


def _is_frozen(history: History) -> bool:
    """Tell whether the KL is 0 in each log, although most updates have a gradient. Some log 0 if they compute none."""
    if "kl" not in history.keys or "grad_norm" not in history.keys or history.settings.get("beta") == 0:
        return False
    kl = history["kl"].finite.values
    gradient = history["grad_norm"].finite.values
    return len(kl) >= 10 and not kl.any() and len(gradient) > 0 and bool(np.median(gradient) > 0)


def _has_risen(values: np.ndarray, sure: float) -> bool:
    """Tell whether a reward has risen at any time, even if it was early or has been lost again."""
    third = len(values) // 3
    for first in (third, max(third // 2, 3), max(third // 4, 3)):
        if change(values, first, third).z > sure:
            return True
    sixth = max(third // 2, 3)
    best = max(part.mean() for part in np.array_split(values, 6))
    # the best of six exceeds a level by 2 errors more often than not
    return best - values[:sixth].mean() > 3 * change(values, sixth, sixth).error


def _ends_low(values: np.ndarray) -> bool:
    """Tell whether a reward whose range is known ends below its top quarter."""
    shares = as_share(values)
    return shares is not None and bool(shares[-(len(shares) // 3) :].mean() < TOP_QUARTER)


def share_done(history: History) -> float:
    """Return the share of the training that is done, in learning rate: its sum over the steps."""
    planned = history.settings.get("max_steps") or 0
    if planned <= history.last_step:
        return float(history.is_over or planned > 0)
    left = planned - history.last_step
    done = history.last_step
    if "learning_rate" not in history.keys:
        return done / planned
    rates = history["learning_rate"].finite.values
    if not len(rates) or not rates.any():
        return done / planned
    rate_left = rates[-1]
    if rates[-1] < rates.max():  # it decays, to 0 by default
        rate_left = rates[-1] / 2
    return float(rates.mean() * done / (rates.mean() * done + rate_left * left))
