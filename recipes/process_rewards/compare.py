"""A comparison of runs: a picture, and a table of the gain from step rewards.

python recipes/process_rewards/compare.py both.png outputs/process_rewards/results.json ...
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
COLOURS = {"steps": "tab:green", "outcome": "tab:orange", "steps, process": "tab:purple"}
STYLES = ("-", "--", ":")  # by seed
CHECKS = "held-out greedy accuracy by step"
COUNTS = "right answers to each held-out problem"


def arm(results: Mapping[str, Any]) -> str:
    """Return the label of the run's rewards, with `step_advantage` if it is not the default."""
    objective = results["objective"]
    plain = objective["rewards"] == "outcome" or objective["step_advantage"] == "return_to_go"
    return objective["rewards"] + ("" if plain else f", {objective['step_advantage']}")


def sampled(axis: Axes, runs: Runs) -> None:
    """Draw the share of right answers in each rollout of several runs."""
    for results in runs:
        _curve(axis, results, *report.series(results["history"], "right"))
    axis.set(title="Whole answers right in each rollout (sampled)", ylim=(0, 1))


def held_out(axis: Axes, runs: Runs) -> None:
    """Draw the greedy accuracy of several runs on held-out problems."""
    for results in runs:
        checks = results[CHECKS]
        _curve(axis, results, [int(step) for step in checks], list(checks.values()))
    axis.set(title="Whole answers right, held out (greedy)", ylim=(0, 1))
    axis.legend(fontsize="small", loc="upper left", ncols=2)


def _curve(axis: Axes, results: Mapping[str, Any], steps: Sequence[int], shares: Sequence[float]) -> None:
    label, style = f"{arm(results)}, seed {results['seed']}", STYLES[results["seed"] % len(STYLES)]
    axis.plot(steps, shares, style, marker="o", markersize=3, color=COLOURS[arm(results)], label=label)


def differences(runs: Runs) -> dict[tuple[str, str], report.Difference]:
    """Compare outcome rewards (`before`) with step rewards (`after`) on the same problems, by seed and decoding.

    The last rows are the means of the seeds. Their intervals are over problems, for these seeds.
    """
    right: dict[str, dict[tuple[str, str], np.ndarray]] = {name: {} for name in COLOURS}
    for results in runs:
        for decoding, counts in results[COUNTS].items():
            samples = 1 if decoding == "greedy" else results["recipe"]["samples"]
            shares = [[int(n) / samples] for n in counts["after"]]
            right[arm(results)][str(results["seed"]), decoding] = np.array(shares)
    outcome, steps = right["outcome"], right["steps"]
    both = sorted(outcome.keys() & steps.keys())
    found = {key: report.difference(outcome[key], steps[key]) for key in both}
    for decoding in sorted({decoding for _, decoding in both}):
        keys = [key for key in both if key[1] == decoding]
        means = (np.mean([rewarded[key] for key in keys], axis=0) for rewarded in (outcome, steps))
        found["mean", decoding] = report.difference(*means)
    return found


def table(found: Mapping[tuple[str, str], report.Difference]) -> str:
    """Return the differences as a Markdown table."""
    rows = ["| seed | decoding | outcome | steps | difference | 95 % interval |", "|---|---|---|---|---|---|"]
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
