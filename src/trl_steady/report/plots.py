"""Pictures of runs, as SVG in the colours of the page. This file alone needs matplotlib."""

import io
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, cast

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trl_steady.report.history import History, Series
from trl_steady.report.symptoms import Finding

_PICTURES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
POINTS = 300
"""Most points of a curve. Each is the median of a stretch of a longer run, beside the range of the stretch."""
MOST_FUNCTIONS = 12
"""Most pictures of single reward functions."""
_FARTHEST = 1e30  # matplotlib cannot place larger numbers
_INK, _GRID, _ALARM = "#010203", "#020304", "#030405"
# those of Okabe and Ito, which are told apart in grey too: blue, orange, green, yellow, sky, pink
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#e69f00", "#56b4e9", "#cc79a7")
_VARIABLES = {_INK: "ink", _GRID: "grid", _ALARM: "alarm"}
for _number, _colour in enumerate(_COLOURS, 1):
    _VARIABLES[_colour] = f"c{_number}"
_DASHES = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (1, 3)))
_LOOK: Any = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "trl-steady",  # the same run gives the same bytes
    "text.parse_math": False,  # the name of a run may have dollars
    "font.size": 11,
    "text.color": _INK,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 10,
}


def pictures(runs: Mapping[str, Sequence[History]], findings: Sequence[Finding] = ()) -> Iterator[tuple[str, str]]:
    """Yield title and SVG of each picture for which the runs have logged a metric.

    Args:
        runs: Name -> runs that differ in their seeds. Several runs are compared.
        findings: Symptoms of the run. A line marks the step at which one that belongs to a picture began.
    """
    histories: list[History] = []
    for seeds in runs.values():
        histories += seeds
    with matplotlib.rc_context(_LOOK):
        for title, picture in _named_pictures(histories):
            axis = Figure(figsize=(5, 2.9)).subplots()
            axis.set(xlabel="optimizer step", ylabel=picture["unit"])
            if len(histories) == 1:
                keys = draw(axis, picture, histories[0])
            else:
                first_line = next(iter(picture.get("lines", {})), "")
                keys = draw_comparison(axis, first_line, runs)
            if not keys:
                continue
            for finding in findings:
                if _belongs(finding.metric, keys):
                    axis.axvline(finding.since, color=_ALARM, lw=2, ls="--", label=finding.symptom.name)
            yield title, _svg(axis)


