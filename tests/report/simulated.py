"""Simulated logs of plain TRL, as noisy as real ones: few groups, sparse logs, prompts of unequal difficulty."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from trl_steady.report.history import History

Row = dict[str, Any]
Curve = Callable[[np.ndarray], np.ndarray]


class Shape(NamedTuple):
    """The properties of a run, beside what it learns."""

    logs: int
    every: int
    """Steps from one log to the next."""
    groups: int
    """Groups in a step."""
    answers: int
    """Answers in a group."""
    low: float
    high: float
    """Reward of a wrong and of a right answer."""
    unequal: float
    """Standard deviation of the difficulty of prompts, in logits."""
    drift: float
    """Standard deviation of a slow drift of the level, in logits."""


def shape(random: np.random.Generator) -> Shape:
    """Return a shape such as real logs have."""
    low, high = [(0.0, 1.0), (0.0, 1.0), (-1.0, 1.0), (0.0, 5.0)][random.integers(4)]
    return Shape(
        logs=int(random.choice([12, 20, 40, 80, 200])),
        every=int(random.choice([1, 5, 10])),
        groups=int(random.choice([1, 2, 4, 8, 16])),
        answers=int(random.choice([4, 8, 16])),
        low=low,
        high=high,
        unequal=float(random.uniform(0.3, 2.5)),
        drift=float(random.uniform(0.0, 0.2)),
    )


def rising(start: float, end: float, pace: float) -> Curve:
    """Return a share of right answers that rises from one level to another."""
    return lambda done: start + (end - start) * (1 - np.exp(-pace * done)) / (1 - math.exp(-pace))


def log(of: Shape, right: Curve, random: np.random.Generator) -> list[Row]:
    """Return the rows of a run whose share of right answers is `right`, from 0 at the start to 1 at the end.

    The other metrics are those of a run that learns slowly: the KL grows to less than 0.1, the entropy falls.
    """
    steps = of.logs * of.every
    done = np.arange(1, steps + 1) / steps
    share = np.clip(right(done), 1e-3, 1 - 1e-3)
    walk = np.cumsum(random.standard_normal(steps)) / math.sqrt(steps) * of.drift
    logits = np.log(share / (1 - share)) + walk
    chances = 1 / (1 + np.exp(-logits[:, None] - of.unequal * random.standard_normal((steps, of.groups))))
    rewards = random.random((steps, of.groups, of.answers)) < chances[:, :, None]
    values = of.low + (of.high - of.low) * rewards
    prompts = of.unequal * np.linspace(-2, 2, 41)
    weights = np.exp(-0.5 * np.linspace(-2, 2, 41) ** 2)
    expected = (1 / (1 + np.exp(-logits[:, None] - prompts))) @ (weights / weights.sum())
    spreads = values.std(axis=2, ddof=1)
    far = random.uniform(0.005, 0.1)
    entropy = random.uniform(0.1, 1.5)
    length = random.uniform(60, 800)
    warmup = random.uniform(0.01, 0.2)
    rows: list[Row] = []
    for end in range(of.every, steps + 1, of.every):
        window = slice(end - of.every, end)
        at = end / steps
        last_differs = bool(spreads[end - 1].any())
        rate = 1e-5 * min(at / warmup, 1.0) * (1 - 0.99 * at)
        row: Row = {"step": end, "loss": 0.01 * random.standard_normal(), "learning_rate": rate}
        row["grad_norm"] = 0.3 * math.exp(0.5 * random.standard_normal()) if last_differs else 0.0
        row["reward"] = float(values[window].mean())
        row["reward_std"] = float(spreads[window].mean())
        row["frac_reward_zero_std"] = float((spreads[window] == 0).mean())
        row["rewards/judge/mean"] = row["reward"]
        row["simulated/level"] = of.low + (of.high - of.low) * float(expected[window].mean())
        row["kl"] = far * at * math.exp(0.2 * random.standard_normal())
        row["entropy"] = entropy * math.exp(-1.2 * at + 0.15 * random.standard_normal())
        row["completions/mean_length"] = length * (1 + 0.3 * at) * math.exp(0.15 * random.standard_normal())
        row["completions/clipped_ratio"] = float(random.beta(1, 30))
        rows.append(row)
    return rows


def healthy(seed: int) -> History:
    """Return the log of a run that learns, or that is good from the start."""
    random = np.random.default_rng(seed)
    of = shape(random)
    if random.random() < 0.3:
        start = random.uniform(0.82, 0.95)
        right = rising(start, min(start + 0.03, 0.97), 2.0)
    else:
        start = random.uniform(0.05, 0.6)
        right = rising(start, min(start + random.uniform(0.25, 0.7), 0.97), random.uniform(0.5, 6.0))
    return over(log(of, right, random))


def over(rows: list[Row], planned: int = 0) -> History:
    """Return the history of a run that has ended, as planned by default."""
    return History(rows, {"settings": {"max_steps": planned or rows[-1]["step"]}})


# Sick runs: each function returns the rows of one, and SICK names the symptoms of which one must be found.


def level(value: float) -> Curve:
    """Return a share of right answers that stays."""
    return lambda done: np.full_like(done, value)


def destroyed(random: np.random.Generator) -> list[Row]:
    good = random.uniform(0.4, 0.95)
    bad = good * random.uniform(0.0, 0.15)
    when = random.uniform(0.2, 0.8)
    width = random.uniform(0.005, 0.08)
    return log(shape(random), lambda done: good + (bad - good) / (1 + np.exp((when - done) / width)), random)


def idle(random: np.random.Generator) -> list[Row]:
    of = shape(random)._replace(drift=0.0, logs=int(random.choice([40, 80, 200])))
    rows = log(of, level(random.uniform(0.1, 0.6)), random)
    for row in rows:
        noise = math.exp(0.1 * random.standard_normal())
        row |= {"kl": 1e-3 * noise, "entropy": 0.5 * noise, "completions/mean_length": 200 * noise}
    return rows


def learning(random: np.random.Generator, gain: float = 0.3) -> list[Row]:
    start = random.uniform(0.1, 0.5)
    return log(shape(random), rising(start, start + gain, 2.0), random)


def lost_gradient(random: np.random.Generator) -> list[Row]:
    rows = log(shape(random)._replace(groups=8, unequal=0.5), level(0.5), random)
    for row in rows[int(random.uniform(0, 0.4) * len(rows)) :]:
        row["grad_norm"] = 0.0
    return rows


def blind(random: np.random.Generator) -> list[Row]:
    rows = log(shape(random), level(random.uniform(0.35, 0.75)), random)
    for row in rows:
        row |= {"reward_std": 0.0, "frac_reward_zero_std": 1.0, "grad_norm": 0.0}
    return rows


def format_never_met(random: np.random.Generator) -> list[Row]:
    rows = learning(random)
    for row in rows:
        row |= {"rewards/format/mean": 0.0, "rewards/format/std": 0.0}
    return rows


def kl_missing(random: np.random.Generator) -> list[Row]:
    return [{**row, "kl": None} for row in learning(random)]


def chatty(random: np.random.Generator) -> list[Row]:
    rows = log(shape(random), level(random.uniform(0.1, 0.6)), random)
    times = random.uniform(2.5, 8.0)
    for at, row in enumerate(rows):
        row["completions/mean_length"] *= 1 + (times - 1) * at / len(rows)
    return rows


def pays_for_length(random: np.random.Generator) -> list[Row]:
    rows = learning(random)[:200]
    limit = random.uniform(300, 2000)
    full = random.uniform(0.3, 1.2) * len(rows)
    for at, row in enumerate(rows):
        is_full = at >= full
        length = (
            limit * min(0.1 + 0.9 * at / full, 1.0) * (1 + (0.005 if is_full else 0.08) * random.standard_normal())
        )
        row["completions/mean_length"] = length
        row["completions/clipped_ratio"] = 0.97 if is_full else 0.02
        row["reward"] = length / limit + 0.01 * random.standard_normal()
    return rows


def cut_off(random: np.random.Generator) -> list[Row]:
    rows = learning(random)
    for row in rows:
        row["completions/clipped_ratio"] = float(random.uniform(0.7, 1.0))
    return rows


def kl_drifts(random: np.random.Generator) -> list[Row]:
    of = shape(random)._replace(logs=int(random.choice([40, 80, 200])), drift=0.0)
    rows = log(of, lambda done: 0.2 + 0.4 * np.minimum(done / 0.25, 1.0), random)
    far = random.uniform(1.0, 6.0)
    for at, row in enumerate(rows):
        row["kl"] = far * (at + 1) / len(rows) * math.exp(0.1 * random.standard_normal())
    return rows


def kl_huge(random: np.random.Generator) -> list[Row]:
    rows = learning(random)
    for row in rows:
        row["kl"] = float(random.choice([1.5, 3.0, 20.0, 400.0]) * random.uniform(0.5, 2.0))
    return rows


def babbles(random: np.random.Generator) -> list[Row]:
    rows = log(shape(random), level(random.uniform(0.2, 0.6)), random)
    when = random.uniform(0.1, 0.6) * len(rows)
    far = random.uniform(1.8, 7.0)
    for at, row in enumerate(rows):
        row["entropy"] += far * min(max(at - when, 0.0) / (0.2 * len(rows)), 1.0)
    return rows


def repeats(random: np.random.Generator) -> list[Row]:
    rows = log(shape(random)._replace(logs=int(random.choice([40, 80, 200]))), level(random.uniform(0.1, 0.5)), random)
    for at, row in enumerate(rows):
        row["entropy"] = math.exp(-random.uniform(4.0, 4.5) * at / len(rows) + 0.1 * random.standard_normal())
    return rows


def easy_part(random: np.random.Generator) -> list[Row]:
    rows = log(shape(random)._replace(low=0.0, high=1.0), rising(0.15, 0.95, 4.0), random)
    keeps = random.uniform(0.05, 0.3)
    for at, row in enumerate(rows):
        accuracy = 0.5 * (keeps + (1 - keeps) * math.exp(-6 * at / len(rows))) + 0.03 * random.standard_normal()
        row["rewards/accuracy/mean"] = max(accuracy, 0.0)
        row["reward"] += row["rewards/accuracy/mean"]
    return rows


def wrong_weights(random: np.random.Generator) -> list[Row]:
    rows = log(shape(random), level(0.02), random)
    for row in rows:
        row["entropy"] = float(random.uniform(7, 11))
    return rows


SICK: dict[Callable[[np.random.Generator], list[Row]], set[str]] = {
    destroyed: {"reward-falls"},
    idle: {"reward-flat", "policy-still"},
    lost_gradient: {"gradient-zero"},
    blind: {"groups-alike", "reward-constant"},
    format_never_met: {"reward-part-constant"},
    kl_missing: {"kl-nan"},
    chatty: {"answers-grow"},
    pays_for_length: {"length-rewarded"},
    cut_off: {"answers-cut-off"},
    kl_drifts: {"kl-rises"},
    kl_huge: {"kl-explodes"},
    babbles: {"entropy-explodes"},
    repeats: {"policy-collapsed", "entropy-collapses"},
    easy_part: {"reward-part-falls"},
    wrong_weights: {"entropy-high"},
}
