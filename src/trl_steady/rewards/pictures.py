"""Completions with their tokens coloured by advantage: green for more of this, red for less."""

import html
from collections.abc import Sequence
from pathlib import Path

__all__ = ["advantages_html", "advantages_png"]

Coloured = Sequence[tuple[str, float]]
_GREEN, _RED = (34, 139, 34), (205, 45, 45)


def advantages_html(completions: Sequence[Coloured]) -> str:
    """A page that needs nothing else; a token's advantage is shown where the pointer rests on it.

    Args:
        completions: `trainer.last_step_advantages`, or some of them: pairs of a token's text and its advantage.

    >>> page = advantages_html([[("2 + 2 ", 0.5), ("< 3", -1.0)]])
    >>> 'title="-1">&lt; 3</span>' in page
    True
    """
    largest = _largest(completions)

    def span(text: str, value: float) -> str:
        shown = html.escape(text).replace("\n", "\u21b5\n") or "\u2205"
        return f'<span style="background:{_hex(value / largest)}" title="{value:.4g}">{shown}</span>'

    body = "\n".join(f"<pre>{''.join(span(*token) for token in completion)}</pre>" for completion in completions)
    return (
        '<!doctype html><meta charset="utf-8"><title>Advantages by token</title>\n'
        "<style>pre{white-space:pre-wrap;border:1px solid #ccc;padding:.6em;line-height:1.6}</style>\n"
        f"<p>Advantage from -{largest:.3g} (red) to {largest:.3g} (green)</p>\n{body}\n"
    )


def advantages_png(completions: Sequence[Coloured], path: str | Path, *, columns: int = 90) -> None:
    """The same as a picture. Needs matplotlib.

    Args:
        completions: as for `advantages_html`.
        path: Of the picture.
        columns: Characters in a line.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    largest = _largest(completions)
    cells: list[tuple[int, int, str, float]] = []  # line, column, character, advantage
    line = 0
    for completion in completions:
        column = 0
        for text, value in completion:
            for character in text or "\u2205":
                if column == columns:
                    line, column = line + 1, 0
                cells.append((line, column, "\u21b5" if character == "\n" else character, value))
                column += 1
                if character == "\n":
                    line, column = line + 1, 0
        line += 2 if column else 1
    width, height = 0.095 * columns, 0.21 * (line + 2)
    figure = Figure(figsize=(width + 0.4, height))
    FigureCanvasAgg(figure)
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set(xlim=(-2, columns + 2), ylim=(line + 0.5, -1.5))
    axis.axis("off")
    axis.text(0, -0.5, f"advantage from -{largest:.3g} (red) to {largest:.3g} (green)", fontsize=8, va="center")
    for row, column, character, value in cells:
        axis.add_patch(Rectangle((column, row), 1, 1, color=_hex(value / largest), linewidth=0))
        axis.text(
            column + 0.5,
            row + 0.5,
            character,
            fontsize=8,
            family="monospace",
            ha="center",
            va="center",
            parse_math=False,
        )
    figure.savefig(path, dpi=110)


def _largest(completions: Sequence[Coloured]) -> float:
    return max((abs(value) for completion in completions for _, value in completion), default=0.0) or 1.0


def _hex(share: float) -> str:
    """White at 0, green at 1, red at -1."""
    end = _GREEN if share > 0 else _RED
    channels = (round(255 + (channel - 255) * 0.75 * min(abs(share), 1.0)) for channel in end)
    return "#" + "".join(f"{channel:02x}" for channel in channels)
