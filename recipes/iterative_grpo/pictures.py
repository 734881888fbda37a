"""A picture that compares runs.

python recipes/iterative_grpo/pictures.py both.png moving=outputs/iterative_grpo/results.json frozen=...
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


def mark_refreshes(axis: Axes, results: Mapping[str, Any]) -> None:
    """Draw a line between the last update with the old reference and the first update with the new one."""
    for i, refresh in enumerate(results["refreshes"]):
        label = "reference set to the policy" if i == 0 else None
        axis.axvline(refresh["step"] + 0.5, color="tab:gray", linestyle="--", linewidth=1, label=label)


def compare(axis: Axes, runs: Mapping[str, Mapping[str, Any]], *, name: str, title: str) -> None:
    """Draw one logged value of several runs, and mark the refreshes of the first run."""
    if name == "kl":
        axis.set_yscale("symlog", linthresh=1e-3)  # shows zeros, and values far below those of the first updates
    for label, results in runs.items():
        axis.plot(*report.series(results["history"], name), "o-", markersize=3, label=label)
    axis.set(title=title)
    axis.margins(y=0.2)  # room for the legend
    mark_refreshes(axis, next(iter(runs.values())))
    axis.legend(loc="upper center", ncols=3, fontsize="small")


def main(path: str, *named: str) -> None:
    """Draw KL and reward of several runs, given as `label=results.json`."""
    pairs = (name.split("=", 1) for name in named)
    runs = {label: json.loads(Path(file).read_text()) for label, file in pairs}
    panels = {"kl": "KL to the reference, per token", "reward": "Reward of each rollout (share right)"}
    report.draw(Path(path), [[partial(compare, name=n, title=title)] for n, title in panels.items()], runs)


if __name__ == "__main__":
    main(*sys.argv[1:])
