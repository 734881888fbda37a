"""Pictures of runs, as SVG in the colours of the page. This file alone needs matplotlib."""

import io
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, cast

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trl_steady.report.diagnosis import Finding
from trl_steady.report.history import History, Series

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


class Plot:
    """One picture. pictures.toml has the marks of each.

    Args:
        axis: The axes.
        runs: Name -> runs that differ in their seeds. With several names, the first metric of the picture alone is
            drawn: the mean over the seeds, and their range.
        findings: Symptoms of the run. A line marks the step at which one that belongs to the picture began.
    """

    def __init__(self, axis: Axes, runs: Mapping[str, Sequence[History]], findings: Sequence[Finding] = ()) -> None:
        self._axis, self._runs, self._findings = axis, runs, findings
        everyone = [run for seeds in runs.values() for run in seeds]
        self._is_comparison = len(everyone) > 1
        self._history = History(()) if self._is_comparison else everyone[0]
        self._tips: dict[str, str] = {}  # id of an element -> its tooltip
        self.keys = set[str]()
        """The metrics that are drawn."""

    def _series(self, *keys: str) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        """Yield key, steps (n,) and least, median and greatest values (3, n) of the metrics that are in the log."""
        for key in keys:
            if key in self._history.keys and len(self._history[key].finite.steps):
                self.keys.add(key)
                yield key, *thinned(self._history[key])

    def _tell(self, artist: Any, text: str) -> None:
        name = f"tip{len(self._tips)}"
        artist.set_gid(name)
        self._tips[name] = clean(text)

    def line(self, key: str, label: str, colour: int = 0, *, dots: bool = False) -> None:
        """Draw a metric."""
        if self._is_comparison and not self.keys:
            self._compare(key)
        for _, steps, (low, middle, high) in self._series(key):
            style = {"color": _COLOURS[colour], "ls": "" if dots else _DASHES[colour], "marker": "o" if dots else ""}
            (drawn,) = self._axis.plot(steps, middle, ms=4, label=f"{label} {middle[-1]:.3g}", **style)
            self._tell(drawn, f"{label}: {middle[0]:.4g} first, {middle[-1]:.4g} last")
            if (high > low).any() and not dots:
                self._axis.fill_between(steps, low, high, color=_COLOURS[colour], alpha=0.2, linewidth=0)

    def _compare(self, key: str) -> None:
        for number, (name, seeds) in enumerate(self._runs.items()):
            found = [thinned(run[key]) for run in seeds if key in run.keys and len(run[key].finite.steps)]
            if not found:
                continue
            self.keys.add(key)
            steps = max((steps for steps, _ in found), key=len)
            values = np.stack([np.interp(steps, its, values[1], right=np.nan) for its, values in found])
            style = {"color": _COLOURS[number % len(_COLOURS)], "ls": _DASHES[number % len(_DASHES)]}
            (drawn,) = self._axis.plot(steps, values.mean(0), label=clean(name), **style)
            self._tell(drawn, f"{name}: mean of {len(found)}")
            self._axis.fill_between(steps, values.min(0), values.max(0), color=style["color"], alpha=0.15, linewidth=0)

    def band(self, low: str, high: str, label: str, *, around: bool = False) -> None:
        """Draw the area between two metrics, or around one, if the other is its standard deviation."""
        if len(found := list(self._series(low, high))) == 2:
            (_, steps, (_, below, _)), (_, others, (_, above, _)) = found
            above = np.interp(steps, others, above)
            below, above = (below - above, below + above) if around else (below, above)
            self._tell(self._axis.fill_between(steps, below, above, color=_COLOURS[0], alpha=0.15, label=label), label)

    def stack(self, labels: Mapping[str, str]) -> None:
        """Draw metrics on top of each other, as stairs: a value holds since the log before. Without a log it is 0."""
        found = {label: self._history[key].finite for key, label in labels.items() if key in self._history.keys}
        steps = np.unique(np.concatenate([np.zeros(0, int), *(series.steps for series in found.values())]))
        edges = [0, *(stretch[-1] for stretch in _stretches(steps))]
        base = np.zeros(len(edges) - 1)
        self.keys.update(key for key, label in labels.items() if label in found and len(steps))
        for number, (label, series) in enumerate(found.items() if len(steps) else ()):
            values = np.zeros(len(steps))
            values[np.searchsorted(steps, series.steps)] = np.clip(series.values, -1e30, 1e30)
            top = base + [stretch.mean() for stretch in _stretches(values)]
            style = {"color": _COLOURS[number % len(_COLOURS)], "alpha": 0.75, "fill": True}
            text = f"{label} {values.mean():.3g}"
            self._tell(self._axis.stairs(top, edges, baseline=base, label=text, **style), f"{text} on average")
            base = top

    def heat(self, prefix: str) -> None:
        """Draw metrics whose names end in the number of a layer as a map: the darker, the larger."""
        names = [key for key in self._history.keys if re.fullmatch(prefix + r"\d+", key)]
        found = list(self._series(*sorted(names, key=lambda key: int(key.removeprefix(prefix)))))
        if not found:
            return
        steps = max((steps for _, steps, _ in found), key=len)
        rows = np.stack([np.interp(steps, its_steps, middle) for _, its_steps, (_, middle, _) in found])
        image = np.zeros((*rows.shape, 4))
        image[..., :3] = [int(_COLOURS[0][i : i + 2], 16) / 255 for i in (1, 3, 5)]
        image[..., 3] = rows / max(rows.max(), 1e-12)
        extent = (0, steps[-1], -0.5, len(rows) - 0.5)
        self._axis.imshow(image, aspect="auto", origin="lower", extent=extent, interpolation="nearest")
        self._axis.plot([], [], "s", color=_COLOURS[0], label=f"darkest {rows.max():.3g}")
        self._axis.grid(visible=False)

    def level(self, settings: Sequence[str], label: str, first: float = 0, sign: int = 1) -> None:
        """Draw `first` and a setting, the first of these that is set, if anything else has been drawn."""
        known = [value for name in settings if (value := self._history.settings.get(name)) is not None]
        if known and self.keys:
            self._axis.axhline(first + sign * known[0], color=_INK, lw=1, ls=":", label=label)

    def moments(self, key: str, label: str) -> None:
        """Mark the steps which a metric gives."""
        for _, _, (_, moments, _) in self._series(key) if self.keys else ():
            for number, moment in enumerate(dict.fromkeys(moments)):
                self._axis.axvline(moment, color=_COLOURS[1], lw=1, label="" if number else label)

    def svg(self) -> str:
        """Return the picture for a page that has the colours as CSS variables."""
        roots = {key.split("/")[0] for key in self.keys}
        for finding in self._findings:
            if not roots.isdisjoint(need.split("/")[0] for need in finding.symptom.needs[0].split(" | ")):
                drawn = self._axis.axvline(finding.since, color=_ALARM, lw=2, ls="--", label=finding.symptom.name)
                self._tell(drawn, str(finding))
        rows = -(-len(self._axis.get_legend_handles_labels()[1]) // 2)
        self._axis.yaxis.set_major_formatter("{x:.3g}")
        self._axis.set_position((0.19, 0.17, 0.78, 0.78 - 0.08 * rows))
        if rows:
            self._axis.legend(loc="lower left", bbox_to_anchor=(-0.15, 1.0), ncols=2, borderaxespad=0)
        file = io.StringIO()
        cast(Figure, self._axis.figure).savefig(file, format="svg", transparent=True, metadata={"Date": None})
        return _for_page(file.getvalue(), self._tips)


def thinned(series: Series) -> tuple[np.ndarray, np.ndarray]:
    """Return steps (n,) and least, median and greatest values (3, n) of at most `POINTS` stretches."""
    steps, values = series.finite
    values = np.clip(values, -1e30, 1e30)  # matplotlib cannot place larger ones
    stretches = _stretches(values)
    ends = np.cumsum([len(stretch) for stretch in stretches]) - 1
    return steps[ends], np.array([[stretch.min(), np.median(stretch), stretch.max()] for stretch in stretches]).T


def _stretches(values: np.ndarray) -> list[np.ndarray]:
    """Cut values into at most `POINTS` stretches of nearly one length."""
    size = -(-len(values) // POINTS)
    return np.array_split(values, -(-len(values) // size)) if size else []


def _for_page(svg: str, tips: Mapping[str, str]) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' (width|height)="[^"]*pt"', "", svg, count=2)
    for name, text in tips.items():
        svg = svg.replace(f'<g id="{name}">', f"<g><title>{escape(text)}</title>")
    used = set(re.findall(r"#([\w-]+)", svg))
    svg = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", svg)
    return re.sub("|".join(_VARIABLES), lambda found: f"var(--{_VARIABLES[found[0]]})", svg)


def pictures(runs: Mapping[str, Sequence[History]], findings: Sequence[Finding] = ()) -> Iterator[tuple[str, str]]:
    """Yield title and SVG of each picture for which the runs have logged a metric."""
    with matplotlib.rc_context(_LOOK):
        for title, picture in _PICTURES.items():
            axis = Figure(figsize=(5, 2.9)).subplots()
            axis.set(xlabel="optimizer step", ylabel=picture["unit"])
            plot = Plot(axis, runs, findings)
            for kind in ("line", "band", "stack", "heat", "moments", "level"):
                for mark in picture.get(kind, ()):
                    getattr(plot, kind)(**mark)
            if plot.keys:
                yield title, plot.svg()


def clean(text: object) -> str:
    """Return a text without lone surrogates, control characters, and those that change the direction of text."""
    no_text = "[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
    return re.sub(no_text, "\N{REPLACEMENT CHARACTER}", str(text))
