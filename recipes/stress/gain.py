"""Draw what R3 gains over the share of experts that only the engine chose, from recorded runs of replay2 and replay8.

python recipes/stress/gain.py
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from stress.experiment import compare

__all__ = ["EXPERIMENTS", "Gain", "draw", "gains"]

FOLDER = Path(__file__).parent / "results"
EXPERIMENTS = {"replay2": "2 updates per rollout", "replay8": "8 updates per rollout"}


class Gain(NamedTuple):
    """The gain of R3 with one disturbance, in points."""

    share: float
    """Percent of the experts that only the engine chose in the runs without replay, mean over rollouts and seeds."""
    difference: float
    low: float
    high: float


def gains(experiment: Mapping[str, Any], runs: Mapping[str, Mapping[int, Any]]) -> list[Gain]:
    """Return the gain for each disturbance that has an arm with R3 and nothing else."""
    found = []
    compared = compare(experiment, dict(runs))
    for name, row in compared.items():
        disturbed = name.removesuffix(", R3")
        if disturbed == name or row.difference is None or experiment["arms"][name].get("correction"):
            continue
        shares = [np.mean(figures["rerouted"]) for figures in runs[disturbed].values()]
        assert row.low is not None and row.high is not None
        gain = [100 * value for value in (row.difference, row.low, row.high)]
        found.append(Gain(100 * float(np.mean(shares)), *gain))
    return sorted(found)


def draw(path: Path, found: Mapping[str, Sequence[Gain]]) -> None:
    """Draw the gains with their 95 % intervals: a line for each number of updates per rollout."""
    figure, axis = plt.subplots(figsize=(4.4, 3.2), layout="constrained")
    for place, (label, own) in enumerate(found.items()):
        share, difference, low, high = np.array(own).T
        errors = [difference - low, high - difference]
        axis.errorbar(share, difference, errors, fmt="o-", color=f"C{place}", capsize=3, label=label)
    axis.axhline(0, color="0.2", linewidth=0.8)
    axis.set(xlabel="experts that only the engine chose, %", ylabel="gain of R3, points")
    axis.legend()
    axis.grid(alpha=0.3)
    figure.savefig(path, dpi=200)
    plt.close(figure)


def main() -> None:
    """Draw `results/replay-gain.png`."""
    found = {}
    for name, label in EXPERIMENTS.items():
        file = FOLDER / f"{name}.json"
        if not file.exists():
            continue
        recorded = json.loads(file.read_text())
        found[label] = gains(recorded["settings"], recorded["runs"])
        for gain in found[label]:
            print(label, "  ".join(f"{value:.1f}" for value in gain))
    draw(FOLDER / "replay-gain.png", found)


if __name__ == "__main__":
    main()
