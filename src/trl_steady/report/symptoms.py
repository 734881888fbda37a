"""The symptoms of a run: `symptoms.toml` has their texts and limits, this file the functions of the log."""

import math
import tomllib
from collections.abc import Callable, Mapping
from fnmatch import filter as matches
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from trl_steady.report.history import History, Series


class Found(NamedTuple):
    """Signs of a symptom in a log."""

    confidence: float
    """Between 0 and 1."""
    since: int
    """The optimizer step at which it began."""
    evidence: str
    """The numbers that show it."""


Find = Callable[[History], Found | None]


class Symptom(NamedTuple):
    """Something that can be wrong with a run."""

    name: str
    level: Literal["warning", "critical"]
    needs: tuple[str, ...]
    """Metrics, settings as "settings.name", and "notes". "a | b" needs one of two, "a*" one that begins with a."""
    find: Find
    what: str
    """A short clause: what is wrong."""
    advice: str
    """A sentence that names the option to set."""
    page: str
    """Page and section below docs/, such as "troubleshooting.md#everything-is-clipped"."""

    def missing(self, history: History) -> tuple[str, ...]:
        """Return which of `needs` the log does not have."""
        known = {*history.keys, *history.run, *(f"settings.{name}" for name in history.settings)}
        return tuple(need for need in self.needs if not any(matches(known, name) for name in need.split(" | ")))


