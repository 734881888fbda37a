"""A comparison of the arms of this recipe: a picture and a table.

python recipes/deepseekmath_loop/arms.py arms.png outputs/deepseekmath_loop/*/results.json
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from matplotlib.axes import Axes

from common import report

Run = Mapping[str, Any]
Points = tuple[Sequence[int], Sequence[float]]  # optimizer steps, values
ARMS = {"rule": "tab:gray", "frozen": "tab:orange", "retrained": "tab:blue", "without_replay": "tab:purple"}
PAIRS = (("rule", "frozen"), ("rule", "retrained"), ("frozen", "retrained"), ("without_replay", "retrained"))
CHECKS = "held-out greedy accuracy by step"
COUNTS = "right answers to each held-out problem"


def truths(results: Run) -> Points:
    """Return the share of right answers in each rollout. The rule's reward is this share."""
    return report.series(results["history"], "reward" if arm(results) == "rule" else "reward_model/true")


def scores(results: Run) -> Points:
    """Return the reward model's mean score of each rollout; nothing with the rule."""
    return ([], []) if arm(results) == "rule" else report.series(results["history"], "reward")


def checks(results: Run) -> Points:
    """Return the greedy accuracy on held-out problems."""
    return [int(step) for step in results[CHECKS]], list(results[CHECKS].values())


def knowledge(results: Run) -> Points:
    """Return how many held-out answers of the latest policy the reward model judges right, before it is retrained."""
    rows = [row for row in results["reward_refreshes"] if row["old"] is not None and row["step"] > 0]
    return [row["step"] for row in rows], [row["old"] for row in rows]


def arm(results: Run) -> str:
    """Return the arm of a run."""
    return results["objective"]["arm"]


# a thin line for each seed, a thick one for their mean


def _panel(points: Callable[[Run], Points], title: str, *, is_share: bool) -> report.Panel:
    def draw(axis: Axes, runs: Sequence[Run]) -> None:
        for name, colour in ARMS.items():
            curves = [points(results) for results in runs if arm(results) == name]
            curves = [curve for curve in curves if curve[0]]
            for steps, values in curves:
                axis.plot(steps, values, "-", color=colour, alpha=0.35, linewidth=1)
            if curves and all(steps == curves[0][0] for steps, _ in curves):
                mean = np.mean([values for _, values in curves], axis=0)
                seeds = f" (mean of {len(curves)})" if len(curves) > 1 else ""
                axis.plot(
                    curves[0][0], mean, "o-", markersize=3, color=colour, label=f"{name.replace('_', ' ')}{seeds}"
                )
        axis.set(title=title, ylim=(0, 1) if is_share else None)
        if points is truths:  # every arm has them
            axis.get_figure().legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=2)

    return draw


PANELS = (
    (
        _panel(truths, "Right answers in each rollout (share)", is_share=True),
        _panel(scores, "Score of the reward model (logit)", is_share=False),
    ),
    (
        _panel(checks, "Accuracy on held-out problems (greedy)", is_share=True),
        _panel(knowledge, "Accuracy of the reward model", is_share=True),
    ),
)


def differences(runs: Sequence[Run]) -> dict[tuple[str, str, str, str], report.Difference]:
    """Compare two arms on the same held-out problems, for each pair of arms, seed and decoding.

    The rows of "mean" are the means of the seeds. Their intervals are over problems, for these seeds.
    """
    right: dict[str, dict[tuple[str, str], np.ndarray]] = {name: {} for name in ARMS}
    for results in runs:
        for decoding, counts in results[COUNTS].items():
            samples = 1 if decoding == "greedy" else results["recipe"]["samples"]
            shares = np.array([[int(n) / samples] for n in counts["after"]])
            right[arm(results)][str(results["seed"]), decoding] = shares
    found = {}
    for pair in PAIRS:
        first, second = (right[name] for name in pair)
        both = sorted(first.keys() & second.keys())
        found |= {(*pair, *key): report.difference(first[key], second[key]) for key in both}
        for decoding in sorted({decoding for _, decoding in both}):
            keys = [key for key in both if key[1] == decoding]
            means = (np.mean([own[key] for key in keys], axis=0) for own in (first, second))
            found[*pair, "mean", decoding] = report.difference(*means)
    return found


def table(found: Mapping[tuple[str, str, str, str], report.Difference]) -> str:
    """Return the differences as a Markdown table."""
    rows = ["| arm | against | seed | decoding | of the other | of the arm | difference | 95 % interval |"]
    rows.append("|---|---|---|---|---|---|---|---|")
    for (first, second, seed, decoding), d in found.items():
        shares = f"{d.before:.1%} | {d.after:.1%} | {d.difference:+.1%} | {d.low:+.1%} to {d.high:+.1%}"
        rows.append(f"| {second} | {first} | {seed} | {decoding} | {shares} |")
    return "\n".join(rows)


def refuse_other_starts(runs: Sequence[Run]) -> None:
    """Refuse runs of one seed whose initial reward models differ.

    Raises:
        ValueError: Two runs of one seed began with different reward models.
    """
    first: dict[int, tuple[str, Any]] = {}
    for results in runs:
        if arm(results) == "rule":
            continue
        row = next(row for row in results["history"] if "reward" in row)
        start = {name: value for name, value in row.items() if name.startswith("reward_model/new/")}
        name, other = first.setdefault(results["seed"], (arm(results), start))
        if other != start:
            raise ValueError(
                f"the arms {name} and {arm(results)} of seed {results['seed']} began with different reward models. "
                "Run all arms of a seed with the same settings, on the same machine."
            )


def main(path: str, *files: str) -> None:
    """Draw the runs in `files`, which are `results.json` files, and print a table of the runs with equal seeds."""
    runs = [json.loads(Path(file).read_text()) for file in files]
    refuse_other_starts(runs)
    report.draw(Path(path), PANELS, runs, width=3.9)
    print(table(differences(runs)))


if __name__ == "__main__":
    main(*sys.argv[1:])
