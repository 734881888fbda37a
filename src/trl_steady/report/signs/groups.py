"""Signs in groups: their answers get the same reward, or they have one answer."""

import numpy as np

from trl_steady.report.history import History
from trl_steady.report.signs.common import LEAST_GOOD, Found, exceeds, of_all_groups
from trl_steady.report.signs.reward import is_share, parts_are_full
from trl_steady.report.statistics import HEALTHY_TREND, blocks, last_sixth, trend

_ALIKE = "frac_reward_zero_std"


def groups_of_one(history: History) -> Found | None:
    """Find advantages that are the scores, as verl has them for groups of one answer."""
    if "verl:critic/advantages/max" not in history.keys:  # no other framework logs it
        return None
    pairs: list[tuple[np.ndarray, np.ndarray]] = []
    for end in ("max", "min"):
        advantages = history[f"verl:critic/advantages/{end}"]
        scores = history[f"verl:critic/score/{end}"]
        if len(advantages.values) != len(scores.values):
            return None
        pairs.append((advantages.values, scores.values))
    for advantages, scores in pairs:
        if not np.allclose(advantages, scores, rtol=1e-3, atol=1e-6):
            return None
    # with more answers, the mean of the group is off, and at most a few rollouts look like this
    differ = np.abs(pairs[0][1] - pairs[1][1]) > 1e-6
    if differ.sum() < 3:
        return None
    text = f"the same as critic/score/max in {differ.sum()} logs"
    return Found(1, "critic/advantages/max", text)


def groups_all_right(history: History) -> Found | None:
    """Find groups whose answers are nearly all right: the reward is at its top, or it has risen to the top quarter.

    Problems that are solved from the start waste fewer groups, but all along.
    """
    found, place, has_risen = _equal_groups(history)
    if all_cut_off(history):  # then nothing has been solved
        return None
    if found is None:
        return _solved_from_the_start(history)
    return found if _is_at_top(place, has_risen) else None


def _solved_from_the_start(history: History) -> Found | None:
    """Find a reward of 0.9 or more at both ends, in a run that has wasted three quarters of its groups."""
    key = of_all_groups(history, _ALIKE)
    reward = blocks(history, "reward", None).values
    shares = history.finite_values(key)
    if len(reward) < 12 or not len(shares) or _is_ppo(history) or not is_share(reward) or not parts_are_full(history):
        return None
    wasted = float(shares.mean())
    if wasted < 0.75:
        return None
    sixth = len(reward) // 6
    first = float(reward[:sixth].mean())
    last = float(last_sixth(reward).mean())
    if min(first, last) < 0.9:
        return None
    return Found(1, key, f"{wasted:.2f} on average; reward {first:.3g} at the start, {last:.3g} at the end")


def groups_all_wrong(history: History) -> Found | None:
    """Find groups whose answers are nearly all wrong, of a policy that has never been better."""
    if _ALIKE not in history.keys:
        found = _all_zero(history)
        if found is not None:
            return found
    found, place, _ = _equal_groups(history)
    if found is None or place > 0.25:
        return None
    level = [part.mean() for part in np.array_split(blocks(history, "reward", None).values, 6)]
    if max(level) > 2 * level[-1] + 0.05:
        return None
    return found


def _all_zero(history: History) -> Found | None:
    """Find a reward that is never negative and nearly always 0: then each answer has 0, and no group differs."""
    steps, values = history[of_all_groups(history, "reward")].finite
    if len(values) < 20 or values.min() < 0 or values.max() == 0:
        return None
    is_zero = values == 0
    zeros = int(is_zero.sum())
    thirds = [part.mean() for part in np.array_split(values, 3)]
    was_better = max(thirds) > 2 * thirds[-1] + 0.05
    is_tiny = values.max() < LEAST_GOOD and zeros >= 0.9 * len(values)
    is_rare = zeros >= 0.8 * len(values) and last_sixth(is_zero).mean() >= 0.8 and not was_better
    if not is_tiny and not is_rare:
        return None
    return Found(int(steps[0]), "reward", f"0 in {zeros} of {len(values)} logs, at most {values.max():.2g}")