def _blocks(history: History, key: str, quantile: float = 0.5) -> Series:
    """Return a quantile for each rollout, or for each of at most 200 longer stretches."""
    steps, values = history[key]
    steps, values = steps[~np.isnan(values)], np.clip(values[~np.isnan(values)], -1e30, 1e30)
    rollouts = len(history["reward"].steps) if "reward" in history.keys else len(values)
    size = max(round(len(values) / max(rollouts, 1)), math.ceil(len(values) / 200), 1)
    rows = values[: len(values) // size * size].reshape(-1, size)
    method = "lower" if quantile < 0.5 else "higher"
    return Series(steps[: rows.size : size], np.quantile(rows, quantile, axis=1, method=method))


def _stretch(bad: np.ndarray, least: int = 3) -> slice | None:
    """Return where most are bad (CUSUM), if these are `least` and last to the end, or for half of all."""
    sums = np.concatenate([[0.0], np.cumsum(bad - 0.7)])
    end = int(np.argmax(sums - np.minimum.accumulate(sums)))
    start = int(np.argmin(sums[: end + 1]))
    enough = 0.3 * least - 0.05
    lasts = sums[-1] - sums[start] >= enough or 2 * (end - start) >= len(bad)
    return slice(start, end) if lasts and sums[end] - sums[start] >= enough else None


def _sixths(values: np.ndarray) -> np.ndarray:
    return np.array([np.median(part) for part in np.array_split(values, 6)])


def _noise(values: np.ndarray) -> float:
    return 1.05 * float(np.median(np.abs(np.diff(values))))  # standard deviation, if it is normal


def _trend(values: np.ndarray) -> float:
    """Return the z-score of Mann and Kendall's rank trend."""
    n = len(values)
    pairs = np.triu(np.sign(values[None, :] - values[:, None]), 1).sum()
    return float(pairs / math.sqrt(max(n * (n - 1) * (2 * n + 5) / 18, 1)))


def _reward(history: History) -> Series:
    """Return the reward, or the share of right answers where a reward model that is retrained gives it."""
    return _blocks(history, "reward_model/true" if "reward_model/true" in history.keys else "reward")


def _learns(history: History) -> bool:
    """Tell whether the reward has risen and stays up, or is at its top, or it is too early to tell."""
    values = _reward(history).values
    if len(values) < 6:
        return True
    level = _sixths(values)
    rose = level.max() - level[0] > _noise(values) and level[-1] > (level[0] + level.max()) / 2
    return bool(rose or (values.min() >= 0 and values.max() <= 1 and level[-1] >= 0.9))


def _beyond(key: str, limit: float, unit: str = "%", below: bool = False, q: float = 0.75, least: int = 3) -> Find:
    """Find a metric above a limit, or below it. The quantile is that of the updates of a rollout."""

    def find(history: History) -> Found | None:
        if key not in history.keys:
            return None
        steps, values = _blocks(history, key, q)
        bad = values < limit if below else values > limit
        if (where := _stretch(bad, least)) is None:
            return None
        scale, side = 100 if unit == "%" else 1, "below" if below else "above"
        middle, bound = (f"{scale * number:.3g} {unit}".rstrip() for number in (np.median(values[where]), limit))
        confidence = float(bad[where].sum() / (bad[where].size + 1))
        return Found(confidence, int(steps[where.start]), f"{key} {middle}, {side} {bound}")

    return find


def _surest(*finds: Find) -> Find:
    return lambda history: max((found for find in finds if (found := find(history))), default=None)


def _noted(history: History, text: str) -> Found | None:
    notes = [note for note in map(str, history.run.get("notes") or ()) if text in note]
    return Found(1.0, 0, " ".join(notes)) if notes else None


def _parted(history: History, rising: tuple[str, ...], falling: tuple[str, ...]) -> Found | None:
    """Find a metric that falls from its peak while another rises or stays up."""
    up, down = (next(key for key in keys if key in history.keys) for keys in (rising, falling))
    rise, fall = _blocks(history, up), _blocks(history, down)
    if len(fall.values) < 6:
        return None
    wide = max(len(fall.values) // 12, 1)
    smooth = np.array([np.median(fall.values[max(i - wide, 0) : i + wide + 1]) for i in range(len(fall.values))])
    peak, end, trend = int(smooth.argmax()), float(np.median(fall.values[-3:])), _trend(fall.values[smooth.argmax() :])
    began = int(fall.steps[smooth >= smooth[peak] - _noise(fall.values) / 2][-1])
    before, after = (rise.values[side] for side in (rise.steps <= fall.steps[peak], rise.steps > fall.steps[peak]))
    # 2.6: a chance of 1 in 200 without a trend
    if min(len(before), len(after)) < 3 or trend > -2.6 or smooth[peak] - end < 2 * _noise(fall.values):
        return None
    gained = float(np.median(after[-3:]) - np.median(before[-3:]))
    evidence = f"{up} {gained:+.3g}, {down} {smooth[peak]:.3g} to {end:.3g}"
    return Found(min(1.0, -trend / 4), began, evidence) if gained >= 0 else None


def _grows(history: History, key: str, unit: str) -> Found | None:
    """Find a metric that at least doubles, without a reward that rises."""
    steps, values = _blocks(history, key)
    if len(values) < 6 or _learns(history):
        return None
    level, trend = _sixths(values), _trend(values)
    where = _stretch(values > (level[0] + level[-1]) / 2)
    if where is None or trend < 3 or level[-1] < max(2 * level[0], 1e-6):
        return None
    evidence = f"{key} {level[0]:.3g} to {level[-1]:.3g} {unit}, and the reward does not rise"
    return Found(min(1.0, trend / 6), int(steps[where.start]), evidence)


def _kl_holds(history: History) -> Found | None:
    settings, (steps, kl), reward = history.settings, _blocks(history, "kl"), _blocks(history, "reward").values
    moves = "ref/refreshes" in history.keys and history["ref/refreshes"].finite.values.any()
    if len(reward) < 12 or _trend(kl) < 2.6 or moves:
        return None
    length = np.median(history["completions/mean_length"].finite.values)
    scaled = settings.get("scale_rewards") not in (False, "none") and "reward_std" in history.keys
    cost = (settings["beta"] or 0) * kl * length * (np.median(history["reward_std"].finite.values) if scaled else 1.0)
    gain = float(np.diff(_sixths(reward)[[0, -1]])[0])
    # near the reference, the cost is half of the gain at the optimum of reward - beta KL
    where = _stretch(cost > 0.4 * gain)
    if where is None or gain < _noise(reward) / 2:
        return None
    evidence = f"beta * KL costs {np.median(cost[where]):.2g} an answer, the reward has gained {gain:.2g}"
    return Found(0.7, int(steps[where.start]), evidence)


def _nothing_clips(history: History) -> Found | None:
    settings = history.settings
    passes = (settings["steps_per_generation"] or 1) * settings.get("num_iterations", 1)
    loss = settings.get("loss_type")
    is_sequence = loss in ("gspo", "gspo_token") or settings.get("importance_sampling_level") == "sequence"
    widest = max(settings["epsilon"] or 0, settings.get("epsilon_high") or 0)
    if is_sequence and widest >= 0.1:  # GSPO has 3e-4
        return Found(1.0, 1, f"epsilon {widest:g} is for tokens, and the ratio is of a sequence")
    is_idle = passes <= settings["gradient_accumulation_steps"] and (is_sequence or loss == "gmpo")
    return Found(1.0, 1, f"each rollout has 1 update, with loss_type {loss}") if is_idle else None


def _engine(history: History, kind: str) -> Found | None:
    """Find an engine of one kind: it serves "another" policy, "differs" from the start, or falls "behind"."""
    kl, difference = (partial(_beyond, key, unit="nats per token") for key in _ENGINE)
    another = _surest(kl(1.0), difference(1.0))(history)  # the default of engine_check
    if another or kind == "another":
        return another if kind == "another" else None
    # ESS is about 1 / (1 + 2 kl). 0.9 is a kl of 0.055, 37 times that of the R3 paper's mixture of experts. There, the
    # run that collapsed had 10 % above 2. A mean difference of 0.1 puts a tenth of the ratios outside 0.8 to 1.2
    share = _beyond("mismatch/effective_sample_size", 0.9, below=True, q=0.5)
    found = _surest(share, _beyond("mismatch/above_2", 0.01), kl(0.055), difference(0.1))(history)
    is_late = found is not None and found.since > _blocks(history, found.evidence.split()[0]).steps[0]
    return found if is_late == (kind == "behind") else None


def _groups(history: History, right: bool) -> Found | None:
    if any(key.startswith("value/") for key in history.keys) or history.settings.get("num_generations") == 1:
        return None  # under PPO, a group can be one answer
    # recorded runs reach 1 in single rollouts, and none stays above 0.9
    found, reward = _beyond("frac_reward_zero_std", 0.9, q=0.5)(history), _blocks(history, "reward").values
    if found is None or not len(reward) or np.ptp(reward) == 0:
        return None
    is_share = reward.min() >= 0 and reward.max() <= 1
    middle, last = 0.5 if is_share else (reward.min() + reward.max()) / 2, np.median(reward[-3:])
    wasted = history["frac_reward_zero_std"].finite.values.mean()
    evidence = f"{found.evidence}; reward {last:.3g}; {wasted:.0%} of all rollouts were wasted"
    return found._replace(evidence=evidence) if (last > middle) == right else None


def _entropy(history: History) -> Found | None:
    steps, values = _blocks(history, "entropy")
    if len(values) < 12 or _learns(history):  # with fewer, healthy runs would print it
        return None
    level = np.maximum(_sixths(values), 1e-12)
    first, last = level.max(), level[-1]
    where = _stretch(values < first / 2)
    slope = 3 * math.log(last / level[3]) / max(steps[-1] - steps[0], 1)  # their middles are a third of the run apart
    arrival = history.last_step + max(math.log(10 * last / first) / -min(slope, -1e-12), 0)
    if where is None or arrival > max(history.settings.get("max_steps") or 0, 1.5 * steps[-1]):
        return None
    evidence = f"entropy {first:.3g} to {last:.3g} nats, a tenth of it by step {arrival:.0f}"
    return Found(0.95 if last <= first / 10 else 0.7, int(steps[where.start]), evidence)


def _not_a_number(history: History, *keys: str) -> Found | None:
    """Find metrics that stop being numbers, all of them."""
    where = {key: _stretch(~np.isfinite(history[key].values)) for key in keys if key in history.keys}
    since = [int(history[key].steps[stretch.start]) for key, stretch in where.items() if stretch]
    return Found(1.0, max(since), f"{', '.join(where)} NaN") if since and len(since) == len(where) else None


def _no_reward(history: History) -> Found | None:
    parts = sorted(key for key in history.keys if key.startswith("rewards/") and key.endswith("/mean"))
    if found := _not_a_number(history, "reward") or _not_a_number(history, *parts):
        return found
    steps = history["reward"].steps
    usual, missing = max(np.median(np.diff(steps, prepend=0)), 1), history.last_step - steps[-1]
    return Found(0.9, int(steps[-1] + usual), f"not logged for {missing} steps") if missing > 4 * usual else None


def _constant_reward(history: History) -> Found | None:
    steps, values = history["reward"].finite
    is_flat = len(values) > 2 and np.ptp(values) == 0
    return Found(0.95, int(steps[0]), f"reward {values[0]:.4g} in each of {len(values)} logs") if is_flat else None


def _spikes(history: History) -> Found | None:
    steps, values = history["grad_norm"].finite
    usual = float(np.quantile(values[values > 0], 0.75)) if (values > 0).sum() >= 20 else math.inf
    places = np.flatnonzero(values > 10 * usual)  # recorded runs have at most two such updates
    left = np.arange(len(places), 0, -1)
    often = (left >= 3) & (left >= 0.01 * (len(values) - places))
    if not often.any():
        return None
    evidence = f"grad_norm above {10 * usual:.3g} in {left[often][0]} updates, usually {usual:.3g}"
    return Found(min(1.0, 0.5 + 0.1 * float(left[often][0])), int(steps[places[often][0]]), evidence)


def _never_moves(history: History) -> Found | None:
    settings, last = history.settings, history.last_step
    every = settings.get("ref_model_sync_steps") or 512  # TRL's default
    is_short = 0 < (settings.get("max_steps") or 0) <= every and settings.get("ref_model_sync_kl") is None
    if history["ref/refreshes"].finite.values.any() or not (is_short or last > every + 64):  # it waits for a rollout
        return None
    return Found(1.0, 1 if is_short else every, f"no refresh in {last} steps, with ref_model_sync_steps {every}")


def _moves_to_worse(history: History) -> Found | None:
    steps, values = _reward(history)
    if len(values) < 12 or _learns(history):
        return None
    level, late = _sixths(values), history["ref/refresh_step"].finite.values
    where = _stretch(values < (level[0] + level.max()) / 2)
    late = late[late >= steps[where.start]] if where and where.start > values.argmax() else late[:0]
    evidence = f"reward {level.max():.3g} at best, {level[-1]:.3g} at the end, {len(late)} refreshes since it fell"
    return Found(0.8, int(late[0]), evidence) if len(late) and level.max() - level[0] > 2 * _noise(values) else None


def _slow_generation(history: History) -> Found | None:
    steps, seconds = history["time/generation"].finite
    total = np.zeros(len(steps) + 1)
    for phase in (history[key].finite for key in history.keys if key.startswith("time/")):
        np.add.at(total, np.searchsorted(steps, phase.steps, "right"), phase.values)  # from one rollout to the next
    shares = seconds / np.maximum(total[1:], 1e-12)
    where = _stretch(shares > 0.8, least=8)  # verl's runs have 0.45 to 0.7
    if where is None:
        return None
    evidence = f"generation has {np.median(shares[where]):.0%} of the time"
    return Found(0.9, int(steps[where.start]), evidence)


def _padding(history: History) -> Found | None:
    share = np.median(history["padding/share"].finite.values)
    return Found(1.0, 1, f"{share:.0%} padding") if share > 0.5 and not history.settings["trim_padding"] else None


_ENGINE = ("mismatch/kl", "sampling/sampling_logp_difference/mean")
_SCORE, _HELD_OUT = ("rewards/reward_model/mean", "reward"), ("eval_reward", "held-out greedy accuracy")
_FINDS: Mapping[str, Find] = {
    "nothing-clips": _nothing_clips,
    "kl-rises": partial(_grows, key="kl", unit="nats per token"),
    "kl-holds": _kl_holds,
    "engine-other-policy": partial(_engine, kind="another"),
    "engine-falls-behind": partial(_engine, kind="behind"),
    "engine-differs": partial(_engine, kind="differs"),
    "groups-all-right": partial(_groups, right=True),
    "groups-all-wrong": partial(_groups, right=False),
    "entropy-collapses": _entropy,
    "answers-grow": partial(_grows, key="completions/mean_length", unit="tokens"),
    "held-out-falls": partial(_parted, rising=("reward",), falling=_HELD_OUT),
    "reward-model-exploited": partial(_parted, rising=_SCORE, falling=("reward_model/true",)),
    "gradient-spikes": _spikes,
    "not-a-number": lambda h: _not_a_number(h, "grad_norm") or _not_a_number(h, "loss"),
    "reward-missing": _no_reward,
    "reward-constant": _constant_reward,
    "reference-never-moves": _never_moves,
    "reference-collapsed": _moves_to_worse,
    # docs/evidence.md: 12 % of the gradient is bias at 0.8, and 0.7 costs 8 points of accuracy, with the mask too
    "sampling-truncated": lambda h: Found(1.0, 1, f"top_p {p:g}") if (p := h.settings["top_p"] or 1) < 0.9 else None,
    "generation-slow": _slow_generation,
    "padding-computed": _padding,
    "adapter-rounds-away": partial(_noted, text="lost to rounding"),
    "option-idle": partial(_noted, text="cannot act"),
}


def _symptom(name: str, needs: list[str], limits: list[Any] | None = None, **texts: Any) -> Symptom:
    find = _FINDS[name] if limits is None else _surest(*(_beyond(**limit) for limit in limits))
    return Symptom(name=name, needs=tuple(needs), find=find, **texts)


_TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
SYMPTOMS: tuple[Symptom, ...] = tuple(_symptom(name, **record) for name, record in _TEXTS.items())
