"""Signs in the length of answers: they are cut off, they grow, or the reward pays for them."""

import math

import numpy as np

from trl_steady.report.history import History
from trl_steady.report.signs.common import Found, exceeds, lasts
from trl_steady.report.signs.groups import one_length
from trl_steady.report.signs.policy import grows
from trl_steady.report.statistics import blocks, change, mostly_bad, noise, sixths

_LENGTH = "completions/mean_length"
_CUT_OFF = "completions/clipped_ratio"


def answers_masked(history: History) -> Found | None:
    """Find updates without a loss because all answers are cut off, and the loss leaves out those."""
    if not history.settings.get("mask_truncated_completions", True):
        return None
    steps, share = blocks(history, _CUT_OFF)
    entropy = blocks(history, "entropy", 1.0).values
    gradient = blocks(history, "grad_norm", 1.0).values
    count = min(len(share), len(entropy), len(gradient))
    is_cut_off = share[:count] >= 0.99
    has_no_loss = (entropy[:count] == 0) & (gradient[:count] == 0)
    where = lasts(history, is_cut_off & has_no_loss)
    seen = entropy[:count][entropy[:count] > 0]
    has_collapsed = seen.max(initial=0) > 3 * seen.min(initial=math.inf)
    if where is None or has_collapsed:
        return None
    return Found(int(steps[where.start]), _CUT_OFF, "100 %, and no answer has a gradient")


def answers_cut_off(history: History) -> Found | None:
    """Find answers of which most are cut off, or that all have the same length in each log."""
    history.require(_CUT_OFF, _LENGTH)
    # half; recorded runs have up to 11 %
    found = exceeds(history, _CUT_OFF, 0.5, of_rollouts=True)
    if found is None and _CUT_OFF not in history.keys:
        found = one_length(history)
    if found is None:
        return None
    first = blocks(history, found.metric).steps[0]
    is_worth_it = _rises(history) and not _pays(history)
    return found._replace(facts={"cut_off_from_start": found.since <= first, "reward_rises": is_worth_it})


def _rises(history: History) -> bool:
    values = blocks(history, "reward", None).values
    third = len(values) // 3
    return third > 0 and change(values, third, third).z > 2


def _pays(history: History) -> bool:
    """Tell whether the reward pays for length: then a higher limit feeds it."""
    return _LENGTH in history.keys and length_rewarded(history) is not None


def answers_grow(history: History) -> Found | None:
    """Find answers that become at least twice as long, without a reward that rises."""
    # 20 tokens are a sentence
    return grows(history, _LENGTH, "tokens", floor=20.0)


def length_rewarded(history: History) -> Found | None:
    """Find answers that grow, and a reward whose changes from rollout to rollout are those of the length."""
    steps, length = history[_LENGTH].finite
    reward = history["reward"].finite.values
    count = min(len(length), len(reward))
    if count < 18:
        return None
    length = length[:count]
    reward = reward[:count]
    start = float(np.median(length[:3]))
    end = float(sixths(length)[-1])
    grown = np.flatnonzero(length > start + 0.95 * (end - start))
    if end < 1.5 * start or end - start < noise(length) or not len(grown):
        return None
    # at a limit, lengths say nothing: what has led there is looked at
    growth = slice(0, count)
    together = 0.8  # recorded healthy runs have 0.5
    if len(length) - grown[0] > count // 3 and grown[0] >= 9:
        growth = slice(0, int(grown[0]) + 1)
    if growth.stop < 18:
        together = 0.9
    correlation = _correlation(length[growth], reward[growth])
    where = mostly_bad(length > (start + end) / 2)
    if where is None or correlation < together:
        return None
    text = f"{start:.3g} to {end:.3g} tokens; correlation with the reward's changes {correlation:.2f}"
    return Found(int(steps[where.start]), _LENGTH, text)


def _correlation(length: np.ndarray, reward: np.ndarray) -> float:
    """Return the smaller correlation of two kinds of changes.

    The changes of two curves that rise together, as in reasoning, have a correlation; their third differences none.
    """
    together = 1.0
    for order in (1, 3):
        length_changes = np.diff(length, order)
        reward_changes = np.diff(reward, order)
        if not np.ptp(length_changes) or not np.ptp(reward_changes):
            return 0.0
        together = min(together, float(np.corrcoef(length_changes, reward_changes)[0, 1]))
    return together
