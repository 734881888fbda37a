"""Tables and pictures of the outcomes that `exact.py` computes."""

import argparse
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from exact import ANSWERS
from torch import Tensor

PAGE = Path(__file__).parents[2] / "evidence.md"
TASKS = 8
"""Random tasks. Figures and tables show the median over them."""
# Okabe and Ito's, which colour-blind readers tell apart
COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7")
TITLES = ("Bias", "1 - cosine", "Variance of one answer", f"Error of {ANSWERS} answers")
STYLES = ("-", "--", "-.", ":")


def rendered(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown. Rows that show the same figures become one."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, *figures in rows:
        names.setdefault(tuple(figures), []).append(name)
    lines = [
        f"| {' | '.join(line)} |" for line in (heading, *(["; ".join(each), *own] for own, each in names.items()))
    ]
    return "\n".join([lines[0], "|---" * len(heading) + "|", *lines[1:]])


def digits(value: Tensor | float) -> str:
    """Return two significant digits. Anything below 1e-9 is what rounding leaves of 0."""
    number = float(value)
    return "0" if abs(number) < 1e-9 else f"{number:.2g}" if 1e-3 <= abs(number) < 100 else f"{number:.1e}"


def medians(outcomes: Mapping[str, Sequence[Tensor]]) -> dict[str, Tensor]:
    """Return arm -> the median over tasks of each column."""
    return {name: torch.stack([*values]).quantile(0.5, dim=0) for name, values in outcomes.items()}


def panels(axes: Sequence[Any], x: Sequence[float], curves: Mapping[str, Sequence[Tensor]], columns: str = "") -> None:
    """Draw three columns of (4,) outcomes over x, one line for each arm.

    Args:
        axes: Three axes of matplotlib.
        x: X values.
        curves: Arm -> an outcome for each x.
        columns: The three columns as digits; the first three if empty.
    """
    for axis, column in zip(axes, map(int, columns or "012"), strict=True):
        for i, (name, points) in enumerate(curves.items()):
            y = torch.stack([*points])[:, column]
            style, colour, label = STYLES[i % len(STYLES)], COLOURS[i % len(COLOURS)], name.replace("`", "")
            axis.plot(x, y, style, color=colour, linewidth=2, label=label)
        axis.set_title(TITLES[column], fontsize="medium")
        axis.grid(alpha=0.3)


@contextmanager
def picture(path: Path, rows: int) -> Iterator[Any]:
    """Open a figure with rows of three panels and, at the bottom of each row, the legend of its first panel."""
    import matplotlib  # here: the enumeration, which tests share, does without

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(10, 4.2 * rows), layout="constrained")
    parts = figure.subfigures(rows, 1, squeeze=False)[:, 0]
    grid = [part.subplots(1, 3) for part in parts]
    yield grid
    for part, axes in zip(parts, grid, strict=True):
        part.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def cells(outcome: Tensor) -> str:
    """Return bias, 1 - cosine and variance as one cell."""
    return ", ".join(digits(value) for value in outcome[:3])


def run(script: str, tables: Callable[[], Mapping[str, str]], draw: Callable[[Path], None], page: Path = PAGE) -> None:
    """Print the tables and draw the figure beside the script. With `--write`, put the tables into the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true", help="replace the tables of the page")
    if_asked = parser.parse_args().write
    for key, table in tables().items():
        print(f"{key}\n\n{table}\n")
        begin, end = f"<!-- {key} -->", f"<!-- /{key} -->"
        shown = f"{begin}\n{table}\n{end}"
        if if_asked:
            page.write_text(re.sub(f"{begin}.*?{end}", lambda _, own=shown: own, page.read_text(), flags=re.DOTALL))
    draw(Path(script).with_suffix(".png"))
