"""Signs in the gradient, the loss, and other metrics that are not numbers."""

import numpy as np

from trl_steady.report.history import History
from trl_steady.report.signs.common import Found, lasts, median_gap, never_a_number, not_numbers, per_rollout
from trl_steady.report.signs.reward import is_solved
from trl_steady.report.statistics import blocks, chance_of, last_sixth, mostly_bad


def not_a_number(history: History) -> Found | None:
    """Find a gradient, or else a loss, that stops being a number."""
    history.require("grad_norm", "loss")
    to_end = True
    least = 3
    if history.settings.get("fp16"):  # its scaler leaves out single steps, and several at the start
        to_end = False
        least = 10
    gradient = not_numbers(history, ["grad_norm"], to_end=to_end, least=least)
    loss = not_numbers(history, ["loss"], to_end=to_end, least=least)
    found = gradient or loss
    if found is None:
        return None
    return found._replace(facts={"fp16_overflows": _overflows_in_fp16(history, found.since)})


def _overflows_in_fp16(history: History, since: int) -> bool:
    """Tell whether numbers are lost because of fp16: it is on, and the policy was near that of the rollout before.

    The scaler has lowered the loss scale by then, and it never lets the weights become NaN.
    """
    if not history.settings.get("fp16"):
        return False
    if "ratio/sequence_max" not in history.keys:
        return True
    steps, ratios = history["ratio/sequence_max"].finite
    return bool((ratios[steps <= since] < 10).all())  # the limit of ratio-explodes


def metric_nan(history: History) -> Found | None:
    """Find a metric of the answers that is NaN in each log."""
    keys = ["entropy", "completions/mean_length", "clip_ratio/region_mean"]
    if len(history.finite_values("reward")):  # else there is no reward
        keys.append("reward_std")
    history.require(*keys)
    for key in keys:
        if key not in history.keys:
            continue
        found = never_a_number(history, key)
        if found is not None:
            return found
    return None


def gradient_huge(history: History) -> Found | None:
    """Find a gradient norm above 10,000 in nearly all updates since a step."""
    steps, values = per_rollout(history, "grad_norm")
    # advantages are about 1; the usual norm of the recorded and public logs is at most 138
    is_finite = values < 1e29  # blocks have 1e30 for infinity, and the scaler of fp16 skips such a step
    where = mostly_bad(values[is_finite] > 1e4, least=2)
    if where is None:
        return None
    usual = float(np.median(values[is_finite][where]))
    return Found(int(steps[is_finite][where.start]), "grad_norm", f"{usual:.3g}, above 10,000")


def gradient_spikes(history: History) -> Found | None:
    """Find gradients ten times as large as usual, in three updates and in one of a hundred."""
    steps, values = history["grad_norm"].finite
    positive = values[values > 0]
    if len(positive) < 20:
        return None
    usual = float(np.quantile(positive, 0.75))
    spikes = np.flatnonzero(values > 10 * usual)  # recorded runs have at most two such updates
    for number, index in enumerate(spikes):
        spikes_left = len(spikes) - number
        updates_left = len(values) - index
        if spikes_left >= 3 and spikes_left >= 0.01 * updates_left:
            evidence = f"above {10 * usual:.3g} in {spikes_left} updates, usually {usual:.3g}"
            return Found(int(steps[index]), "grad_norm", evidence)
    return None


def steps_left_out(history: History) -> Found | None:
    """Find optimizer steps that were left out, at least 1 % of all. Only logs after such a step have the metric.

    Under fp16, 16 steps more: as many halve the loss scale from 65536 to 1.
    """
    if "steps/nonfinite" not in history.keys:
        return None
    steps, values = history["steps/nonfinite"]
    is_fp16 = bool(history.settings.get("fp16"))
    usual = 16 if is_fp16 else 0
    if values.sum() - usual < 0.01 * history.last_step:
        return None
    return Found(int(steps[0]), "steps/nonfinite", f"{values.sum():.0f} in all", {"fp16": is_fp16})


def gradient_zero(history: History) -> Found | None:
    """Find rollouts of which no update has a gradient, unless their answers are right, or chance explains it."""
    steps, values = blocks(history, "grad_norm", 1.0)  # recorded runs of GSPO clip everything in some updates
    is_zero = values < 1e-8
    if "reward" in history.keys and not history.is_flagged("reward", "kept_only"):
        solved = is_solved(blocks(history, "reward").values)
        count = min(len(solved), len(is_zero))
        is_zero[:count] &= ~solved[:count]
    where = lasts(history, is_zero)
    if where is None:
        return None
    since = int(steps[where.start])
    usual = _usual_share(history, since, is_zero, where)
    # less than one in a hundred runs has such a stretch by chance, wherever it begins
    if chance_of(is_zero[where], usual) * len(values) > 0.01:
        return None
    shares = history.finite_values("frac_reward_zero_std")
    evidence = "0 in each update"
    if len(shares):
        differ = 1 - float(last_sixth(shares).mean())
        evidence = f"0 in each update, and in {differ:.0%} of the last groups the rewards differ"
    return Found(since, "grad_norm", evidence, {"groups_differ": _groups_differ(history, since)})


def _usual_share(history: History, since: int, is_zero: np.ndarray, where: slice) -> float:
    """Return the largest share of updates that have no gradient because of their groups, since a step.

    transformers logs the gradient of the last of `logging_steps` updates. If 80 % of the groups are alike, up to 80 %
    of these updates have none that differs.

    Args:
        history: The log.
        since: The step.
        is_zero: All updates without a gradient.
        where: The stretch in which most have none.
    """
    sees_all = median_gap(history["grad_norm"].steps) <= 1
    for key, is_alike in (("frac_reward_zero_std", 1.0), ("reward_std", 0.0)):
        if key not in history.keys:
            continue
        steps, values = history[key].finite
        values = values[steps >= since]
        if not len(values):
            continue
        if sees_all:  # in a log of each step, groups that differ have a gradient
            return float((values == is_alike).mean())
        if key == "frac_reward_zero_std":
            return float(values.mean())
    zeros = int(is_zero.sum() - is_zero[where].sum())
    return (zeros + 1) / (len(is_zero) - len(is_zero[where]) + 2)  # of all other updates


def _groups_differ(history: History, since: int) -> bool:
    """Tell whether some groups have answers with different rewards since a step; False if it is not known."""
    if "frac_reward_zero_std" not in history.keys:
        return False
    steps, shares = history["frac_reward_zero_std"].finite
    return bool((shares[steps >= since] < 0.95).any())
