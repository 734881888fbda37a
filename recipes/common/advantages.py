"""A picture of completions with each token coloured by its advantage: green if positive, red if negative."""

import re
from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from trl_steady.rewards.pictures import colour, largest_advantage


def advantages_png(completions: Sequence[Sequence[tuple[str, float]]], path: str | Path, *, columns: int = 90) -> None:
    """Save a picture of a few completions, as `trainer.last_step_advantages` has them, with `columns` per line."""
    largest = largest_advantage(completions)
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
    colours = [[(255, 255, 255)] * columns for _ in range(line + 1)]
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
