"""A map: which of some settings ends first in each cell of a grid of disturbances, and which are tied with it."""

import itertools
import math
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np

from trl_steady.report.compare import interval

__all__ = ["Cell", "arms", "cells", "draw", "draw_gaps", "leading", "summary", "table"]

Ends = Mapping[str, Mapping[Any, float]]  # arm -> seed -> endpoint


class Cell(NamedTuple):
    """A cell of the map. Accuracies are shares of 1."""

    means: dict[str, float]
    """Endpoint of each setting, mean over seeds, the largest first."""
    tied: list[str]
    """Settings that are not shown to end below the first: the 95 % interval of the paired difference holds 0."""

    @property
    def first(self) -> str:
        """The setting that ends first."""
        return next(iter(self.means))

    @property
    def best(self) -> set[str]:
        """The first setting and those that are tied with it."""
        return {self.first, *self.tied}


def arms(grid: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return an arm for each pair of a cell and a setting."""
    pairs = itertools.product(grid["cells"].items(), grid["settings"].items())
    return {_arm(cell, setting): {**disturbance, **how} for (cell, disturbance), (setting, how) in pairs}


def _arm(cell: str, setting: str) -> str:
    return f"{cell}, {setting}"


def cells(grid: Mapping[str, Any], ends: Ends) -> dict[str, Cell]:
    """Return the cells by name. Percentile bootstrap over seeds, as in the other experiments.

    The first of several settings is partly first by chance, so its mean is too high, and a tie is more likely than the
    interval says.
    """
    found = {}
    for cell in grid["cells"]:
        by_seed = {}
        for setting in grid["settings"]:
            of_arm = ends[_arm(cell, setting)]
            by_seed[setting] = np.array([of_arm[seed] for seed in sorted(of_arm)])
        means = {setting: float(values.mean()) for setting, values in by_seed.items()}
        order = sorted(means, key=lambda setting: -means[setting])
        first = by_seed[order[0]]
        tied = []
        for setting in order[1:]:
            low, _ = interval(first - by_seed[setting])
            if low <= 0:
                tied.append(setting)
        found[cell] = Cell({setting: means[setting] for setting in order}, tied)
    return found


def table(found: Mapping[str, Cell]) -> str:
    """Return a Markdown table: a row for each cell, a column for each setting. The first and its ties are bold."""
    settings = sorted({setting for cell in found.values() for setting in cell.means})
    lines = ["| cell | " + " | ".join(settings) + " |", "|---" * (1 + len(settings)) + "|"]
    for name, cell in found.items():
        shown = [_mean(cell.means[setting], is_best=setting in cell.best) for setting in settings]
        lines.append(f"| {name} | " + " | ".join(shown) + " |")
    counts = leading(found)
    lines.append(f"| first or tied, of {len(found)} | " + " | ".join(str(counts[own]) for own in settings) + " |")
    return "\n".join(lines)


def leading(found: Mapping[str, Cell]) -> dict[str, int]:
    """Return for each setting in how many cells it ends first or is tied with the first."""
    settings = next(iter(found.values())).means
    return {setting: sum(setting in cell.best for cell in found.values()) for setting in settings}


def summary(found: Mapping[str, Cell]) -> str:
    """Return a Markdown table: how often each setting leads, and its largest gap to the first, in points."""
    counts = leading(found)
    lines = [f"| setting | first or tied, of {len(found)} | largest gap, points |", "|---|---|---|"]
    for setting in sorted(counts, key=lambda own: -counts[own]):
        gap = max(cell.means[cell.first] - cell.means[setting] for cell in found.values())
        lines.append(f"| {setting} | {counts[setting]} | {100 * gap:.1f} |")
    return "\n".join(lines)


def _mean(value: float, *, is_best: bool) -> str:
    text = f"{100 * value:.1f}"
    return f"**{text}**" if is_best else text


def draw(path: Path, grid: Mapping[str, Any], found: Mapping[str, Cell]) -> None:
    """Draw the map: a square for each cell with the setting that ends first, its accuracy, and the number of ties."""
    rows, columns, settings = grid["rows"], grid["columns"], list(grid["settings"])
    figure, axis = plt.subplots(figsize=(4.4, 5.2), layout="constrained")
    for place, cell in enumerate(found.values()):
        row, column = divmod(place, len(columns))
        colour = f"C{settings.index(cell.first)}"
        axis.fill_between([column, column + 1], row, row + 1, color=colour, alpha=0.25, linewidth=0)
        others = f"and {len(cell.tied)} more" if cell.tied else "alone"
        lines = [*_folded(cell.first), f"{cell.means[cell.first]:.0%}", others]
        axis.text(column + 0.5, row + 0.5, "\n".join(lines), ha="center", va="center", fontsize=8.5)
    axis.set_xticks(
        [i + 0.5 for i in range(len(columns))], [name.replace(" ", "\n") for name in columns], fontsize=8.5
    )
    axis.set_yticks([i + 0.5 for i in range(len(rows))], [name.replace(" ", "\n", 2) for name in rows], fontsize=8.5)
    axis.set(xlim=(0, len(columns)), ylim=(len(rows), 0))
    axis.tick_params(length=0)
    figure.savefig(path, dpi=200)
    plt.close(figure)


def draw_gaps(path: Path, grid: Mapping[str, Any], found: Mapping[str, Cell]) -> None:
    """Draw how far each setting ends below the first: a panel for each setting, with all cells.

    A blue cell is first or tied. A number has the points below the first.
    """
    settings, columns = list(grid["settings"]), len(grid["columns"])
    rows = len(grid["rows"])
    figure, axes = plt.subplots(
        math.ceil(len(settings) / 2), 2, figsize=(4.4, 1.1 * len(settings)), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(settings) :]:
        axis.set_visible(False)
    for number, (setting, axis) in enumerate(zip(settings, axes.flat, strict=False)):
        for place, cell in enumerate(found.values()):
            row, column = divmod(place, columns)
            gap = 100 * (cell.means[cell.first] - cell.means[setting])
            colour, strength = ("C0", 0.45) if setting in cell.best else ("C3", min(gap / 40, 0.8))
            axis.fill_between([column, column + 1], row, row + 1, color=colour, alpha=strength, linewidth=0)
            axis.text(column + 0.5, row + 0.5, f"{gap:.0f}", ha="center", va="center", fontsize=8)
        axis.set_title("\n".join(textwrap.wrap(setting, 22)), fontsize=9)
        axis.set(xlim=(0, columns), ylim=(rows, 0), xticks=[], yticks=[])
        if number % 2 == 0:
            axis.set_yticks([i + 0.5 for i in range(rows)], [_short(name) for name in grid["rows"]], fontsize=7)
        if number >= len(settings) - 2:
            names = [_short(name) for name in grid["columns"]]
            axis.set_xticks([i + 0.5 for i in range(columns)], names, fontsize=7)
        axis.tick_params(length=0)
    figure.savefig(path, dpi=200)
    plt.close(figure)


def _short(name: str) -> str:
    """Return a name in lines for the edge of a small panel."""
    return name.replace(" updates", "").replace(" ", "\n")


def _folded(name: str) -> list[str]:
    """Return the name of a setting in lines that fit a square of the map on a phone."""
    return textwrap.wrap(name.replace("_", "_ "), 11)
