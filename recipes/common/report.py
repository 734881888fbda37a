"""Tables and pictures that compare runs."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from trl_steady.report.compare import interval

Panel = Callable[[Axes, Any], None]  # draws the contents of `results.json` on one pair of axes
Panels = Sequence[Sequence[Panel]]  # row by row


class Difference(NamedTuple):
    """Two accuracies on the same problems, their difference and its 95 % interval, all as shares of 1."""

    before: float
    after: float
    difference: float
    low: float
    high: float


def difference(before: np.ndarray, after: np.ndarray) -> Difference:
    """Compare (problems, samples) of right answers by a paired bootstrap over problems, with 10,000 resamples."""
    gain = (after - before).mean(axis=1)
    return Difference(float(before.mean()), float(after.mean()), float(gain.mean()), *interval(gain))


def table(rows: Mapping[str, Difference]) -> str:
    """Return a Markdown table with one row per difference."""
    lines = [
        "| accuracy on held-out problems | before | after | difference | 95 % interval |",
        "|---|---|---|---|---|",
    ]
    for name, d in rows.items():
        bounds = f"{d.low:+.1%} to {d.high:+.1%}"
        lines.append(f"| {name} | {d.before:.1%} | {d.after:.1%} | {d.difference:+.1%} | {bounds} |")
    return "\n".join(lines)


def series(history: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Return the optimizer steps at which `name` was logged, and its values."""
    rows = [(row["step"], row[name]) for row in history if row.get(name) is not None]
    return [step for step, _ in rows], [value for _, value in rows]


def draw(path: Path, panels: Panels, results: Any, *, width: float = 5.0) -> None:
    """Save one figure, in which every panel draws `results` over optimizer steps.

    A panel may add a legend of the whole figure, with `loc="outside lower center"`.

    Args:
        path: The picture.
        panels: Row by row.
        results: Passed to each panel.
        width: Inches of a panel. Text has a fixed size, so it is larger in a narrower panel.
    """
    size = {"nrows": len(panels), "ncols": len(panels[0])}
    size["figsize"] = (width * len(panels[0]), 0.65 * width * len(panels))
    figure, axes = plt.subplots(**size, sharex=True, squeeze=False, layout="constrained")
    for axis, panel in zip(axes.flat, itertools.chain(*panels), strict=True):
        panel(axis, results)
        axis.grid(alpha=0.3)
    for axis in axes[-1]:
        axis.set_xlabel("optimizer step")
    figure.savefig(path, dpi=550 / width)
    plt.close(figure)
