"""The panels of this recipe: KL by each estimator, off-policy statistic, clipped tokens, dropped sequences.

python recipes/v32/panels.py both.png V3.2=outputs/v32/results.json GRPO=... compares runs.
"""

import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from matplotlib.axes import Axes

from common import report

# the statistic's quantiles and their line styles
QUANTILES = {"q99": ":", "q90": "--", "q50": "-"}


def kl(axis: Axes, results: Mapping[str, Any]) -> None:
    """Draw the KL by each estimator, with the correction's ratio if the loss has it. The loss uses k3."""
    for name in ("k1", "k2", "k3"):
        axis.plot(*report.series(results["history"], f"kl/{name}"), "o-", markersize=3, label=name)
    axis.set(title="KL to the reference, nats a token")
    _legend_above(axis)


def statistic(axis: Axes, results: Mapping[str, Any]) -> None:
    """Draw the off-policy statistic: quantiles over the sequences of an update, and the threshold if there is one."""
    for name, style in QUANTILES.items():
        series = report.series(results["history"], f"off_policy_{name}")
        axis.plot(*series, style, color="tab:purple", label=name)
    threshold = results["objective"]["off_policy_mask_threshold"]
    if threshold is not None:
        axis.axhline(threshold, color="tab:red", linewidth=1, label=rf"threshold {threshold:g}")
    axis.set(title="Off-policy statistic of the sequences, nats a token")
    _legend_above(axis)


def clipped(axis: Axes, results: Mapping[str, Any]) -> None:
    """Draw the share of tokens that are clipped."""
    _share(axis, results, "clip_ratio/region_mean", "Share of tokens that the clip silences")


def dropped(axis: Axes, results: Mapping[str, Any]) -> None:
    """Draw the share of all sequences of an update that the mask drops, for any advantage."""
    _share(axis, results, "dropped/off_policy", "Share of sequences that the mask drops")


def _share(axis: Axes, results: Mapping[str, Any], name: str, title: str) -> None:
    steps, shares = report.series(results["history"], name)
    axis.bar(steps, shares, color="tab:red")
    axis.set(title=title, ylim=(0, max(0.25, *(1.1 * share for share in shares))))


def _legend_above(axis: Axes) -> None:
    low, high = axis.get_ylim()
    axis.set_ylim(low, high + 0.15 * (high - low))
    axis.legend(ncols=4, fontsize="small", loc="upper center")


def compare(axis: Axes, runs: Mapping[str, Mapping[str, Any]], *, name: str, title: str) -> None:
    """Draw one logged value of several runs."""
    for label, results in runs.items():
        axis.plot(*report.series(results["history"], name), "o-", markersize=3, label=label)
    if name == "kl":
        axis.set_yscale("symlog", linthresh=0.01)  # shows zeros, and more than the largest value
        axis.margins(y=0.2)  # room for the legend
    axis.set_title(title)
    axis.legend(ncols=3, fontsize="small", loc="upper left")


def main(path: str, *named: str) -> None:
    """Draw KL and gradient norm of several runs, given as `label=results.json`."""
    pairs = (name.split("=", 1) for name in named)
    runs = {label: json.loads(Path(file).read_text()) for label, file in pairs}
    titles = {"kl": "KL in the loss, nats a token", "grad_norm": "Norm of the gradient before it is clipped"}
    report.draw(Path(path), [[partial(compare, name=name, title=title)] for name, title in titles.items()], runs)


if __name__ == "__main__":
    main(*sys.argv[1:])
