"""Draw `weights.png` beside this file, from `weights.json`: results of `benchmarks/weights.py --json`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# Okabe and Ito's, which colour-blind readers tell apart
LINES = {
    "trim_padding": ("#999999", "o"),
    "skip_old_pass": ("#56B4E9", "s"),
    "skip_old_pass, skip_zero_weight": ("#009E73", "^"),
    "both, token_budget": ("#D55E00", "D"),
}


def draw(path: Path, results: Mapping[str, Any]) -> None:
    """Draw the ratio of seconds by the share of sequences without a gradient. It is legible at 400 pixels."""
    figure, axes = plt.subplots(figsize=(6, 5.4), layout="constrained")
    shares = [float(share) for share in results["shares"]]
    for variant, (colour, marker) in LINES.items():
        ratios = [of_share[variant]["ratio"] for of_share in results["shares"].values()]
        medians = [ratio["median"] for ratio in ratios]
        errors = [[ratio["median"] - ratio["low"] for ratio in ratios], [r["high"] - r["median"] for r in ratios]]
        axes.errorbar(shares, medians, errors, color=colour, marker=marker, markersize=8, capsize=4, label=variant)
    at_0 = results["shares"]["0.0"]["skip_old_pass"]["ratio"]["median"]
    line = "skip_old_pass at z = 0, times 1 / (1 - z)"
    axes.plot(shares, [at_0 / (1 - share) for share in shares], "k:", label=line)
    axes.axhline(1, color="black", linewidth=1)
    axes.set_yscale("log")
    ticks = [1, 2, 3, 5, 10, 20]
    axes.set_yticks(ticks, [str(tick) for tick in ticks], minor=False)
    axes.minorticks_off()
    axes.set_ylim(0.9, 30)
    axes.set_xticks(shares)
    axes.tick_params(labelsize=13)
    axes.set_xlabel("z, share of sequences without a gradient", fontsize=13)
    axes.set_title("TRL's seconds over ours, for one step", fontsize=15)
    axes.legend(fontsize=12, loc="upper left", frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    draw(Path(__file__).with_suffix(".png"), json.loads(Path(__file__).with_suffix(".json").read_text()))
