"""Draw `stale.png` beside this file: stale rollouts with and without the off-policy mask.

The curves are the recorded runs of recipes/stress/results/staleness.json. Nothing is trained.
"""

import json
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RECORDED = Path(__file__).parents[2] / "recipes/stress/results/staleness.json"
ARMS = {"off-policy mask": ("#0072B2", "with the mask", 0.56), "nothing": ("#D55E00", "without", 0.36)}
"""Arm -> colour of Okabe and Ito, label, and its height at update 72."""


def curves(arm: str) -> tuple[list[int], np.ndarray]:
    """Return the updates of the checks, and the held-out accuracies (seeds, checks) in percent."""
    runs: dict[str, Any] = json.loads(RECORDED.read_text())["runs"][arm]
    checks = [figures["accuracy"] for figures in runs.values()]
    return [int(step) for step in checks[0]], 100 * np.array([list(of.values()) for of in checks])


def draw(path: Path) -> None:
    """Draw the mean of the seeds and their range. The picture is legible at a width of 400 pixels."""
    figure, axis = plt.subplots(figsize=(6, 3.3), layout="constrained")
    for arm, (colour, label, height) in ARMS.items():
        steps, accuracies = curves(arm)
        axis.fill_between(steps, accuracies.min(axis=0), accuracies.max(axis=0), color=colour, alpha=0.15, linewidth=0)
        axis.plot(steps, accuracies.mean(axis=0), "o-", color=colour, linewidth=3, markersize=6)
        axis.text(72, 100 * height, label, color=colour, fontsize=16, weight="bold", ha="center")
    axis.set_title("Rollouts up to 64 updates old: right answers", fontsize=15)
    axis.set_xlabel("update", fontsize=15)
    axis.tick_params(labelsize=14)
    axis.set_yticks(range(0, 81, 20), [f"{share} %" for share in range(0, 81, 20)])
    axis.set(ylim=(0, 80), xlim=(0, 97), xticks=range(0, 97, 32))
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    draw(Path(__file__).with_suffix(".png"))
