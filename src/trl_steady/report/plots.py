"""Pictures of runs, as SVG in the colours of the page. This file alone needs matplotlib."""

import io
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
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
_INK, _GRID, _ALARM = "#010203", "#020304", "#030405"
# those of Okabe and Ito, which are told apart in grey too: blue, orange, green, yellow, sky, pink
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#e69f00", "#56b4e9", "#cc79a7")
_VARIABLES = {_INK: "ink", _GRID: "grid", _ALARM: "alarm", **{c: f"c{n}" for n, c in enumerate(_COLOURS, 1)}}
_DASHES = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (1, 3)))
_LOOK: Any = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "trl-steady",  # the same run gives the same bytes
    "text.parse_math": False,  # the name of a run may have dollars
    "font.size": 11,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
    **{"axes.grid": True, "axes.axisbelow": True, "grid.color": _GRID, "axes.facecolor": "none"},
    **{"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "legend.fontsize": 10},
}


def pictures(runs: Mapping[str, Sequence[History]], findings: Sequence[Finding] = ()) -> Iterator[tuple[str, str]]:
    """Yield title and SVG of each picture for which the runs have logged a metric.

    Args:
        runs: Name -> runs that differ in their seeds. Several runs are compared.
        findings: Symptoms of the run. A line marks the step at which one that belongs to a picture began.
    """
    histories = [run for seeds in runs.values() for run in seeds]
    with matplotlib.rc_context(_LOOK):
        for title, picture in _PICTURES.items():
            axis = Figure(figsize=(5, 2.9)).subplots()
            axis.set(xlabel="optimizer step", ylabel=picture["unit"])
            if len(histories) == 1:
                keys = draw(axis, picture, histories[0])
            else:
                keys = draw_comparison(axis, next(iter(picture.get("lines", {})), ""), runs)
            if keys:
                roots = {key.split("/")[0] for key in keys}
                for finding in findings:
                    if finding.metric.split("/")[0] in roots:
                        axis.axvline(finding.since, color=_ALARM, lw=2, ls="--", label=finding.symptom.name)
                yield title, _svg(axis)


def draw(axis: Axes, picture: Mapping[str, Any], run: History) -> set[str]:
    """Draw what a run has logged of a picture of pictures.toml, and return the metrics that are drawn."""
    known = {key for key in run.keys if len(run[key].finite.steps)}
    lines, dots, stack = (picture.get(kind, {}) for kind in ("lines", "dots", "stack"))
    *band, band_label = picture.get("band", [""])
    band = band if known.issuperset(band) else []
    stack = {key: label for key, label in stack.items() if key in known and run[key].finite.values.any()}
    keys = known & {*lines, *dots, *band, *stack}
    for number, (key, label) in enumerate({**lines, **dots}.items()):
        if key in known:
            steps, (low, middle, high) = thinned(run[key])
            is_line = key in lines
            dashes, marker = (_DASHES[number], "") if is_line and len(steps) > 1 else ("", "o")
            text = f"{label} {middle[-1]:.3g}"
            axis.plot(steps, middle, color=_COLOURS[number], ls=dashes, marker=marker, ms=4, label=text)
            if is_line:
                axis.fill_between(steps, low, high, color=_COLOURS[number], alpha=0.2, linewidth=0)
    if band:
        (steps, (_, low, _)), (others, (_, high, _)) = (thinned(run[key]) for key in band)
        axis.fill_between(steps, low, np.interp(steps, others, high), color=_COLOURS[0], alpha=0.15, label=band_label)
    _draw_stack(axis, {label: run[key].finite for key, label in stack.items()})
    for level in picture.get("levels", ()) if keys else ():
        values = [run.settings[name] for name in level["settings"] if run.settings.get(name) is not None]
        for value in values[:1]:
            axis.axhline(level["base"] + level["sign"] * value, color=_INK, lw=1, ls=":", label=level["label"])
    for key, label in picture.get("steps", {}).items():
        for number, step in enumerate(np.unique(run[key].finite.values) if keys and key in known else ()):
            axis.axvline(step, color=_COLOURS[1], lw=1, label="" if number else label)
    return keys


