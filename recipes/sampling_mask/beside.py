"""A comparison of runs: a picture with the spread over seeds, and a table.

python recipes/sampling_mask/beside.py all.png outputs/sampling_mask/*/results.json
"""

import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from matplotlib.axes import Axes
from PIL import Image

from common import report

Results = Mapping[str, Any]
Runs = Sequence[Results]
# colours for colour-blind readers (Okabe and Ito's), and line styles that differ without colour
STYLES = {"mask off": ("#D55E00", "-"), "mask on": ("#0072B2", "--"), "top-p 1": ("#000000", ":")}
TITLES = {
    "reward": "Reward of each rollout (share right)",
    "entropy": "Entropy of the whole vocabulary, nats a token",
}
LAST = 10  # rollouts: their mean reward varies less than one check of the last policy
RATIO = "sampler/ratio_mean"


def variant(results: Results) -> str:
    """Return the label of the run's variant: its top-p and its mask."""
    objective = results["objective"]
    mask = "" if objective["top_p"] == 1 else ", mask on" if objective["keep_sampling_mask"] else ", mask off"
    return f"top-p {objective['top_p']:g}{mask}"


def variants(runs: Runs) -> dict[str, list[Results]]:
    """Group the runs by variant, in the order of the styles, and sort each group by seed."""
    ordered = sorted(runs, key=lambda r: (list(STYLES).index(kind(variant(r))), variant(r), r["seed"]))
    found: dict[str, list[Results]] = {}
    for results in ordered:
        found.setdefault(variant(results), []).append(results)
    return found


def kind(label: str) -> str:
    """Return a variant's key in `STYLES`: "mask off", "mask on" or "top-p 1"."""
    return label.split(", ")[-1]


def of_updates(results: Results, name: str, update: int) -> tuple[list[int], list[float]]:
    """Return the steps and values that were logged in one update of each rollout. The first update is 1."""
    steps = {row["step"] for row in results["history"] if row.get("sampler/update") == update}
    found = zip(*report.series(results["history"], name), strict=True)
    kept = [(step, value) for step, value in found if step in steps]
    return [step for step, _ in kept], [value for _, value in kept]


def updates(results: Results) -> int:
    """Return the number of updates that a rollout feeds."""
    return max(int(row["sampler/update"]) for row in results["history"] if "sampler/update" in row)


def over_seeds(axis: Axes, runs: Runs, *, name: str, title: str, update: int | None = None) -> None:
    """Draw one value of every variant: the mean over its seeds, and the range from the smallest to the largest.

    Args:
        axis: The axes to draw on.
        runs: The runs of all variants.
        name: The name of the logged value.
        title: The title of the panel.
        update: The update of a rollout to draw: -1 for the last, None for all.
    """
    for label, own in variants(runs).items():
        colour, line = STYLES[kind(label)]
        last = updates(own[0]) if update == -1 else update
        series = [report.series(r["history"], name) if last is None else of_updates(r, name, last) for r in own]
        steps, values = series[0][0], np.array([curve for _, curve in series])
        axis.plot(steps, values.mean(axis=0), line, color=colour, linewidth=1.3, label=label)
        axis.fill_between(steps, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.15, linewidth=0)
    axis.set(title=title)


def rewards(axis: Axes, runs: Runs) -> None:
    """Draw the rewards of the rollouts. Each variant samples in its own way."""
    over_seeds(axis, runs, name="reward", title=TITLES["reward"])
    axis.set_ylim(0, 1)
    axis.legend(loc="lower right")


def first_ratios(axis: Axes, runs: Runs) -> None:
    """Draw the ratios of the first updates, with equal weights: the mean, and the range of all tokens."""
    for label, own in variants(runs).items():
        colour, line = STYLES[kind(label)]
        means, lows, highs = (
            np.array([of_updates(results, f"sampler/ratio_{name}", 1)[1] for results in own])
            for name in ("mean", "min", "max")
        )
        steps = of_updates(own[0], RATIO, 1)[0]
        axis.plot(steps, means.mean(axis=0), line, color=colour, linewidth=1.3, label=label)
        axis.fill_between(steps, lows.min(axis=0), highs.max(axis=0), color=colour, alpha=0.15, linewidth=0)
    axis.set(title="Trainer / sampler, first update: mean, all tokens")
    axis.legend(loc="center right")