def _named_pictures(histories: Sequence[History]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield title and table of each picture of plots.toml, one with a "*" once for each reward function."""
    for title, picture in _PICTURES.items():
        if "*" not in title:
            yield title, picture
            continue
        for name in reward_functions(histories)[:MOST_FUNCTIONS]:
            lines = {key.replace("*", name): label for key, label in picture["lines"].items()}
            yield title.replace("*", name), {**picture, "lines": lines}


def reward_functions(histories: Sequence[History]) -> list[str]:
    """Return the names of the reward functions, if there are several: one alone is the reward."""
    names: set[str] = set()
    for history in histories:
        for key in history.keys:
            if key.startswith("rewards/") and key.endswith("/mean"):
                names.add(key.removeprefix("rewards/").removesuffix("/mean"))
    if len(names) == 1:
        return []
    return sorted(names)


def _belongs(metric: str, keys: Set[str]) -> bool:
    """Tell whether the metric of a symptom belongs to a picture of these metrics."""
    if metric.startswith("rewards/"):  # one of several functions, or some of them
        return not keys.isdisjoint(metric.split(", "))
    root = metric.split("/")[0]
    return any(key.split("/")[0] == root for key in keys)


def draw(axis: Axes, picture: Mapping[str, Any], run: History) -> set[str]:
    """Draw what a run has logged of a picture of plots.toml, and return the metrics that are drawn."""
    drawn: set[str] = set()

    lines = picture.get("lines", {})
    for number, (key, label) in enumerate({**lines, **picture.get("dots", {})}.items()):
        if not len(run.finite_values(key)):
            continue
        drawn.add(key)
        steps, (low, middle, high) = thinned(run[key])
        dashes = ""
        marker = "o"
        if key in lines and len(steps) > 1:
            dashes = _DASHES[number]
            marker = ""
        text = f"{label} {middle[-1]:.3g}"
        axis.plot(steps, middle, color=_COLOURS[number], ls=dashes, marker=marker, ms=4, label=text)
        if key in lines:
            axis.fill_between(steps, low, high, color=_COLOURS[number], alpha=0.2, linewidth=0)

    if "band" in picture:
        low_key, high_key, label = picture["band"]
        if len(run.finite_values(low_key)) and len(run.finite_values(high_key)):
            drawn |= {low_key, high_key}
            steps, (_, low, _) = thinned(run[low_key])
            high_steps, (_, high, _) = thinned(run[high_key])
            high = np.interp(steps, high_steps, high)
            axis.fill_between(steps, low, high, color=_COLOURS[0], alpha=0.15, label=label)

    stack: dict[str, Series] = {}
    for key, label in picture.get("stack", {}).items():
        if run.finite_values(key).any():
            drawn.add(key)
            stack[label] = run[key].finite
    _draw_stack(axis, stack)

    if not drawn:
        return drawn
    for level in picture.get("levels", ()):
        values = [run.settings[name] for name in level["settings"] if run.settings.get(name) is not None]
        if values:
            height = level["base"] + level["sign"] * values[0]
            height = min(max(height, -_FARTHEST), _FARTHEST)
            axis.axhline(height, color=_INK, lw=1, ls=":", label=level["label"])
    for key, label in picture.get("steps", {}).items():
        for step in np.unique(run.finite_values(key)):
            axis.axvline(step, color=_COLOURS[1], lw=1, label=label)
            label = ""  # once in the legend
    return drawn


def _draw_stack(axis: Axes, series: Mapping[str, Series]) -> None:
    """Draw metrics on top of each other, as stairs: a value holds since the log before. Without a log it is 0."""
    if not series:
        return
    steps = np.unique(np.concatenate([metric.steps for metric in series.values()]))
    edges = [0]
    for stretch in _stretches(steps):
        edges.append(stretch[-1])
    base = np.zeros(len(edges) - 1)
    for number, (label, metric) in enumerate(series.items()):
        values = np.zeros(len(steps))
        values[np.searchsorted(steps, metric.steps)] = np.clip(metric.values, -_FARTHEST, _FARTHEST)
        top = base + [stretch.mean() for stretch in _stretches(values)]
        text = f"{label} {values.mean():.3g}"
        axis.stairs(top, edges, baseline=base, label=text, color=_COLOURS[number], alpha=0.75, fill=True)
        base = top


def draw_comparison(axis: Axes, key: str, runs: Mapping[str, Sequence[History]]) -> set[str]:
    """Draw the mean of a metric over the seeds of each name, and their range, and return the metrics drawn."""
    drawn: set[str] = set()
    for number, (name, seeds) in enumerate(runs.items()):
        curves: list[tuple[np.ndarray, np.ndarray]] = []
        for run in seeds:
            if len(run.finite_values(key)):
                steps, (_, middle, _) = thinned(run[key])
                curves.append((steps, middle))
        if not curves:
            continue
        drawn.add(key)
        longest, _ = max(curves, key=lambda curve: len(curve[0]))
        values = np.stack([np.interp(longest, steps, middle, right=np.nan) for steps, middle in curves])
        colour = _COLOURS[number % len(_COLOURS)]
        dashes = _DASHES[number % len(_DASHES)]
        axis.plot(longest, values.mean(0), label=clean(name), color=colour, ls=dashes)
        axis.fill_between(longest, values.min(0), values.max(0), color=colour, alpha=0.15, linewidth=0)
    return drawn


def thinned(series: Series) -> tuple[np.ndarray, np.ndarray]:
    """Return steps (n,) and least, median and greatest values (3, n) of at most `POINTS` stretches."""
    steps, values = series.finite
    ends: list[int] = []
    points: list[tuple[float, float, float]] = []
    end = 0
    for stretch in _stretches(np.clip(values, -_FARTHEST, _FARTHEST)):
        end += len(stretch)
        ends.append(end - 1)
        points.append((stretch.min(), float(np.median(stretch)), stretch.max()))
    return steps[ends], np.array(points).T


def _stretches(values: np.ndarray) -> list[np.ndarray]:
    """Cut values into at most `POINTS` stretches of nearly one length."""
    if not len(values):
        return []
    size = math.ceil(len(values) / POINTS)
    return np.array_split(values, math.ceil(len(values) / size))


def _svg(axis: Axes) -> str:
    """Return the picture for a page that has the colours as CSS variables."""
    labels = axis.get_legend_handles_labels()[1]
    rows = math.ceil(len(labels) / 2)
    axis.yaxis.set_major_formatter("{x:.3g}")
    axis.set_position((0.19, 0.17, 0.78, 0.78 - 0.08 * rows))
    if rows:
        axis.legend(loc="lower left", bbox_to_anchor=(-0.15, 1.0), ncols=2, borderaxespad=0)
    file = io.StringIO()
    cast(Figure, axis.figure).savefig(file, format="svg", transparent=True, metadata={"Date": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' (width|height)="[^"]*pt"', "", svg, count=2)
    for name in set(re.findall(r' id="([^"]*)"', svg)) - set(re.findall(r"#([\w-]+)", svg)):
        svg = svg.replace(f' id="{name}"', "")  # nothing refers to it
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var(--{variable})")
    return svg


def clean(text: object) -> str:
    """Return a text without lone surrogates, control characters, and those that change the direction of text."""
    no_text = "[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
    return re.sub(no_text, "\N{REPLACEMENT CHARACTER}", str(text))
