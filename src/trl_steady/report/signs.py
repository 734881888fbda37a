"""Signs of a symptom in a log: `symptoms.toml` names the function of each symptom, and its arguments.

Each function returns what it found, or None. A metric or a setting that it needs and the log lacks is a KeyError.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from trl_steady.report.history import History, Series, counted
from trl_steady.report.statistics import HEALTHY_TREND, blocks, noise, sixths, stretch, trend


class Found(NamedTuple):
    """Signs of a symptom."""

    since: int
    """The optimizer step at which it began."""
    metric: str
    """The metric that shows it, or "" for a setting or a warning."""
    evidence: str
    """The numbers that show it."""


def _reward(history: History) -> Series:
    """Return the reward, or the share of right answers where a reward model that is retrained gives it."""
    return blocks(history, "reward_model/true" if "reward_model/true" in history.keys else "reward")


def _is_solved(reward: np.ndarray) -> np.ndarray:
    """Tell which rewards are at the top, if the reward is a share."""
    return (reward >= 0.9) & (reward.min(initial=0) >= 0) & (reward.max(initial=1) <= 1)


def _learns(history: History) -> bool:
    """Tell whether the reward has risen and stays up, or is at its top, or cannot be judged: yet, or at all."""
    values = _reward(history).values
    spread = history["reward_std"].finite.values if "reward_std" in history.keys else np.zeros(1)
    if len(values) < 6 or np.ptp(values) < 0.01 * spread.max(initial=0):  # each group's mean is subtracted
        return True
    level = sixths(values)
    rose = level.max() - level[0] > noise(values) and level[-1] > (level[0] + level.max()) / 2
    return bool(rose or _is_solved(values)[-1 - len(values) // 6 :].mean() > 0.5)


# signs that several symptoms have


def beyond(history: History, limits: Sequence[Mapping[str, Any]]) -> Found | None:
    """Find the metric that was beyond its limit first, of those that were logged. `_beyond` has the arguments."""
    history.first(*(limit["key"] for limit in limits))
    return min((found for limit in limits if (found := _beyond(history, **limit))), default=None)


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
    where = stretch(values < limit if below else values > limit, least)
    if where is None or (stays and trend(values) * (1 if below else -1) > HEALTHY_TREND):
        return None
    scale, side = 100 if unit == "%" else 1, "below" if below else "above"
    middle, bound = (f"{scale * number:.3g} {unit}".rstrip() for number in (np.median(values[where]), limit))
    return Found(int(steps[where.start]), key, f"{middle}, {side} {bound}")


def noted(history: History, text: str) -> Found | None:
    """Find a text in the warnings of the run."""
    notes = [note for note in map(str, history.run["notes"]) if text in note]
    return Found(0, "", " ".join(notes)) if notes else None


def parted(history: History, rising: list[str], falling: list[str]) -> Found | None:
    """Find a metric that falls from its peak while another rises or stays up. The first known ones are compared."""
    up, down = history.first(*rising), history.first(*falling)
    rise, fall = blocks(history, up), blocks(history, down)
    if len(fall.values) < 6:
        return None
    # the peak of a running median
    wide = max(len(fall.values) // 12, 1)
    smooth = np.array([np.median(fall.values[max(i - wide, 0) : i + wide + 1]) for i in range(len(fall.values))])
    peak, end = int(smooth.argmax()), float(np.median(fall.values[-3:]))
    before, after = (rise.values[side] for side in (rise.steps <= fall.steps[peak], rise.steps > fall.steps[peak]))
    falls = smooth[peak] - end >= 2 * noise(fall.values) and trend(fall.values[peak:]) <= -HEALTHY_TREND
    if not len(before) or len(after) < 3 or not falls:
        return None
    gained = float(np.median(after[-3:]) - np.median(before[-3:]))
    began = int(fall.steps[smooth >= smooth[peak] - noise(fall.values) / 2][-1])
    return Found(began, down, f"{smooth[peak]:.3g} to {end:.3g}, {up} {gained:+.3g}") if gained >= 0 else None


def grows(
    history: History, key: str, unit: str, least: int = 6, far: float = math.inf, by: float = 0.0
) -> Found | None:
    """Find a metric that at least doubles in `least` rollouts, or stays above `far`, without a reward that rises.

    With `by`, it grows by that much in place of doubling, whatever the reward does.
    """
    steps, values = blocks(history, key)
    if len(values) < 6 or (not by and (_learns(history) or trend(_reward(history).values) > 1)):
        return None
    level = sixths(values)
    where = stretch(values > min((level[0] + level[-1]) / 2, far))
    has_grown = level[-1] >= max(level[0] + by if by else 2 * level[0], 1e-6) and trend(values) >= 3
    if where is None or not (level[-1] >= far or (has_grown and len(values) >= least)):
        return None
    return Found(int(steps[where.start]), key, f"{level[0]:.3g} to {level[-1]:.3g} {unit}")


def engine(history: History, kind: Literal["another", "differs", "behind"]) -> Found | None:
    """Find an engine of one kind: it serves another policy, differs from the start, or falls behind."""
    unit = "nats per token"
    kl: dict[str, Any] = {"key": "mismatch/kl", "unit": unit}
    difference: dict[str, Any] = {"key": "sampling/sampling_logp_difference/mean", "unit": unit}
    another: list[dict[str, Any]] = [{**kl, "limit": 1.0}, {**difference, "limit": 1.0}]  # the default of engine_check
    # ESS is about 1 / (1 + 2 kl). 0.9 is a kl of 0.055, 37 times that of the R3 paper's mixture of experts. There, the
    # run that collapsed had 10 % above 2. A mean difference of 0.1 puts a tenth of the ratios outside 0.8 to 1.2
    far = [
        {"key": "mismatch/effective_sample_size", "limit": 0.9, "below": True, "q": 0.5},
        {"key": "mismatch/above_2", "limit": 0.01},
        {**kl, "limit": 0.055},
        {**difference, "limit": 0.1},
    ]
    if kind == "another":
        return beyond(history, another)
    found = beyond(history, far)
    if found is None or any(_beyond(history, **limit) for limit in another):
        return None
    is_late = found.since > blocks(history, found.metric).steps[0]
    return found if is_late == (kind == "behind") else None


def groups(history: History, answers: Literal["right", "wrong", "alike"]) -> Found | None:
    """Find groups whose answers nearly all earn the same: all right, all wrong, or "alike" in a way that varies."""
    # recorded runs reach 1 in single rollouts, and none stays above 0.9
    found = beyond(history, [{"key": "frac_reward_zero_std", "limit": 0.9, "q": 0.5, "least": 6}])
    reward = blocks(history, "reward").values
    is_ppo = any(key.startswith("value/") for key in history.keys) or history.settings.get("num_generations") == 1
    is_constant = len(reward) and not np.ptp(reward) and reward[0] not in (0, 1)
    if found is None or is_ppo or len(reward) < 6 or is_constant:  # under PPO, a group can be one answer
        return None
    low, high, last = reward.min(), reward.max(), float(np.median(reward[-3:]))
    is_share, wasted = low >= 0 and high <= 1, history["frac_reward_zero_std"].finite.values.mean()
    has_moved = abs(trend(reward)) > HEALTHY_TREND  # and has shown its range
    place = last if is_share else (last - low) / (high - low) if has_moved else 0.5
    kind = "right" if place >= 0.75 else "wrong" if place <= 0.25 else "alike"
    evidence = f"{found.evidence}; reward {last:.3g}; {wasted:.0%} of all groups were wasted"
    return found._replace(evidence=evidence) if kind == answers else None


# signs that one symptom has, whose name they have


def kl_holds(history: History) -> Found | None:
    """Find a KL that costs nearly as much as the reward has gained, with a reference that stays."""
    (steps, kl), reward = blocks(history, "kl"), blocks(history, "reward").values
    length, beta = np.median(history["completions/mean_length"].finite.values), history.settings["beta"] or 0
    moves = "ref/refreshes" in history.keys and history["ref/refreshes"].finite.values.any()
    if len(reward) < 12 or trend(kl) < HEALTHY_TREND or moves:
        return None
    is_scaled = history.settings.get("scale_rewards") not in (False, "none", "mean") and "reward_std" in history.keys
    cost = beta * kl * length * (np.median(history["reward_std"].finite.values) if is_scaled else 1.0)
    gain = float(np.diff(sixths(reward)[[0, -1]])[0])
    # near the reference, the cost is half of the gain at the optimum of reward - beta KL
    where = stretch(cost > 0.4 * gain)
    if where is None or gain < noise(reward) / 2:
        return None
    evidence = f"costs {np.median(cost[where]):.2g} an answer with beta {beta:g}, the reward has gained {gain:.2g}"
    return Found(int(steps[where.start]), "kl", evidence)


def nothing_clips(history: History) -> Found | None:
    """Find a range of tokens on the ratio of a sequence, or updates that are all on-policy."""
    settings, loss = history.settings, history.settings.get("loss_type")
    passes = (settings["steps_per_generation"] or 1) * settings.get("num_iterations", 1)
    widest = max(settings["epsilon"] or 0, settings.get("epsilon_high") or 0)
    key = "clip_ratio/region_mean"
    share = history[key].finite.values.mean() if key in history.keys else 0.0
    is_idle = passes <= settings["gradient_accumulation_steps"] and not share
    is_sequence = loss in ("gspo", "gspo_token") or settings.get("importance_sampling_level") == "sequence"
    if is_sequence and widest >= 0.1:
        text = f"epsilon {widest:g} is a range of token ratios; GSPO's are 3e-4 and 4e-4; {share:.2%} are clipped"
        return Found(1, "", text)
    if is_idle and (is_sequence or loss == "gmpo"):
        return Found(1, "", f"each rollout has 1 update, with loss_type {loss}, so nothing can be clipped")
    return None


def policy_collapsed(history: History) -> Found | None:
    """Find an entropy below a tenth of its start, within ten rollouts or without a reward that rises."""
    steps, values = blocks(history, "entropy")
    rollouts = len(history["reward"].steps) / len(history["entropy"].steps)  # in a step that was logged
    start = values[:3].max(initial=0.0)
    where = stretch((values < 0.1 * start) & (start > 0))
    if where is None or np.median(_is_solved(_reward(history).values)[-3:]) > 0:
        return None
    high = np.append(0, np.flatnonzero(values[: where.start] > 0.8 * start))[-1]
    is_slow = where.start - high > 1 and (steps[where.start] - steps[high]) * rollouts > 10
    if is_slow and _learns(history):
        return None
    evidence = f"{np.median(values[where]):.2g} nats, {start:.3g} until step {steps[high]}"
    return Found(int(steps[where.start]), "entropy", evidence)


def policy_still(history: History) -> Found | None:
    """Find a learning rate with which the weights stay. AdamW moves each by at most about the rate in a step."""
    planned = max(history.settings.get("max_steps") or 0, history.last_step if history.is_over else 0)
    rate = max(history["learning_rate"].values.max(initial=0), history.settings.get("learning_rate") or 0)
    text = f"{rate:.2g} moves a weight by at most about {rate * planned:.1g} in {counted(planned, 'step')}"
    return Found(1, "learning_rate", text) if 0 < planned < 1e-6 / max(rate, 1e-30) else None


def answers_masked(history: History) -> Found | None:
    """Find updates without a loss because all answers are cut off, and the loss leaves out those."""
    if not history.settings.get("mask_truncated_completions", True):
        return None
    steps, share = blocks(history, "completions/clipped_ratio")
    rows = zip(share, *(blocks(history, key, 1.0).values for key in ("entropy", "grad_norm")), strict=False)
    share, entropy, gradient = np.array([*rows]).reshape(-1, 3).T
    where = _lasts(history, (share >= 0.99) & (entropy == 0) & (gradient == 0))
    seen = entropy[entropy > 0]
    if where is None or seen.max(initial=0) > 3 * seen.min(initial=math.inf):  # the policy itself has collapsed
        return None
    return Found(int(steps[where.start]), "completions/clipped_ratio", "100 %, and no answer has a gradient")


def length_rewarded(history: History) -> Found | None:
    """Find answers that grow, and a reward whose changes from rollout to rollout are those of the length."""
    (steps, length), reward = blocks(history, "completions/mean_length"), blocks(history, "reward").values
    # the changes of two curves that rise together, as in reasoning, have a correlation; their third differences none
    orders = [[np.diff(each[: min(len(length), len(reward))], n) for each in (length, reward)] for n in (1, 3)]
    if len(orders[1][0]) < 15 or not all(np.ptp(changes) for pair in orders for changes in pair):
        return None
    level, together = sixths(length), min(float(np.corrcoef(np.array(pair))[0, 1]) for pair in orders)
    where = stretch(length > (level[0] + level[-1]) / 2)
    if where is None or level[-1] < 1.5 * level[0] or together < 0.8:  # recorded healthy runs have 0.5
        return None
    text = f"{level[0]:.3g} to {level[-1]:.3g} tokens; correlation with the reward's changes {together:.2f}"
    return Found(int(steps[where.start]), "completions/mean_length", text)


def too_few_rollouts(history: History) -> Found | None:
    """Find a run that has ended before anything can be said."""
    count = len(history["reward"].steps) if "reward" in history.keys else 0
    is_each = count and max(len(history[key].steps) for key in history.keys) >= history.last_step
    text = counted(count, "rollout") if is_each else f"{counted(count, 'log')} of the reward"  # a mean of rollouts
    return Found(0, "", text) if history.is_over and count < 6 else None


def entropy_collapses(history: History) -> Found | None:
    """Find an entropy that will be a tenth of its highest level within this run, without a reward that rises."""
    steps, values = history["entropy"].finite
    if _learns(history) or len(_reward(history).values) < 10 or len(values) < 12:  # healthy runs would print it
        return None
    level = np.maximum(sixths(values), 1e-12)
    first, last = level.max(), level[-1]
    where = stretch(values < first / 2)
    slope = 3 * math.log(last / level[3]) / max(steps[-1] - steps[0], 1)  # their middles are a third of the run apart
    arrival = history.last_step + max(math.log(10 * last / first) / -min(slope, -1e-12), 0)
    if where is None or arrival > max(history.settings.get("max_steps") or 0, 1.5 * steps[-1]):
        return None
    evidence = f"{first:.3g} to {last:.3g} nats, a tenth of it by step {arrival:.0f}"
    return Found(int(steps[where.start]), "entropy", evidence)


def _lasts(history: History, bad: np.ndarray, *, to_end: bool = False, least: int = 3) -> slice | None:
    """Return the stretch of bad values. If the run is over, one is enough if all are bad, or (`to_end`) the last."""
    start = int(np.flatnonzero(np.append(True, ~bad))[-1])
    is_enough = history.is_over and start < len(bad) and (to_end or not start)
    return slice(start, len(bad)) if is_enough else stretch(bad, least)


def _nan(history: History, *keys: str, **enough: Any) -> Found | None:
    """Find metrics that stop being numbers, all of them. `_lasts` has the other arguments."""
    known = [key for key in keys if key in history.keys]
    where = {key: _lasts(history, ~np.isfinite(history[key].values), **enough) for key in known}
    since = [int(history[key].steps[bad.start]) for key, bad in where.items() if bad]
    return Found(max(since), ", ".join(where), "NaN") if since and len(since) == len(where) else None


def not_a_number(history: History) -> Found | None:
    """Find a gradient, or else a loss, that stops being a number."""
    history.first("grad_norm", "loss")
    # the scaler of fp16 leaves out single steps, and several at the start
    enough = {"to_end": False, "least": 10} if history.settings.get("fp16") else {"to_end": True}
    return _nan(history, "grad_norm", **enough) or _nan(history, "loss", **enough)


def steps_left_out(history: History) -> Found | None:
    """Find optimizer steps that were left out, at least 1 % of all. Only logs after such a step have the metric."""
    if "steps/nonfinite" not in history.keys:
        return None
    steps, values = history["steps/nonfinite"]
    is_rare = values.sum() < 0.01 * history.last_step
    return None if is_rare else Found(int(steps[0]), "steps/nonfinite", f"{values.sum():.0f} in all")


def reward_missing(history: History) -> Found | None:
    """Find a reward that is NaN, in total or in all functions, or that is no longer logged."""
    steps = history["reward"].steps
    if found := _nan(history, "reward") or _nan(history, *_reward_functions(history)):
        return found
    usual, missing = np.diff(steps).max(initial=1), history.last_step - steps[-1]
    is_late = len(steps) > 2 and missing > 4 * usual
    return Found(int(steps[-1] + usual), "reward", f"not logged for {missing} steps") if is_late else None


def _reward_functions(history: History) -> list[str]:
    return sorted(key for key in history.keys if key.startswith("rewards/") and key.endswith("/mean"))


def reward_part_missing(history: History) -> Found | None:
    """Find a reward function that has never returned a number, beside one that has."""
    functions = _reward_functions(history)
    silent = [key for key in functions if not np.isfinite(history[key].values).any()]
    if not silent or silent == functions or len(history["reward"].steps) < (6 if history.is_over else 50):
        return None  # it may judge rare prompts only
    return Found(1, ", ".join(silent), "NaN in each log")


def reward_constant(history: History) -> Found | None:
    """Find a reward that is the same in each log, and in each group if that is logged."""
    steps, values = history["reward"].finite
    spread = history["reward_std"].finite.values if "reward_std" in history.keys else np.zeros(len(values) // 3)
    if not len(values) or np.ptp(values) or spread.any():
        return None
    # while it runs, the next group may be the first that is not all wrong
    is_flat = len(spread) > 0 if history.is_over else len(values) >= (20 if values[0] in (0, 1) else 3)
    return Found(int(steps[0]), "reward", f"{values[0]:.4g} in {counted(len(values), 'log')}") if is_flat else None


def gradient_zero(history: History) -> Found | None:
    """Find rollouts of which no update has a gradient, unless their answers are right."""
    steps, values = blocks(history, "grad_norm", 1.0)  # recorded runs of GSPO clip everything in some updates
    bad = values < 1e-8
    if "reward" in history.keys and len(reward := blocks(history, "reward").values):
        bad[: len(reward)] &= ~_is_solved(reward)[: len(bad)]
    where = _lasts(history, bad)
    return Found(int(steps[where.start]), "grad_norm", "0 in each update") if where else None


def gradient_spikes(history: History) -> Found | None:
    """Find gradients ten times as large as usual, in three updates and in one of a hundred."""
    steps, values = history["grad_norm"].finite
    usual = float(np.quantile(values[values > 0], 0.75)) if (values > 0).sum() >= 20 else math.inf
    places = np.flatnonzero(values > 10 * usual)  # recorded runs have at most two such updates
    left = np.arange(len(places), 0, -1)
    often = (left >= 3) & (left >= 0.01 * (len(values) - places))  # from which spike on there are enough
    if not often.any():
        return None
    evidence = f"above {10 * usual:.3g} in {left[often][0]} updates, usually {usual:.3g}"
    return Found(int(steps[places[often][0]]), "grad_norm", evidence)


def reference_never_moves(history: History) -> Found | None:
    """Find a reference that has not moved, or will not before the run ends."""
    moved, settings, last = history["ref/refreshes"].finite.values.any(), history.settings, history.last_step
    every = settings.get("ref_model_sync_steps") or 512  # TRL's default
    is_short = 0 < (settings.get("max_steps") or 0) <= every and settings.get("ref_model_sync_kl") is None
    if moved or not (is_short or last > every + 64):  # it waits for a rollout
        return None
    return Found(1 if is_short else every, "ref/refreshes", f"0 in {last} steps, with ref_model_sync_steps {every}")


def reference_collapsed(history: History) -> Found | None:
    """Find a reference that has moved after the reward had fallen for good."""
    moves, (steps, values) = history["ref/refresh_step"].finite.values, _reward(history)
    if len(values) < 12 or _learns(history):
        return None
    level = sixths(values)
    where = stretch(values < (level[0] + level.max()) / 2)
    if where is None or where.start <= values.argmax() or level.max() - level[0] <= 2 * noise(values):
        return None
    late = moves[moves >= steps[where.start]]
    evidence = f"{level.max():.3g} at best, {level[-1]:.3g} at the end, {counted(len(late), 'move')} since it fell"
    return Found(int(late[0]), "reward", evidence) if len(late) else None


def sampling_truncated(history: History) -> Found | None:
    """Find a `top_p` that is too low."""
    top_p = history.settings["top_p"] or 1
    # docs/evidence.md: 12 % of the gradient is bias at 0.8, and 0.7 costs 8 points of accuracy, with the mask too
    return Found(1, "", f"top_p {top_p:g}") if top_p < 0.9 else None


def generation_slow(history: History) -> Found | None:
    """Find generations that take nearly all the time from one rollout to the next."""
    history.first("time/update")
    steps, seconds = history["time/generation"].finite
    total = np.zeros(len(steps) + 1)
    for phase in (history[key].finite for key in history.keys if key.startswith("time/")):
        np.add.at(total, np.searchsorted(steps, phase.steps, "right"), phase.values)
    shares = seconds / np.maximum(total[1:], 1e-12)
    where = stretch(shares > 0.8, least=8)  # verl's runs have 0.45 to 0.7
    if where is None:
        return None
    return Found(int(steps[where.start]), "time/generation", f"{np.median(shares[where]):.0%} of the time")


def padding_computed(history: History) -> Found | None:
    """Find batches that are mostly padding, where nothing trims it."""
    share, is_trimmed = np.median(history["padding/share"].finite.values), history.settings["trim_padding"]
    return Found(1, "padding/share", f"{share:.0%}") if share > 0.5 and not is_trimmed else None
