"""Signs in the policy: its entropy, its KL to the reference, and whether it moves."""

import math

import numpy as np

from trl_steady.report.history import History, counted
from trl_steady.report.signs.common import Found, mean_over_tokens, never_a_number, of_all_groups, per_rollout
from trl_steady.report.signs.reward import ONE_SIDED, is_solved, learns, learnt, starts_high
from trl_steady.report.statistics import (
    HEALTHY_TREND,
    blocks,
    chance_of_order,
    change,
    last_sixth,
    mostly_bad,
    noise,
    running_median,
    sixths,
    trend,
)

_NATS = "nats per token"
_FAR = 2.0  # of a KL: recorded healthy runs reach 1.7


def grows(history: History, key: str, unit: str, floor: float, least: int = 6, far: float = math.inf) -> Found | None:
    """Find a metric that at least doubles in `least` rollouts, or stays above `far`, without a reward that rises.

    `floor` is the least amount by which it must have grown: twice as much of nearly nothing is nothing.
    """
    steps, values = per_rollout(history, key)
    if len(values) < 6:
        return None
    level = sixths(values)
    first = min(float(np.median(values[:3])), level[0])
    last = level[-1]
    grown = last - first
    has_doubled = grown >= max(first, floor) and grown > 2 * noise(values) and len(values) >= least
    where = mostly_bad(values > min((first + last) / 2, far))
    if where is None or not (has_doubled or last >= far) or learns(history):
        return None
    return Found(int(steps[where.start]), key, f"{first:.3g} to {last:.3g} {unit}")


def policy_collapsed(history: History) -> Found | None:
    """Find an entropy that has fallen below a tenth of its start for good.

    The start is the highest of the first three rollouts. Nothing is found if the reward is solved at the end, or if it
    began in the top quarter of its range and has kept half of that. A fall of more than ten rollouts is excused while
    the reward rises, unless the last groups are all alike or the last updates have no gradient.
    """
    steps, values = per_rollout(history, "entropy")
    reward = learnt(history).values
    rollouts_per_step = len(history["reward"].steps) / len(history["entropy"].steps)  # in a step that was logged
    start = values[:3].max(initial=0.0)
    is_low = (values < 0.1 * start) & (start > 0)
    where = mostly_bad(is_low)
    if where is None or _may_be_noise(history, values[where.start :], is_low, start):
        return None
    is_solved_now = len(reward) > 0 and np.median(is_solved(reward)[-3:]) > 0
    if is_solved_now or starts_high(reward):
        return None
    was_high = np.flatnonzero(values[: where.start] > 0.8 * start)
    high = was_high[-1] if len(was_high) else 0
    rollouts = (steps[where.start] - steps[high]) * rollouts_per_step
    is_slow = where.start - high > 1 and rollouts > 10
    if is_slow and learns(history) and not _is_stuck(history):
        return None
    evidence = f"{np.median(values[where]):.2g} nats; it fell from {start:.3g} after step {steps[high]}"
    return Found(int(steps[where.start]), "entropy", evidence)


def _may_be_noise(history: History, since: np.ndarray, is_low: np.ndarray, start: float) -> bool:
    """Tell whether an entropy was as low before: that of few answers is high in some logs and low in others.

    One in a hundred series has its low values at the end by chance. A run that trains is looked at many times. If a
    hundredth of the start is left, no value comes back.

    Args:
        history: The log.
        since: The values since the entropy is low.
        is_low: Which of all values are low.
        start: The value at the start.
    """
    sure = 0.001
    if history.is_over:
        sure = 0.01
    return chance_of_order(is_low) > sure and float(since.mean()) > 0.01 * start


def _is_stuck(history: History) -> bool:
    """Tell whether nothing more is learnt: all of the last groups are alike, or no update has a gradient."""
    shares = history.finite_values("frac_reward_zero_std")
    gradients = history.finite_values("grad_norm")
    no_gradient = len(gradients) > 0 and bool((last_sixth(gradients) < 1e-8).all())
    no_group = len(shares) > 0 and bool((last_sixth(shares) > 0.99).all())
    return no_gradient or no_group


