"""A comparison of runs: a picture with the spread over seeds, and a table.

python recipes/moe/variants.py all.png outputs/moe/*/results.json
"""

import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from matplotlib.axes import Axes

from common import report

Runs = Sequence[Mapping[str, Any]]
# colours for colour-blind readers (Okabe and Ito's), and line styles that differ without colour
STYLES = {
    "GRPO": ("#000000", "-"),
    "GRPO, R2": ("#0072B2", "--"),
    "GRPO, R3": ("#009E73", ":"),
    "GSPO": ("#D55E00", "-."),
}
CHANGED, LIVE, REPLAYED = "probe/changed", "probe/live/log_ratio_std", "probe/replayed/log_ratio_std"
TITLES = {
    "reward": "Reward of each rollout (share right)",
    CHANGED: "Experts changed since the rollout, share",
    LIVE: "Log-ratios, standard deviation: live routes",
    REPLAYED: "The same answers and weights: routes replayed",
}
LAST = 10  # rollouts: their mean reward varies less than one check of the last policy
COLUMNS = (CHANGED, LIVE, REPLAYED, "probe/live/beyond_2", "probe/replayed/beyond_2")


def variant(results: Mapping[str, Any]) -> str:
    """Return the label of the run's variant."""
    objective = results["objective"]
    return ", ".join(filter(None, (objective["loss_type"].upper(), objective["router_replay"])))


def over_seeds(axis: Axes, runs: Runs, *, name: str, top: float | None = None) -> None:
    """Draw one value of every variant: the mean over its seeds, and the range from the smallest to the largest."""
    for label, (colour, line) in STYLES.items():
        curves = [report.series(results["history"], name) for results in runs if variant(results) == label]
        if not curves:
            continue
        steps, values = curves[0][0], np.array([curve for _, curve in curves])
        axis.plot(steps, values.mean(axis=0), line, color=colour, linewidth=1.3, label=label)
        axis.fill_between(steps, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.12, linewidth=0)
    axis.set(title=TITLES[name], ylim=(0, top))
    if name == "reward":  # one legend, in the panel that has room
        axis.legend(loc="lower right")


def row(results: Mapping[str, Any]) -> list[float]:
    """Return the accuracies after training, the mean of the last rewards, and the probe's means over rollouts."""
    shares = [way["after"] for way in results["accuracy"].values()]
    shares.append(float(np.mean(report.series(results["history"], "reward")[1][-LAST:])))
    return shares + [float(np.mean(report.series(results["history"], name)[1])) for name in COLUMNS]


def table(runs: Runs) -> str:
    """Return a Markdown table with the seeds of each variant and their mean."""
    lines = [
        f"| | seed | sampled | greedy | last {LAST} rewards | experts changed | log-ratios, live | replayed "
        "| ratios beyond 2, live | replayed |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for label in STYLES:
        rows = {str(r["seed"]): row(r) for r in sorted(runs, key=lambda r: r["seed"]) if variant(r) == label}
        if len(rows) > 1:
            rows["mean"] = list(np.mean(list(rows.values()), axis=0))
        for seed, (*shares, changed, live, replayed, beyond, beyond_replayed) in rows.items():
            in_all = " | ".join(f"{share:.1%}" for share in shares)
            lines.append(
                f"| {label} | {seed} | {in_all} | {changed:.2%} | {live:.3f} | {replayed:.3f} "
                f"| {beyond:.2%} | {beyond_replayed:.2%} |"
            )
    return "\n".join(lines)


def main(path: str, *files: str) -> None:
    """Draw the runs in `files`, which are `results.json` files, and print their table."""
    runs = [json.loads(Path(file).read_text()) for file in files]
    values = [value for results in runs for value in report.series(results["history"], LIVE)[1]]
    top = float(np.quantile(values, 0.99))  # one scale for both spreads; no single rollout stretches it
    panels = (
        (partial(over_seeds, name="reward", top=1.0), partial(over_seeds, name=CHANGED)),
        (partial(over_seeds, name=LIVE, top=top), partial(over_seeds, name=REPLAYED, top=top)),
    )
    report.draw(Path(path), panels, runs)
    print(table(runs))


if __name__ == "__main__":
    main(*sys.argv[1:])
