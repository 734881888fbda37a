"""What a run leaves behind: a table, a picture, a JSON file."""

from typing import Any, NamedTuple

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt


class Difference(NamedTuple):
    """Of two accuracies on the same problems, with its 95 % interval, all in shares of 1."""

    before: float
    after: float
    difference: float
    low: float
    high: float


def difference(before: np.ndarray, after: np.ndarray) -> Difference:
    """Paired bootstrap over problems: (problems, samples) of right answers, 10,000 resamples."""
    gain = (after - before).mean(axis=1)
    picks = np.random.default_rng(0).integers(0, len(gain), (10_000, len(gain)))
    low, high = np.percentile(gain[picks].mean(axis=1), [2.5, 97.5])
    return Difference(*(float(x) for x in (before.mean(), after.mean(), gain.mean(), low, high)))


def table(rows: dict[str, Difference]) -> str:
    """In Markdown."""
    lines = [
        "| accuracy on held-out problems | before | after | difference | 95 % interval |",
        "|---|---|---|---|---|",
    ]
    for name, d in rows.items():
        interval = f"{d.low:+.1%} to {d.high:+.1%}"
        lines.append(f"| {name} | {d.before:.1%} | {d.after:.1%} | {d.difference:+.1%} | {interval} |")
    return "\n".join(lines)


def picture(path: str, history: list[dict[str, Any]], checks: dict[int, float], sampled: Difference) -> None:
    """Reward, held-out accuracy, sequence ratio and clip fraction over optimizer steps."""

    def series(name: str) -> tuple[list[int], list[float]]:
        rows = [(row["step"], row[name]) for row in history if row.get(name) is not None]
        return [step for step, _ in rows], [value for _, value in rows]

    figure, axes = plt.subplots(2, 2, figsize=(10, 6.5), sharex=True)
    (reward, accuracy), (ratio, clip) = axes
    reward.plot(*series("reward"), "o-", color="tab:blue")
    reward.set(title="Reward of each rollout (share right)", ylim=(0, 1))
    accuracy.plot(list(checks), list(checks.values()), "o-", color="tab:green", label="greedy, every rollout")
    last = max([0, *(row["step"] for row in history if "step" in row)])
    ends = [sampled.before, sampled.after]
    accuracy.plot([0, last], ends, "s", color="tab:orange", label="sampled, before and after")
    accuracy.set(title="Accuracy on held-out problems", ylim=(0, 1))
    accuracy.legend(loc="lower right")
    for name, style in (("max", ":"), ("mean", "-"), ("min", ":")):
        ratio.plot(*series(f"ratio/sequence_{name}"), style, color="tab:purple", label=name)
    ratio.set(title="Sequence ratio $s_i$", xlabel="optimizer step", yscale="log")
    ratio.legend()
    clip.plot(*series("clip_ratio/region_mean"), "o-", color="tab:red", markersize=3)
    clip.set(title="Share of sequences clipped", xlabel="optimizer step", ylim=(0, 1))
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