def accuracies(results: Results) -> list[float]:
    """Return the accuracies after training (with `asked_top_p`, whole vocabulary, greedy) and the last rewards."""
    by_name = {name: way["after"] for name, way in results["accuracy"].items()}
    ways = [
        next(share for name, share in by_name.items() if way in name) for way in ("top_p", "temperature", "greedy")
    ]
    return [*ways, float(np.mean(report.series(results["history"], "reward")[1][-LAST:]))]


def measures(results: Results) -> dict[str, float]:
    """Return the figures of a whole run, or of its last rollouts."""

    def every(name: str) -> np.ndarray:
        return np.array(report.series(results["history"], name)[1])

    last = updates(results)
    first, end = (partial(of_updates, results, update=update) for update in (1, last))
    return {
        "ratio in update 1, mean": np.mean(first(RATIO)[1]),
        "smallest of all tokens": np.min(first("sampler/ratio_min")[1]),
        "largest of all tokens": np.max(first("sampler/ratio_max")[1]),
        f"ratio in update {last}, mean": np.mean(end(RATIO)[1]),
        f"log-ratios in update {last}, standard deviation": np.mean(end("sampler/log_ratio_std")[1]),
        "share of tokens clipped": every("clip_ratio/region_mean").mean(),
        "kept mass, update 1": np.mean(first("sampler/kept_mass")[1]),
        "kept tokens, update 1": np.mean(first("sampler/kept_tokens")[1]),
        "share of tokens kept alone, update 1": np.mean(first("sampler/singletons")[1]),
        "norm of the gradient": every("grad_norm").mean(),
        f"entropy, last {LAST} rollouts": every("entropy")[-LAST * last :].mean(),
        f"KL, last {LAST} rollouts": every("kl")[-LAST * last :].mean(),
    }


def table(runs: Runs) -> str:
    """Return two Markdown tables: accuracies by seed with their mean, then measures with the range of the seeds."""
    lines = [
        f"| | seed | sampled, truncated | sampled, all | greedy | last {LAST} rewards |",
        "|---|---|---|---|---|---|",
    ]
    groups = variants(runs)
    for label, own in groups.items():
        rows = {str(results["seed"]): accuracies(results) for results in own}
        if len(rows) > 1:
            rows["mean"] = list(np.mean(list(rows.values()), axis=0))
        lines += [f"| {label} | {seed} | {' | '.join(f'{x:.1%}' for x in shares)} |" for seed, shares in rows.items()]
    lines += ["", f"| | {' | '.join(groups)} |", f"|---|{'---|' * len(groups)}"]
    found = [[measures(results) for results in own] for own in groups.values()]
    for name in found[0][0]:
        cells = [spread([of_seed[name] for of_seed in seeds]) for seeds in found]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(values: Sequence[float]) -> str:
    """Return the mean over seeds, and their range if four digits show one."""
    mean, low, high = (f"{value:.4f}" for value in (np.mean(values), min(values), max(values)))
    return mean if low == high else f"{mean} ({low} to {high})"


def main(path: str, *files: str) -> None:
    """Draw the runs in `files`, which are `results.json` files, and print their table."""
    runs = [json.loads(Path(file).read_text()) for file in files]
    last = partial(over_seeds, name=RATIO, title="Trainer / sampler, last update: mean over tokens", update=-1)
    entropy = partial(over_seeds, name="entropy", title=TITLES["entropy"])
    report.draw(Path(path), ((rewards, first_ratios), (entropy, last)), runs)
    Image.open(path).convert("RGB").quantize().save(path, optimize=True)  # a palette needs a third of the bytes
    print(table(runs))


if __name__ == "__main__":
    main(*sys.argv[1:])