def entropy_collapses(history: History) -> Found | None:
    """Find an entropy that is going to be a tenth of its highest level, without a reward that rises.

    It must come there before the run ends, or half of the run later, as fast as it falls in the last third. Of a run
    that is over, the slope from the highest level to the end counts too.
    """
    steps, values = history[mean_over_tokens(history, "entropy")].finite
    if len(values) < 12 or len(learnt(history).values) < 10:  # healthy runs would print it
        return None
    level = np.maximum(sixths(values), 1e-12)
    first = max(level.max(), float(np.median(values[:3])))
    last = level[-1]
    is_low = values < level.max() / 2
    where = mostly_bad(is_low)
    if where is None or _may_be_noise(history, values[where.start :], is_low, first):
        return None
    if last > first / 4 or learns(history):  # recorded and real runs that learn come as far as a quarter
        return None
    sixth = max(steps[-1] - steps[0], 1) / 6
    slope = math.log(last / level[3]) / (2 * sixth)
    if history.is_over:
        sixths_since = max(5 - int(level.argmax()), 1)
        slope = min(slope, math.log(last / first) / (sixths_since * sixth))
    steps_left = math.log(10 * last / first) / -min(slope, -1e-12)
    arrival = history.last_step + max(steps_left, 0)
    planned = history.settings.get("max_steps") or 0
    if arrival > max(planned, 1.5 * steps[-1]):
        return None
    evidence = f"{first:.3g} to {last:.3g} nats, a tenth of it by step {arrival:.0f}"
    return Found(int(steps[where.start]), "entropy", evidence)


def entropy_explodes(history: History) -> Found | None:
    """Find an entropy that is a nat above its start, whatever the reward does."""
    steps, values = per_rollout(history, "entropy")
    if len(values) < 6:
        return None
    level = sixths(values)
    first = min(float(np.median(values[:3])), level[0])
    last = level[-1]
    where = mostly_bad(values > (first + last) / 2)
    # a nat is 2.7 times as many tokens to choose from
    if where is None or last < first + 1 or last - first < 3 * noise(values):
        return None
    return Found(int(steps[where.start]), "entropy", f"{first:.3g} to {last:.3g} nats")


def entropy_high(history: History) -> Found | None:
    """Find a policy whose first answers are nearly random."""
    steps, values = per_rollout(history, "entropy")
    # 6 nats are 400 tokens of equal chance. Pretrained models have 0.1 to 3, recorded ones without training 4.4
    if len(values) < 3 or np.median(values[:3]) < 6:
        return None
    return Found(int(steps[0]), "entropy", f"{np.median(values[:3]):.3g} nats per token in the first logs")


def policy_still(history: History) -> Found | None:
    """Find a learning rate with which the weights stay. AdamW moves each by at most about the rate in a step."""
    rates = history.finite_values(history.first("learning_rate"))
    logged = rates.max(initial=0)
    rate = max(logged, history.settings.get("learning_rate") or 0)
    planned = history.settings.get("max_steps") or 0
    if history.is_over:
        planned = max(planned, history.last_step)
    is_warming_up = len(rates) < 2 or (rates[-1] > rates[-2] and history.last_step < planned)
    if is_warming_up and not history.settings.get("learning_rate"):
        return None
    if not 0 < planned < 1e-6 / max(rate, 1e-30):
        return None
    text = f"{rate:.2g} moves a weight by at most about {rate * planned:.1g} in {counted(planned, 'step')}"
    return Found(1, "learning_rate", text)


def kl_nan(history: History) -> Found | None:
    """Find a KL that is NaN in each log, or in two of them and a twentieth of those that have a reward."""
    found = never_a_number(history, "kl")
    if found is None and "reward" in history.keys:
        found = _kl_nan_in_some(history)
    if found is None:
        return None
    return found._replace(facts={"fp16": bool(history.settings.get("fp16"))})


def _kl_nan_in_some(history: History) -> Found | None:
    steps, values = history["kl"]
    is_scored = np.isin(steps, history["reward"].finite.steps)  # a row of an export can be of other metrics
    is_lost = np.isnan(values) & is_scored
    lost = int(is_lost.sum())
    scored = int(is_scored.sum())
    if lost < 2 or lost < 0.05 * scored:
        return None
    return Found(int(steps[is_lost][0]), "kl", f"NaN in {lost} of {scored} logs")


def teacher_left(history: History) -> Found | None:
    """Find a KL to the teacher that doubles, and grows by half a nat, without a reward that rises."""
    return grows(history, "teacher/kl", _NATS, floor=0.5, least=12)


