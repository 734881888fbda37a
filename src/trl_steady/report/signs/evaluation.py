"""Signs in the metrics of evaluations, which no reward touches."""

import re
from collections.abc import Sequence
from typing import cast

from trl_steady.report.history import History
from trl_steady.report.signs.common import SURE_DIP, SURE_FALL, Found, parted
from trl_steady.report.signs.reward import is_share, parts_are_full
from trl_steady.report.statistics import HEALTHY_TREND, blocks, deepest_fall, last_sixth, trend

_BETTER_LOW = ("error", "wrong", "fail", "miss", "penal", "repet", "toxic", "refus", "viol", "cut", "hack", "length")
"""Words in the names of metrics of which less is better, or that are neither good nor bad."""
_LEAST_LOSS = 0.1
"""Share of a metric's level below which a fall is none."""


def evaluation_falls(history: History) -> Found | None:
    """Find a share of good completions in evaluations that falls while the reward rises: the reward is exploited.

    The limits were tried on simulated runs of 8 to 40 evaluations, with a rising reward and a metric without a trend.
    At most one in 400 showed the symptom.
    """
    sure = SURE_FALL if history.is_over else SURE_DIP
    keys = _metrics(history)
    if trend(blocks(history, "reward").values) <= HEALTHY_TREND:
        return None
    for key in keys:
        values = history[key].finite.values
        found = parted(history, ["reward"], [key])
        fall = deepest_fall(values)
        if found is None or fall is None or not is_share(values):
            continue
        if fall.z >= sure and fall.low <= (1 - _LEAST_LOSS) * fall.high:
            return found
    return None


def held_out_falls(history: History) -> Found | None:
    """Find a reward that rises while that of held-out problems falls, of one set or of one of several."""
    of_sets = [key for key in sorted(history.keys) if key.startswith("eval_") and key.endswith("_reward")]
    for key in of_sets or [history.first("eval_reward", "held-out greedy accuracy")]:
        found = parted(history, ["reward"], [key])
        if found is not None:
            return found
    return None


def evaluation_apart(history: History) -> Found | None:
    """Find a training reward with little left to gain, in a run whose evaluations are mostly wrong and do not rise.

    Shares of right answers are read, else rewards: other metrics may be low by nature. Each of several sets must be
    wrong, because one may be meant to be hard.
    """
    reward = history["reward"].finite
    rewards = [key for key in sorted(history.keys) if re.fullmatch(r"eval_(\w+_)?reward", key)]
    accuracies = [key for key in sorted(history.keys) if re.fullmatch(r"eval_(\w+_)?accuracy", key)]
    if not rewards and not accuracies:
        raise KeyError("eval_reward | eval_accuracy")
    trained = float(last_sixth(reward.values).mean()) if len(reward.values) else 0.0
    if trained < _FULL or not is_share(reward.values) or not parts_are_full(history):
        return None
    keys = accuracies or rewards
    if not all(_stays_wrong(history, key) for key in keys):
        return None
    key = keys[0]
    evaluation = history[key].finite
    of_its_set = f"{key.removesuffix('accuracy')}reward"
    reward_differs = key in accuracies and of_its_set in rewards and not _stays_wrong(history, of_its_set)
    level = evaluation.values[-3:].mean()
    text = f"{level:.3g} in the last three evaluations, beside a training reward of {trained:.3g}"
    return Found(int(evaluation.steps[-3]), key, text, {"reward_differs": reward_differs})


def _stays_wrong(history: History, key: str) -> bool:
    """Tell whether a metric of at least three evaluations is below a half, and has not risen by a tenth."""
    values = history[key].finite.values
    if len(values) < 3 or not is_share(values):
        return False
    level = float(values[-3:].mean())
    return level < _MOST_WRONG and level < values[0] + _LEAST_GAIN


_FULL = 0.9
"""A reward above it has little left to gain."""
_MOST_WRONG = 0.5
_LEAST_GAIN = 0.1
"""An evaluation that has risen by more is only hard."""


def _metrics(history: History) -> list[str]:
    """Return the keys of the evaluation metrics of which more is better. Raises KeyError if there is none."""
    names = cast(Sequence[str], history.settings.get("eval_metrics") or ["accuracy"])
    keys: list[str] = []
    for key in sorted(history.keys):
        is_metric = key.startswith("eval_") and any(key.endswith(f"_{name}") for name in names)
        if is_metric and not any(word in key for word in _BETTER_LOW):
            keys.append(key)
    if not keys:
        raise KeyError("eval_accuracy")
    return keys
