"""A picture that compares runs: KL and gradient norm.

python recipes/v32/panels.py both.png V3.2=outputs/v32/results.json GRPO=...
"""

import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from matplotlib.axes import Axes

from common import report


def compare(axis: Axes, runs: Mapping[str, Mapping[str, Any]], *, name: str, title: str) -> None:
    """Draw one logged value of several runs."""
    for label, results in runs.items():
        axis.plot(*report.series(results["history"], name), "o-", markersize=3, label=label)
    if name == "kl":
        axis.set_yscale("symlog", linthresh=0.01)  # shows zeros, and more than the largest value
        axis.margins(y=0.2)  # room for the legend
    axis.set_title(title)
    axis.legend(ncols=3, fontsize="small", loc="upper left")


def main(path: str, *named: str) -> None:
    """Draw KL and gradient norm of several runs, given as `label=results.json`."""
    pairs = (name.split("=", 1) for name in named)
    runs = {label: json.loads(Path(file).read_text()) for label, file in pairs}
    titles = {"kl": "KL in the loss, nats a token", "grad_norm": "Norm of the gradient before it is clipped"}
    report.draw(Path(path), [[partial(compare, name=name, title=title)] for name, title in titles.items()], runs)


if __name__ == "__main__":
    main(*sys.argv[1:])