def kl_explodes(history: History) -> Found | None:
    """Find logs with a KL so large that the policy has nothing of the reference in them, whatever the reward does."""
    steps, values = history[mean_over_tokens(history, "kl")].finite
    # 10 nats are nearly the logarithm of a vocabulary: a token chosen by chance. Recorded healthy runs reach 5.6
    far = np.flatnonzero(values > 10)
    half = far[far >= len(values) // 2]
    # a policy starts as its reference
    is_first = len(values) >= 3 and values[0] > 10 and float(np.median(values[:3])) > 10
    if is_first:
        text = f"{values[0]:.3g} {_NATS} in the first log, above 10 in {len(far)} of {len(values)} logs"
        return Found(int(steps[0]), "kl", text)
    if len(far) < 3 or len(half) < max(0.05 * len(values), 1):
        return None
    text = f"above 10 {_NATS} in {len(far)} of {len(values)} logs, up to {values.max():.3g}"
    return Found(int(steps[far[0]]), "kl", text)


def kl_rises(history: History) -> Found | None:
    """Find a KL that rises without a reward that rises, or that goes on after it has stopped."""
    # from 0, it always rises at first; recorded healthy runs reach 1.7, and TRL's examples end below 0.1
    found = grows(history, "kl", _NATS, floor=0.1, least=50, far=_FAR)
    return found or _rises_after_the_reward(history) or _stays_far(history)


def _stays_far(history: History) -> Found | None:
    """Find a KL that stays high, whether it still rises or not, in a third of the run that has gained nothing."""
    of_all_groups(history, "reward")
    steps, kl = per_rollout(history, "kl")
    rewards = learnt(history)
    where = mostly_bad(kl > _FAR)
    if where is None or len(kl) < 36 or len(rewards.values) < 36:
        return None
    since = int(steps[where.start])
    gained = rewards.values[rewards.steps >= since]
    if len(gained) < len(rewards.values) / 3 or np.median(is_solved(gained)) > 0:
        return None
    third = len(gained) // 3
    rise = change(gained, third, third)
    if rise.amount > max(0.1 * np.ptp(running_median(rewards.values)), ONE_SIDED * rise.error):
        return None
    return Found(since, "kl", f"{np.median(kl[where]):.3g} {_NATS} since, and the reward has gained nothing more")


def _rises_after_the_reward(history: History) -> Found | None:
    """Find a KL that doubles, and grows by half a nat, in a third of the run or more that has gained nothing."""
    of_all_groups(history, "reward")
    steps, kl = per_rollout(history, "kl")
    rewards = learnt(history)
    if len(rewards.values) < 36 or len(kl) < 36 or np.ptp(kl) < 0.5:
        return None
    smooth = running_median(rewards.values)
    best = smooth.max() - noise(rewards.values)
    reached = int(np.flatnonzero(smooth >= best)[0])
    later = kl[steps >= rewards.steps[reached]]
    gained = rewards.values[reached:]
    if len(gained) < len(rewards.values) / 3 or len(later) < 12 or np.median(is_solved(gained)) > 0:
        return None
    first = float(np.median(later[: max(len(later) // 6, 3)]))
    last = float(np.median(last_sixth(later)))
    if last - first < max(first, 0.5) or trend(later) < HEALTHY_TREND:
        return None
    third = len(gained) // 3
    rise = change(gained, third, third)
    total = smooth.max() - smooth[0]
    if rise.amount > max(0.1 * total, rise.error):
        return None
    text = f"{first:.3g} to {last:.3g} {_NATS} since the reward has stopped rising"
    return Found(int(rewards.steps[reached]), "kl", text)


def kl_holds(history: History) -> Found | None:
    """Find a KL that costs nearly as much as the reward has gained, with a reference that stays."""
    steps, kl = per_rollout(history, "kl")
    reward = blocks(history, "reward").values
    length = history.median("completions/mean_length")
    beta = history.settings["beta"] or 0
    has_moved = history.finite_values("ref/refreshes").any()
    if len(reward) < 12 or trend(kl) < HEALTHY_TREND or has_moved:
        return None
    cost = beta * kl * length
    is_unscaled = history.settings.get("scale_rewards") in (False, "none", "mean")
    if "reward_std" in history.keys and not is_unscaled:
        cost = cost * history.median("reward_std")
    level = sixths(reward)
    gain = float(level[-1] - level[0])
    # near the reference, the cost is half of the gain at the optimum of reward - beta KL
    where = mostly_bad(cost > 0.4 * gain)
    if where is None or gain < noise(reward) / 2:
        return None
    evidence = f"costs {np.median(cost[where]):.2g} an answer with beta {beta:g}, the reward has gained {gain:.2g}"
    return Found(int(steps[where.start]), "kl", evidence)
