"""A comparison of runs with PPO and with GRPO: a picture and a table.

python recipes/ppo/ppo_and_grpo.py both.png results/ppo-seed?.json results/grpo-seed?.json
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from matplotlib.axes import Axes

from common import report

Runs = Sequence[Mapping[str, Any]]
COLOURS = {"PPO": "tab:blue", "GRPO": "tab:orange"}
STYLES = ("-", "--", ":")  # by seed
CHECKS = "held-out greedy accuracy by step"
COUNTS = "right answers to each held-out problem"


def sampled(axis: Axes, runs: Runs) -> None:
    """Draw the reward of each rollout of several runs."""
    for results in runs:
        _curve(axis, results, *report.series(results["history"], "reward"))
    axis.set(title="Reward of each rollout (share right)", ylim=(0, 1))


def held_out(axis: Axes, runs: Runs) -> None:
    """Draw the greedy accuracy of several runs on held-out problems."""
    for results in runs:
        checks = results[CHECKS]
        _curve(axis, results, [int(step) for step in checks], list(checks.values()))
    axis.set(title="Accuracy on held-out problems (greedy)", ylim=(0, 1))
    axis.legend(loc="lower right", fontsize="small", ncols=2)


def _curve(axis: Axes, results: Mapping[str, Any], steps: Sequence[int], shares: Sequence[float]) -> None:
    method, seed = results["objective"]["method"], results["seed"]
    style = STYLES[seed % len(STYLES)]
    axis.plot(steps, shares, style, marker="o", markersize=3, color=COLOURS[method], label=f"{method}, seed {seed}")


def differences(runs: Runs) -> dict[tuple[str, str], report.Difference]:
    """Compare GRPO (`before`) with PPO (`after`) on the same held-out problems, by seed and decoding.

    The last rows are the means of the seeds. Their intervals are over problems, for these seeds.
    """
    right: dict[str, dict[tuple[str, str], np.ndarray]] = {method: {} for method in COLOURS}
    for results in runs:
        for decoding, counts in results[COUNTS].items():
            samples = 1 if decoding == "greedy" else results["recipe"]["samples"]
            shares = np.array([[int(n) / samples] for n in counts["after"]])
            right[results["objective"]["method"]][str(results["seed"]), decoding] = shares
    both = sorted(right["PPO"].keys() & right["GRPO"].keys())
    found = {key: report.difference(right["GRPO"][key], right["PPO"][key]) for key in both}
    for decoding in sorted({decoding for _, decoding in both}):
        keys = [key for key in both if key[1] == decoding]
        means = (np.mean([right[method][key] for key in keys], axis=0) for method in ("GRPO", "PPO"))
        found["mean", decoding] = report.difference(*means)
    return found


def table(found: Mapping[tuple[str, str], report.Difference]) -> str:
    """Return the differences as a Markdown table."""
    rows = ["| seed | decoding | GRPO | PPO | difference | 95 % interval |", "|---|---|---|---|---|---|"]
    for (seed, decoding), d in found.items():
        shares = f"{d.before:.1%} | {d.after:.1%} | {d.difference:+.1%} | {d.low:+.1%} to {d.high:+.1%}"
        rows.append(f"| {seed} | {decoding} | {shares} |")
    return "\n".join(rows)


def main(path: str, *files: str) -> None:
    """Draw the runs in `files`, which are `results.json` files, and print a table of the runs with equal seeds."""
    runs = [json.loads(Path(file).read_text()) for file in files]
    report.draw(Path(path), ((sampled, held_out),), runs)
    print(table(differences(runs)))


if __name__ == "__main__":
    main(*sys.argv[1:])
