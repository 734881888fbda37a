"""A picture of completions with each token coloured by its advantage: green if positive, red if negative."""

import re
from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_GREEN = (34, 139, 34)
_RED = (205, 45, 45)


def colour(share: float) -> list[int]:
    """Return the RGB colour of a share of the largest advantage: white at 0, green at 1, red at -1."""
    hue = _GREEN if share > 0 else _RED
    return [round(255 + (part - 255) * 0.75 * min(abs(share), 1.0)) for part in hue]


def advantages_png(completions: Sequence[Sequence[tuple[str, float]]], path: str | Path, *, columns: int = 90) -> None:
    """Save a picture of a few completions, as `trainer.last_step_advantages` has them, with `columns` per line."""
    largest = max((abs(value) for completion in completions for _, value in completion), default=0.0) or 1.0
    pieces: list[tuple[int, int, str, float]] = []  # line, column, text, advantage
    line = 0
    for completion in completions:
        column = 0
        for text, value in completion:
            for part in re.findall("[^\n]*\n|[^\n]+", text) or [""]:
                shown = re.sub(r"[\x00-\x1f\x7f]", "\u00b7", part.replace("\n", "\u21b5")) or "\u2205"
                while shown:
                    if column == columns:
                        line, column = line + 1, 0
                    fits = shown[: columns - column]
                    pieces.append((line, column, fits, value))
                    shown, column = shown[len(fits) :], column + len(fits)
                if part.endswith("\n"):
                    line, column = line + 1, 0
        line += 2 if column else 1
    figure = Figure(figsize=(0.095 * columns + 0.4, 0.21 * (line + 2)))
    FigureCanvasAgg(figure)
    axis = figure.add_axes((0, 0, 1, 1))
    colours = [[colour(0.0)] * columns for _ in range(line + 1)]
    for row, column, text, value in pieces:
        colours[row][column : column + len(text)] = [colour(value / largest)] * len(text)
    axis.imshow(colours, extent=(0, columns, line + 1, 0), aspect="auto", interpolation="nearest")
    axis.set(xlim=(-2, columns + 2), ylim=(line + 0.5, -1.5))
    axis.axis("off")
    axis.text(0, -0.5, f"advantage from -{largest:.3g} (red) to {largest:.3g} (green)", fontsize=8, va="center")
    for row, column, text, _ in pieces:
        where = (column + 0.1, row + 0.5)
        axis.text(*where, text, fontsize=8, family="monospace", va="center", parse_math=False)
    figure.savefig(path, dpi=110)
