"""Signs of a symptom in a log: `symptoms.toml` names the function of each symptom, and its arguments.

Each function returns what it found, or None. A metric or a setting that it needs and the log lacks is a KeyError.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from trl_steady.report.history import History, Series, counted
from trl_steady.report.statistics import HEALTHY_TREND, blocks, noise, running_median, sixths, stretch, trend


class Found(NamedTuple):
    """Signs of a symptom."""

    since: int
    """The optimizer step at which it began."""
    metric: str
    """The metric that shows it, or "" for a setting or a warning."""
    evidence: str
    """The numbers that show it."""


# Helpers about the reward.


def _reward(history: History) -> Series:
    """Return the reward, or the share of right answers where a reward model that is retrained gives it."""
    if "reward_model/true" in history.keys:
        return blocks(history, "reward_model/true")
    return blocks(history, "reward")


def _is_solved(reward: np.ndarray) -> np.ndarray:
    """Tell which rewards are at the top, if the reward is a share."""
    is_share = reward.min(initial=0) >= 0 and reward.max(initial=1) <= 1
    return (reward >= 0.9) & is_share


def _learns(history: History) -> bool:
    """Tell whether the reward has risen and stays up, or is at its top, or cannot be judged: yet, or at all."""
    values = _reward(history).values
    if len(values) < 6:
        return True
    spread = history.finite_values("reward_std")
    if np.ptp(values) < 0.01 * spread.max(initial=0):  # each group's mean is subtracted
        return True
    level = sixths(values)
    has_risen = level.max() - level[0] > noise(values)
    is_up = level[-1] > (level[0] + level.max()) / 2
    if has_risen and is_up:
        return True
    last_sixth = _is_solved(values)[-1 - len(values) // 6 :]
    return bool(last_sixth.mean() > 0.5)


# Signs that several symptoms have. Their arguments stand in symptoms.toml.


def beyond(history: History, limits: Sequence[Mapping[str, Any]]) -> Found | None:
    """Find the metric that was beyond its limit first, of those that were logged. `_beyond` has the arguments."""
    keys = [limit["key"] for limit in limits]
    history.first(*keys)
    signs: list[Found] = []
    for limit in limits:
        sign = _beyond(history, **limit)
        if sign is not None:
            signs.append(sign)
    return min(signs, default=None)


def _beyond(
    history: History,
    key: str,
    limit: float,
    unit: str = "%",
    below: bool = False,
    q: float = 0.75,
    least: int = 3,
    stays: bool = False,
) -> Found | None:
    """Find a metric that is above a limit, or below it, for at least `least` rollouts.

    `q` is the quantile over the updates of a rollout that is compared with the limit. With `stays`, it has no trend
    to the better side.
    """
    if key not in history.keys:
        return None
    steps, values = blocks(history, key, q)
    if below:
        side = "below"
        is_beyond = values < limit
    else:
        side = "above"
        is_beyond = values > limit
    where = stretch(is_beyond, least)
    if where is None:
        return None
    if stays:
        improvement = trend(values) if below else -trend(values)
        if improvement > HEALTHY_TREND:
            return None
    middle = float(np.median(values[where]))
    return Found(int(steps[where.start]), key, f"{_with_unit(middle, unit)}, {side} {_with_unit(limit, unit)}")


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
    if len(fall.values) < 6:
        return None
    smooth = running_median(fall.values)
    peak = int(smooth.argmax())
    end = float(np.median(fall.values[-3:]))
    has_fallen = smooth[peak] - end >= 2 * noise(fall.values)
    if not has_fallen or trend(fall.values[peak:]) > -HEALTHY_TREND:
        return None
    before = rise.values[rise.steps <= fall.steps[peak]]
    after = rise.values[rise.steps > fall.steps[peak]]
    if not len(before) or len(after) < 3:
        return None
    gained = float(np.median(after[-3:]) - np.median(before[-3:]))
    if gained < 0:
        return None
    at_the_peak = smooth >= smooth[peak] - noise(fall.values) / 2
    began = int(fall.steps[at_the_peak][-1])
    return Found(began, down, f"{smooth[peak]:.3g} to {end:.3g}, {up} {gained:+.3g}")


def grows(history: History, key: str, unit: str, least: int = 6, far: float = math.inf) -> Found | None:
    """Find a metric that at least doubles in `least` rollouts, or stays above `far`, without a reward that rises."""
    steps, values = blocks(history, key)
    if len(values) < 6 or _learns(history) or trend(_reward(history).values) > 1:
        return None
    level = sixths(values)
    first, last = level[0], level[-1]
    has_doubled = last >= max(2 * first, 1e-6) and trend(values) >= 3 and len(values) >= least
    where = stretch(values > min((first + last) / 2, far))
    if where is None or not (has_doubled or last >= far):
        return None
    return Found(int(steps[where.start]), key, f"{first:.3g} to {last:.3g} {unit}")


# Signs that one symptom has. They have the name of the symptom, and its order in symptoms.toml.


def too_few_rollouts(history: History) -> Found | None:
    """Find a run that has ended before anything can be said."""
    count = 0
    if "reward" in history.keys:
        count = len(history["reward"].steps)
    if count >= 6 or not history.is_over:
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
    found = _nan(history, ["reward"]) or _nan(history, _reward_functions(history))
    if found is not None:
        return found
    usual = np.diff(steps).max(initial=1)
    missing = history.last_step - steps[-1]
    if len(steps) <= 2 or missing <= 4 * usual:
        return None
    return Found(int(steps[-1] + usual), "reward", f"not logged for {missing} steps")


def reward_constant(history: History) -> Found | None:
    """Find a reward that is the same in each log, and in each group if that is logged."""
    steps, values = history["reward"].finite
    spread = history.finite_values("reward_std")
    if not len(values) or np.ptp(values) or spread.any():
        return None
    if not history.is_over:
        # the next group may be the first that is not all wrong
        least = 20 if values[0] in (0, 1) else 3
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
    functions = _reward_functions(history)
    silent = [key for key in functions if not len(history[key].finite.values)]
    if not silent or silent == functions:
        return None
    least = 6 if history.is_over else 50  # it may judge rare prompts only
    if len(history["reward"].steps) < least:
        return None
    return Found(1, ", ".join(silent), "NaN in each log")


def _reward_functions(history: History) -> list[str]:
    """Return the metrics that are the means of single reward functions."""
    return sorted(key for key in history.keys if key.startswith("rewards/") and key.endswith("/mean"))


def answers_masked(history: History) -> Found | None:
    """Find updates without a loss because all answers are cut off, and the loss leaves out those."""
    if not history.settings.get("mask_truncated_completions", True):
        return None
    steps, share = blocks(history, "completions/clipped_ratio")
    entropy = blocks(history, "entropy", 1.0).values
    gradient = blocks(history, "grad_norm", 1.0).values
    count = min(len(share), len(entropy), len(gradient))
    is_cut_off = share[:count] >= 0.99
    has_no_loss = (entropy[:count] == 0) & (gradient[:count] == 0)
    where = _lasts(history, is_cut_off & has_no_loss)
    seen = entropy[:count][entropy[:count] > 0]
    has_collapsed = seen.max(initial=0) > 3 * seen.min(initial=math.inf)
    if where is None or has_collapsed:
        return None
    return Found(int(steps[where.start]), "completions/clipped_ratio", "100 %, and no answer has a gradient")


def length_rewarded(history: History) -> Found | None:
    """Find answers that grow, and a reward whose changes from rollout to rollout are those of the length."""
    steps, length = blocks(history, "completions/mean_length")
    reward = blocks(history, "reward").values
    count = min(len(length), len(reward))
    if count < 18:
        return None
    together = 1.0
    # the changes of two curves that rise together, as in reasoning, have a correlation; their third differences none
    for order in (1, 3):
        length_changes = np.diff(length[:count], order)
        reward_changes = np.diff(reward[:count], order)
        if not np.ptp(length_changes) or not np.ptp(reward_changes):
            return None
        correlation = np.corrcoef(length_changes, reward_changes)[0, 1]
        together = min(together, float(correlation))
    level = sixths(length)
    first, last = level[0], level[-1]
    where = stretch(length > (first + last) / 2)
    if where is None or last < 1.5 * first or together < 0.8:  # recorded healthy runs have 0.5
        return None
    text = f"{first:.3g} to {last:.3g} tokens; correlation with the reward's changes {together:.2f}"
    return Found(int(steps[where.start]), "completions/mean_length", text)


def policy_collapsed(history: History) -> Found | None:
    """Find an entropy below a tenth of its start, within ten rollouts or without a reward that rises."""
    steps, values = blocks(history, "entropy")
    rollouts_per_step = len(history["reward"].steps) / len(history["entropy"].steps)  # in a step that was logged
    start = values[:3].max(initial=0.0)
    where = stretch((values < 0.1 * start) & (start > 0))
    if where is None or np.median(_is_solved(_reward(history).values)[-3:]) > 0:
        return None
    was_high = np.flatnonzero(values[: where.start] > 0.8 * start)
    high = was_high[-1] if len(was_high) else 0
    rollouts = (steps[where.start] - steps[high]) * rollouts_per_step
    is_slow = where.start - high > 1 and rollouts > 10
    if is_slow and _learns(history):
        return None
    evidence = f"{np.median(values[where]):.2g} nats, {start:.3g} until step {steps[high]}"
    return Found(int(steps[where.start]), "entropy", evidence)


def entropy_collapses(history: History) -> Found | None:
    """Find an entropy that will be a tenth of its highest level within this run, without a reward that rises."""
    steps, values = history["entropy"].finite
    if _learns(history) or len(_reward(history).values) < 10 or len(values) < 12:  # healthy runs would print it
        return None
    level = np.maximum(sixths(values), 1e-12)
    first, last = level.max(), level[-1]
    where = stretch(values < first / 2)
    # the middles of the two sixths are a third of the run apart
    slope = 3 * math.log(last / level[3]) / max(steps[-1] - steps[0], 1)
    steps_left = math.log(10 * last / first) / -min(slope, -1e-12)
    arrival = history.last_step + max(steps_left, 0)
    planned = history.settings.get("max_steps") or 0
    if where is None or arrival > max(planned, 1.5 * steps[-1]):
        return None
    evidence = f"{first:.3g} to {last:.3g} nats, a tenth of it by step {arrival:.0f}"
    return Found(int(steps[where.start]), "entropy", evidence)


def entropy_explodes(history: History) -> Found | None:
    """Find an entropy that grows by a nat, whatever the reward does."""
    steps, values = blocks(history, "entropy")
    if len(values) < 6:
        return None
    level = sixths(values)
    first, last = level[0], level[-1]
    where = stretch(values > (first + last) / 2)
    has_grown = last >= first + 1 and trend(values) >= 3  # a nat is 2.7 times as many tokens to choose from
    if where is None or not has_grown:
        return None
    return Found(int(steps[where.start]), "entropy", f"{first:.3g} to {last:.3g} nats")


def policy_still(history: History) -> Found | None:
    """Find a learning rate with which the weights stay. AdamW moves each by at most about the rate in a step."""
    logged = history["learning_rate"].values.max(initial=0)
    rate = max(logged, history.settings.get("learning_rate") or 0)
    planned = history.settings.get("max_steps") or 0
    if history.is_over:
        planned = max(planned, history.last_step)
    if not 0 < planned < 1e-6 / max(rate, 1e-30):
        return None
    text = f"{rate:.2g} moves a weight by at most about {rate * planned:.1g} in {counted(planned, 'step')}"
    return Found(1, "learning_rate", text)


_NATS = "nats per token"
_KL = "mismatch/kl"
_DIFFERENCE = "sampling/sampling_logp_difference/mean"
# Limits of an engine that serves another policy: the default of `engine_check`.
_OTHER_POLICY: Sequence[Mapping[str, Any]] = (
    {"key": _KL, "limit": 1.0, "unit": _NATS},
    {"key": _DIFFERENCE, "limit": 1.0, "unit": _NATS},
)
# ESS is about 1 / (1 + 2 kl). 0.9 is a kl of 0.055, 37 times that of the R3 paper's mixture of experts. There, the run
# that collapsed had 10 % above 2. A mean difference of 0.1 puts a tenth of the ratios outside 0.8 to 1.2.
_DISAGREES: Sequence[Mapping[str, Any]] = (
    {"key": "mismatch/effective_sample_size", "limit": 0.9, "below": True, "q": 0.5},
    {"key": "mismatch/above_2", "limit": 0.01},
    {"key": _KL, "limit": 0.055, "unit": _NATS},
    {"key": _DIFFERENCE, "limit": 0.1, "unit": _NATS},
)


def engine_other_policy(history: History) -> Found | None:
    """Find an engine that serves another policy."""
    return beyond(history, _OTHER_POLICY)


def engine_falls_behind(history: History) -> Found | None:
    """Find an engine that agrees with the trainer at first, and not later."""
    found = _disagreement(history)
    if found is None or found.since <= _first_step(history, found.metric):
        return None
    return found


def engine_differs(history: History) -> Found | None:
    """Find an engine that differs from the trainer from the start."""
    found = _disagreement(history)
    if found is None or found.since > _first_step(history, found.metric):
        return None
    return found


def _disagreement(history: History) -> Found | None:
    """Find an engine that differs from the trainer, but serves the policy."""
    found = beyond(history, _DISAGREES)
    for limit in _OTHER_POLICY:
        if _beyond(history, **limit):
            return None
    return found


def _first_step(history: History, key: str) -> int:
    return int(blocks(history, key).steps[0])


def nothing_clips(history: History) -> Found | None:
    """Find a range of tokens on the ratio of a sequence, or updates that are all on-policy."""
    settings = history.settings
    loss = settings.get("loss_type")
    passes = (settings["steps_per_generation"] or 1) * settings.get("num_iterations", 1)
    widest = max(settings["epsilon"] or 0, settings.get("epsilon_high") or 0)
    share = 0.0
    if "clip_ratio/region_mean" in history.keys:
        share = history["clip_ratio/region_mean"].finite.values.mean()
    is_on_policy = passes <= settings["gradient_accumulation_steps"] and not share
    is_sequence = loss in ("gspo", "gspo_token") or settings.get("importance_sampling_level") == "sequence"
    if is_sequence and widest >= 0.1:
        text = f"epsilon {widest:g} is a range of token ratios; GSPO's are 3e-4 and 4e-4; {share:.2%} are clipped"
        return Found(1, "", text)
    if is_on_policy and (is_sequence or loss == "gmpo"):
        return Found(1, "", f"each rollout has 1 update, with loss_type {loss}, so nothing can be clipped")
    return None


def reference_never_moves(history: History) -> Found | None:
    """Find a reference that has not moved, or will not before the run ends."""
    has_moved = history["ref/refreshes"].finite.values.any()
    settings = history.settings
    every = settings.get("ref_model_sync_steps") or 512  # TRL's default
    planned = settings.get("max_steps") or 0
    if has_moved:
        return None
    evidence = f"0 in {history.last_step} steps, with ref_model_sync_steps {every}"
    if 0 < planned <= every and settings.get("ref_model_sync_kl") is None:
        return Found(1, "ref/refreshes", evidence)
    if history.last_step > every + 64:  # it waits for a rollout
        return Found(every, "ref/refreshes", evidence)
    return None


def kl_holds(history: History) -> Found | None:
    """Find a KL that costs nearly as much as the reward has gained, with a reference that stays."""
    steps, kl = blocks(history, "kl")
    reward = blocks(history, "reward").values
    length = np.median(history["completions/mean_length"].finite.values)
    beta = history.settings["beta"] or 0
    has_moved = history.finite_values("ref/refreshes").any()
    if len(reward) < 12 or trend(kl) < HEALTHY_TREND or has_moved:
        return None
    cost = beta * kl * length
    is_unscaled = history.settings.get("scale_rewards") in (False, "none", "mean")
    if "reward_std" in history.keys and not is_unscaled:
        cost = cost * np.median(history["reward_std"].finite.values)
    level = sixths(reward)
    gain = float(level[-1] - level[0])
    # near the reference, the cost is half of the gain at the optimum of reward - beta KL
    where = stretch(cost > 0.4 * gain)
    if where is None or gain < noise(reward) / 2:
        return None
    evidence = f"costs {np.median(cost[where]):.2g} an answer with beta {beta:g}, the reward has gained {gain:.2g}"
    return Found(int(steps[where.start]), "kl", evidence)


def groups_all_right(history: History) -> Found | None:
    """Find groups whose answers are nearly all right."""
    found, place = _equal_groups(history)
    return found if place >= 0.75 else None


def groups_all_wrong(history: History) -> Found | None:
    """Find groups whose answers are nearly all wrong."""
    found, place = _equal_groups(history)
    return found if place <= 0.25 else None


def groups_alike(history: History) -> Found | None:
    """Find groups whose answers nearly all get the same reward, which differs among groups or is neither."""
    found, place = _equal_groups(history)
    return found if 0.25 < place < 0.75 else None


def _equal_groups(history: History) -> tuple[Found | None, float]:
    """Find groups whose answers nearly all get the same reward.

    Returns:
        What was found, and where the last rewards are between the worst, 0, and the best, 1; 0.5 if that is not known.
    """
    # recorded runs reach 1 in single rollouts, and none stays above 0.9
    found = beyond(history, [{"key": "frac_reward_zero_std", "limit": 0.9, "q": 0.5, "least": 6}])
    reward = blocks(history, "reward").values
    # under PPO, a group can be one answer
    is_ppo = history.settings.get("num_generations") == 1 or any(key.startswith("value/") for key in history.keys)
    if found is None or is_ppo or len(reward) < 6:
        return None, 0.5
    low, high = reward.min(), reward.max()
    if low == high and low not in (0, 1):  # a constant reward
        return None, 0.5
    last = float(np.median(reward[-3:]))
    wasted = history["frac_reward_zero_std"].finite.values.mean()
    found = found._replace(evidence=f"{found.evidence}; reward {last:.3g}; {wasted:.0%} of all groups were wasted")
    if low >= 0 and high <= 1:  # a share
        return found, last
    if abs(trend(reward)) > HEALTHY_TREND:  # it has shown its range
        return found, (last - low) / (high - low)
    return found, 0.5


def not_a_number(history: History) -> Found | None:
    """Find a gradient, or else a loss, that stops being a number."""
    history.first("grad_norm", "loss")
    to_end = True
    least = 3
    if history.settings.get("fp16"):  # its scaler leaves out single steps, and several at the start
        to_end = False
        least = 10
    gradient = _nan(history, ["grad_norm"], to_end=to_end, least=least)
    loss = _nan(history, ["loss"], to_end=to_end, least=least)
    return gradient or loss


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
    """Find optimizer steps that were left out, at least 1 % of all. Only logs after such a step have the metric."""
    if "steps/nonfinite" not in history.keys:
        return None
    steps, values = history["steps/nonfinite"]
    if values.sum() < 0.01 * history.last_step:
        return None
    return Found(int(steps[0]), "steps/nonfinite", f"{values.sum():.0f} in all")


def gradient_zero(history: History) -> Found | None:
    """Find rollouts of which no update has a gradient, unless their answers are right."""
    steps, values = blocks(history, "grad_norm", 1.0)  # recorded runs of GSPO clip everything in some updates
    is_zero = values < 1e-8
    if "reward" in history.keys:
        is_solved = _is_solved(blocks(history, "reward").values)
        count = min(len(is_solved), len(is_zero))
        is_zero[:count] &= ~is_solved[:count]
    where = _lasts(history, is_zero)
    if where is None:
        return None
    return Found(int(steps[where.start]), "grad_norm", "0 in each update")


def reference_collapsed(history: History) -> Found | None:
    """Find a reference that has moved after the reward had fallen for good."""
    moves = history["ref/refresh_step"].finite.values
    steps, values = _reward(history)
    if len(values) < 12 or _learns(history):
        return None
    level = sixths(values)
    where = stretch(values < (level[0] + level.max()) / 2)
    is_small = level.max() - level[0] <= 2 * noise(values)
    if where is None or where.start <= values.argmax() or is_small:
        return None
    late = moves[moves >= steps[where.start]]
    if not len(late):
        return None
    evidence = f"{level.max():.3g} at best, {level[-1]:.3g} at the end, {counted(len(late), 'move')} since it fell"
    return Found(int(late[0]), "reward", evidence)


def sampling_truncated(history: History) -> Found | None:
    """Find a `top_p` that is too low."""
    top_p = history.settings["top_p"] or 1
    # docs/evidence.md: 12 % of the gradient is bias at 0.8, and 0.7 costs 8 points of accuracy, with the mask too
    if top_p >= 0.9:
        return None
    return Found(1, "", f"top_p {top_p:g}")


def generation_slow(history: History) -> Found | None:
    """Find generations that take nearly all the time from one rollout to the next."""
    history.first("time/update")
    steps, seconds = history["time/generation"].finite
    total = np.zeros(len(steps) + 1)
    for key in history.keys:
        if key.startswith("time/"):
            phase = history[key].finite
            rollout = np.searchsorted(steps, phase.steps, "right")
            np.add.at(total, rollout, phase.values)
    shares = seconds / np.maximum(total[1:], 1e-12)
    where = stretch(shares > 0.8, least=8)  # verl's runs have 0.45 to 0.7
    if where is None:
        return None
    return Found(int(steps[where.start]), "time/generation", f"{np.median(shares[where]):.0%} of the time")


def padding_computed(history: History) -> Found | None:
    """Find batches that are mostly padding, where nothing trims it."""
    share = np.median(history["padding/share"].finite.values)
    if history.settings["trim_padding"] or not share > 0.5:
        return None
    return Found(1, "padding/share", f"{share:.0%}")


# Helpers about a series.


def _lasts(history: History, bad: np.ndarray, *, to_end: bool = False, least: int = 3) -> slice | None:
    """Return the stretch of bad values. If the run is over, one is enough if all are bad, or (`to_end`) the last."""
    good = np.flatnonzero(~bad)
    start = int(good[-1]) + 1 if len(good) else 0
    if history.is_over and start < len(bad) and (to_end or start == 0):
        return slice(start, len(bad))
    return stretch(bad, least)


def _nan(history: History, keys: Sequence[str], *, to_end: bool = False, least: int = 3) -> Found | None:
    """Find metrics that stop being numbers, all of those that were logged. `_lasts` has the other arguments."""
    known: list[str] = []
    since: list[int] = []
    for key in keys:
        if key not in history.keys:
            continue
        known.append(key)
        steps, values = history[key]
        where = _lasts(history, ~np.isfinite(values), to_end=to_end, least=least)
        if where is None:
            return None
        since.append(int(steps[where.start]))
    if not since:
        return None
    return Found(max(since), ", ".join(known), "NaN")
