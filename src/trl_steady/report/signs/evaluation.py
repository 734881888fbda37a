"""Signs in the metrics of evaluations, which no reward touches."""

from collections.abc import Sequence
from typing import cast

from trl_steady.report.history import History
from trl_steady.report.signs.common import SURE_DIP, SURE_FALL, Found, parted
from trl_steady.report.signs.reward import is_share
from trl_steady.report.statistics import HEALTHY_TREND, blocks, deepest_fall, trend

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
    """Find a training reward with little left to gain beside an evaluation of which most is still wrong.

    Both must be shares. The last three evaluations are read, and the rewards since the first of them.
    """
    reward = history["reward"].finite
    keys = ["eval_reward"] if "eval_reward" in history.keys else []
    try:
        keys += _metrics(history)
    except KeyError:
        if not keys:
            raise
    if not is_share(reward.values):
        return None
    for key in keys:
        evaluation = history[key].finite
        if len(evaluation.values) < 3 or not is_share(evaluation.values):
            continue
        since = evaluation.steps[-3]
        recent = reward.values[reward.steps > since]
        if len(recent) < 3:
            continue
        trained = float(recent.mean())
        held_out = float(evaluation.values[-3:].mean())
        if trained >= _FULL and held_out < _MOST_WRONG:
            of_same_answers = "eval_reward" in history.keys and key != "eval_reward"
            text = f"{held_out:.3g} in the last three evaluations, beside a training reward of {trained:.3g}"
            return Found(int(since), key, text, {"reward_differs": of_same_answers})
    return None


_FULL = 0.9
"""A reward above it has little left to gain."""
_MOST_WRONG = 0.5


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
