"""Draw `one_base.png` beside this file: the weights that stand in memory with each way of training.

python benchmarks/critic.py --json outputs/critic.json
python docs/figures/one_base.py outputs/critic.json
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# Okabe and Ito's, which colour-blind readers tell apart
COLOURS = {"base": "#999999", "policy": "#0072B2", "reference": "#E69F00", "critic": "#009E73"}


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draw a bar for each kind of training."""
    figure, axes = plt.subplots(figsize=(8, 0.9 + 0.6 * len(results["kinds"])), layout="constrained")
    for row, found in enumerate(reversed(results["kinds"].values())):
        left = 0.0
        for name, size in found["bytes"].items():
            mib = size / 2**20
            axes.barh(row, mib, left=left, color=COLOURS[name])
            left += mib
        axes.text(left, row, f" {left:,.0f} MiB", va="center")
    axes.set_yticks(range(len(results["kinds"])), list(reversed(results["kinds"])))
    axes.set_xlabel("weights in memory, MiB")
    axes.margins(x=0.15)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    axes.legend(handles, list(COLOURS), ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(__file__).with_suffix(".png"))
