"""Pictures of completions with each token coloured by its advantage: green if positive, red if negative."""

import html
import re
from collections.abc import Sequence
from pathlib import Path

__all__ = ["advantages_html", "advantages_png"]

Coloured = Sequence[tuple[str, float]]
_GREEN, _RED = (34, 139, 34), (205, 45, 45)


def advantages_html(completions: Sequence[Coloured]) -> str:
    """Return a self-contained HTML page of completions with each token coloured by its advantage.

    The page shows a token's advantage when the pointer rests on it.

    Args:
        completions: `trainer.last_step_advantages` or a part of it. Each completion is a list of pairs of a token's
            text and its advantage.

    >>> page = advantages_html([[("2 + 2 ", 0.5), ("< 3", -1.0)]])
    >>> 'title="-1">&lt; 3</span>' in page
    True
    """
    largest = _largest(completions)

    def span(text: str, value: float) -> str:
        shown = html.escape(text).replace("\n", "\u21b5\n") or "\u2205"
        return f'<span style="background:rgb{_colour(value / largest)}" title="{value:.4g}">{shown}</span>'

    body = "\n".join(f"<pre>{''.join(span(*token) for token in completion)}</pre>" for completion in completions)
    return (
        '<!doctype html><meta charset="utf-8"><title>Advantages by token</title>\n'
        "<style>pre{white-space:pre-wrap;border:1px solid #ccc;padding:.6em;line-height:1.6}</style>\n"
        f"<p>Advantage from -{largest:.3g} (red) to {largest:.3g} (green)</p>\n{body}\n"
    )


def advantages_png(completions: Sequence[Coloured], path: str | Path, *, columns: int = 90) -> None:
    """Save a picture of a few completions with each token coloured by its advantage. Needs matplotlib.

    Args:
        completions: As for `advantages_html`.
        path: File to write.
        columns: Characters per line.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    largest = _largest(completions)
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
        colours[row][column : column + len(text)] = [_colour(value / largest)] * len(text)
    axis.imshow(colours, extent=(0, columns, line + 1, 0), aspect="auto", interpolation="nearest")
    axis.set(xlim=(-2, columns + 2), ylim=(line + 0.5, -1.5))
    axis.axis("off")
    axis.text(0, -0.5, f"advantage from -{largest:.3g} (red) to {largest:.3g} (green)", fontsize=8, va="center")
    for row, column, text, _ in pieces:
        where = (column + 0.1, row + 0.5)
        axis.text(*where, text, fontsize=8, family="monospace", va="center", parse_math=False)
    figure.savefig(path, dpi=110)


def _largest(completions: Sequence[Coloured]) -> float:
    return max((abs(value) for completion in completions for _, value in completion), default=0.0) or 1.0


def _colour(share: float) -> tuple[int, int, int]:
    """Return the RGB colour of a share: white at 0, green at 1, red at -1."""
    red, green, blue = (round(255 + (c - 255) * 0.75 * min(abs(share), 1.0)) for c in (_GREEN if share > 0 else _RED))
    return red, green, blue