def _draw_stack(axis: Axes, series: Mapping[str, Series]) -> None:
    """Draw metrics on top of each other, as stairs: a value holds since the log before. Without a log it is 0."""
    if not series:
        return
    steps = np.unique(np.concatenate([each.steps for each in series.values()]))
    edges = [0, *(stretch[-1] for stretch in _stretches(steps))]
    base = np.zeros(len(edges) - 1)
    for number, (label, each) in enumerate(series.items()):
        values = np.zeros(len(steps))
        values[np.searchsorted(steps, each.steps)] = np.clip(each.values, -1e30, 1e30)
        top = base + [stretch.mean() for stretch in _stretches(values)]
        text = f"{label} {values.mean():.3g}"
        axis.stairs(top, edges, baseline=base, label=text, color=_COLOURS[number], alpha=0.75, fill=True)
        base = top


def draw_comparison(axis: Axes, key: str, runs: Mapping[str, Sequence[History]]) -> set[str]:
    """Draw the mean of a metric over the seeds of each name, and their range, and return the metrics drawn."""
    keys = set[str]()
    for number, (name, seeds) in enumerate(runs.items()):
        found = [thinned(run[key]) for run in seeds if key in run.keys and len(run[key].finite.steps)]
        if not found:
            continue
        keys.add(key)
        steps = max((steps for steps, _ in found), key=len)
        values = np.stack([np.interp(steps, its, middle, right=np.nan) for its, (_, middle, _) in found])
        colour, dashes = _COLOURS[number % len(_COLOURS)], _DASHES[number % len(_DASHES)]
        axis.plot(steps, values.mean(0), label=clean(name), color=colour, ls=dashes)
        axis.fill_between(steps, values.min(0), values.max(0), color=colour, alpha=0.15, linewidth=0)
    return keys


def thinned(series: Series) -> tuple[np.ndarray, np.ndarray]:
    """Return steps (n,) and least, median and greatest values (3, n) of at most `POINTS` stretches."""
    steps, values = series.finite
    stretches = _stretches(np.clip(values, -1e30, 1e30))  # matplotlib cannot place larger ones
    ends = np.cumsum([len(stretch) for stretch in stretches]) - 1
    return steps[ends], np.array([[stretch.min(), np.median(stretch), stretch.max()] for stretch in stretches]).T


def _stretches(values: np.ndarray) -> list[np.ndarray]:
    """Cut values into at most `POINTS` stretches of nearly one length."""
    size = -(-len(values) // POINTS)
    return np.array_split(values, -(-len(values) // size)) if size else []


def _svg(axis: Axes) -> str:
    """Return the picture for a page that has the colours as CSS variables."""
    rows = -(-len(axis.get_legend_handles_labels()[1]) // 2)
    axis.yaxis.set_major_formatter("{x:.3g}")
    axis.set_position((0.19, 0.17, 0.78, 0.78 - 0.08 * rows))
    if rows:
        axis.legend(loc="lower left", bbox_to_anchor=(-0.15, 1.0), ncols=2, borderaxespad=0)
    file = io.StringIO()
    cast(Figure, axis.figure).savefig(file, format="svg", transparent=True, metadata={"Date": None})
    svg = file.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r' (width|height)="[^"]*pt"', "", svg, count=2)
    used = set(re.findall(r"#([\w-]+)", svg))
    svg = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", svg)
    return re.sub("|".join(_VARIABLES), lambda found: f"var(--{_VARIABLES[found[0]]})", svg)


def clean(text: object) -> str:
    """Return a text without lone surrogates, control characters, and those that change the direction of text."""
    no_text = "[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
    return re.sub(no_text, "\N{REPLACEMENT CHARACTER}", str(text))