def groups_alike(history: History) -> Found | None:
    """Find groups whose answers nearly all get the same reward, which differs among groups or is neither."""
    if _ALIKE not in history.keys and "reward_std" in history.keys:
        return _without_spread(history)
    found, place, has_risen = _equal_groups(history)
    return found if place > 0.25 and not _is_at_top(place, has_risen) else None


def _without_spread(history: History) -> Found | None:
    """Find a spread within groups that is 0 in nearly all logs. Old versions of TRL log no share of equal groups."""
    steps, values = history["reward_std"].finite
    reward = history["reward"].finite.values
    if len(values) < 20 or len(reward) < 20 or _is_ppo(history) or not np.ptp(reward):
        return None
    last = float(last_sixth(reward).mean())
    is_between = 0.25 < last < 0.75 or not is_share(reward)  # else, all are right or all are wrong
    is_zero = values == 0
    recent = last_sixth(is_zero)
    if is_zero.all() or is_zero.mean() < 0.8 or recent.mean() < 0.8:
        return None
    if not is_between or trend(reward) > HEALTHY_TREND:
        return None
    return Found(int(steps[0]), "reward_std", f"0 in {int(is_zero.sum())} of {len(values)} logs")


def _is_at_top(place: float, has_risen: bool) -> bool:
    return place >= 0.9 or (has_risen and place >= 0.75)


def _equal_groups(history: History) -> tuple[Found | None, float, bool]:
    """Find groups whose answers nearly all get the same reward.

    Returns:
        What was found; where the last rewards are between the worst, 0, and the best, 1, or 0.5 if that is not known;
        and whether the reward has risen.
    """
    # recorded runs reach 1 in single rollouts, and none stays above 0.9
    key = of_all_groups(history, _ALIKE)
    history.require(key)
    found = exceeds(history, key, 0.9, least=6, of_rollouts=True)
    reward = blocks(history, "reward", None).values
    if found is None or _is_ppo(history) or len(reward) < 6:
        return None, 0.5, False
    low, high = reward.min(), reward.max()
    if low == high and low not in (0, 1):  # a constant reward
        return None, 0.5, False
    last = float(last_sixth(reward).mean())
    has_risen = trend(reward) > HEALTHY_TREND
    wasted = history[_ALIKE].finite.values.mean()
    found = found._replace(evidence=f"{found.evidence}; reward {last:.3g}; {wasted:.0%} of all groups were wasted")
    if is_share(reward):
        return found, last, has_risen
    if abs(trend(reward)) > HEALTHY_TREND:  # it has shown its range
        return found, (last - low) / (high - low), has_risen
    return found, 0.5, has_risen


def _is_ppo(history: History) -> bool:
    """Tell whether a group can be one answer."""
    return history.settings.get("num_generations") == 1 or any(key.startswith("value/") for key in history.keys)


def all_alike(history: History) -> bool:
    """Tell whether nearly all groups give no advantage."""
    if _ALIKE not in history.keys:
        return False
    return exceeds(history, _ALIKE, 0.9, least=6, of_rollouts=True) is not None


def all_cut_off(history: History) -> bool:
    """Tell whether nearly all of the last answers are cut off."""
    if "completions/clipped_ratio" not in history.keys:
        return "completions/mean_length" in history.keys and one_length(history) is not None
    share = history.finite_values("completions/clipped_ratio")
    return len(share) > 0 and bool(last_sixth(share).mean() > 0.9)


def one_length(history: History) -> Found | None:
    """Find answers that have one length in nearly all logs: a limit. Old versions of TRL do not log the cut ones."""
    steps, values = history["completions/mean_length"].finite
    if len(values) < 6 or values.max() <= 1:
        return None
    at_limit = float((values == values.max()).mean())
    if at_limit < 0.9:
        return None
    return Found(int(steps[0]), "completions/mean_length", f"{values.max():.6g} tokens in {at_limit:.0%} of the logs")
