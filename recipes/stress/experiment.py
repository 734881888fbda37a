"""Run an experiment: all its arms with all its seeds. Write the figures, a table and a picture.

python recipes/stress/experiment.py recipes/stress/engine.yaml [--seeds 0 1] [--arms exact nothing] [--jobs 2]

Runs that were finished before, with the same settings, are not repeated.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import report, run
from moe.digits import Digits
from stress.train import Arm, train

__all__ = ["LAST", "Comparison", "arms", "compare", "endpoint", "main", "table"]

LAST = 3  # checks whose mean is the endpoint
RESAMPLES = 10_000
Runs = dict[str, dict[int, dict[str, Any]]]  # arm -> seed -> figures


class Comparison(NamedTuple):
    """An arm beside another, over seeds. Accuracies are shares of 1."""

    mean: float
    """Endpoint of the arm."""
    difference: float | None
    """Mean paired difference; None for the baseline itself."""
    low: float | None
    """Lower end of the 95 % percentile bootstrap interval of it, over seeds."""
    high: float | None
    p: float | None
    """p-value of the exact two-sided sign-flip test, not corrected for the number of arms."""


def arms(experiment: Mapping[str, Any]) -> dict[str, Arm]:
    """Return the arms of an experiment by name."""
    return {
        name: Arm(
            options={**experiment["options"], **own.get("options", {})},
            sampler={**experiment["sampler"], **own.get("sampler", {})},
            **{key: of[key] for of in (experiment, own) for key in ("correction", "old") if key in of},
        )
        for name, own in experiment["arms"].items()
    }


def endpoint(figures: Mapping[str, Any]) -> float:
    """Return the mean of the last checks."""
    return float(np.mean(list(figures["accuracy"].values())[-LAST:]))


def compare(experiment: Mapping[str, Any], runs: Runs) -> dict[str, Comparison]:
    """Compare each arm with the baseline, or with the arm it names as `against`, seed by seed."""
    found = {}
    for name, own in runs.items():
        against = experiment["arms"][name].get("against", experiment["baseline"])
        mean = float(np.mean([endpoint(figures) for figures in own.values()]))
        if name == against or against not in runs:
            found[name] = Comparison(mean, None, None, None, None)
            continue
        gains = np.array([endpoint(own[seed]) - endpoint(runs[against][seed]) for seed in own])
        found[name] = Comparison(mean, float(gains.mean()), *_interval(gains), _sign_flip(gains))
    return found


def _interval(gains: np.ndarray) -> tuple[float, float]:
    picks = np.random.default_rng(0).integers(0, len(gains), (RESAMPLES, len(gains)))
    low, high = np.percentile(gains[picks].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)


def _sign_flip(gains: np.ndarray) -> float:
    """Return the share of all choices of signs whose mean is at least as far from 0."""
    signs = np.array(list(itertools.product((1, -1), repeat=len(gains))))
    means = np.abs((signs * gains).mean(axis=1))
    return float((means >= abs(gains.mean()) - 1e-12).mean())


def holm(values: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number by Holm's method."""
    order, largest, corrected = np.argsort(values), 0.0, [0.0] * len(values)
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(values) - rank) * values[i]))
        corrected[i] = largest
    return corrected


def table(experiment: Mapping[str, Any], runs: Runs) -> str:
    """Return a Markdown table with a row for each arm. The last two columns are means over all rollouts and seeds."""
    found = compare(experiment, runs)
    tested = [name for name, row in found.items() if row.p is not None]
    corrected = dict(zip(tested, holm([float(found[name].p or 0.0) for name in tested]), strict=True))
    lines = [
        "| arm | endpoint | smallest and largest | difference | 95 % interval | p | p, corrected | outside | ESS |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in found.items():
        ends = [endpoint(own) for own in runs[name].values()]
        outside, ess = (np.mean([np.mean(own[key]) for own in runs[name].values()]) for key in ("outside", "ess"))
        compared = "| | | | "
        if row.difference is not None:
            compared = (
                f"| {100 * row.difference:+.1f} | {100 * row.low:+.1f} to {100 * row.high:+.1f} "
                f"| {row.p:.3f} | {corrected[name]:.3f} "
            )
        lines.append(
            f"| {name} | {row.mean:.1%} | {min(ends):.1%}, {max(ends):.1%} {compared}| {outside:.1%} | {ess:.2f} |"
        )
    return "\n".join(lines)


def draw(path: Path, runs: Runs) -> None:
    """Draw each arm over the updates: the mean of the seeds, and the range of their accuracies."""
    styles = list(itertools.product("-:", [f"C{i}" for i in range(10) if i != 7]))  # C7 is grey, as the grid

    def panel(name: str, title: str, *, log: bool = False) -> report.Panel:
        def drawn(axis: Any, _: Any) -> None:
            for (line, colour), (arm, own) in zip(styles, runs.items(), strict=False):
                curves = [_curve(figures, name) for figures in own.values()]
                steps, values = curves[0][0], np.array([values for _, values in curves], dtype=float)
                axis.plot(steps, values.mean(axis=0), line, color=colour, linewidth=1.4, label=arm)
                if name == "accuracy":
                    axis.fill_between(steps, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.07)
            axis.set(title=title, yscale="log" if log else "linear")
            if name == "accuracy":
                axis.set_ylim(bottom=0)
                axis.legend(fontsize=6, ncols=2, loc="lower left")

        return drawn

    panels = [
        [panel("accuracy", "Held-out accuracy, sampled"), panel("outside", "Ratios outside 0.8 to 1.2, share")],
        [panel("ess", "Effective sample size, share"), panel("grad_norm", "Gradient norm before its limit", log=True)],
    ]
    report.draw(path, panels, runs)


def _curve(figures: Mapping[str, Any], name: str) -> tuple[list[int], list[float]]:
    if name == "accuracy":
        return [int(step) for step in figures[name]], list(figures[name].values())
    steps = max(int(step) for step in figures["accuracy"])
    values = figures[name]
    return [round((i + 1) * steps / len(values)) for i in range(len(values))], values


def _settings(arm: Arm, measured: Mapping[str, int]) -> dict[str, Any]:
    return {**asdict(arm), "measured": dict(measured)}


def _is_done(file: Path, arm: Arm, measured: Mapping[str, int]) -> bool:
    return file.exists() and json.loads(file.read_text())["settings"] == _settings(arm, measured)


def _run(arm: Arm, seed: int, start: Path, measured: Mapping[str, int], file: Path) -> str:
    torch.set_num_threads(1)
    figures = train(arm, seed, start, measured)
    kept = {"settings": _settings(arm, measured), "figures": figures}
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(kept))
    os.replace(unfinished, file)
    return f"{figures['seconds']:4d} s  {endpoint(figures):6.1%}"


def _done(tasks: Mapping[Any, tuple[Any, ...]], jobs: int) -> Iterator[tuple[Any, str]]:
    """Run the tasks, and yield the key and the line of each when it has ended."""
    if jobs == 1:
        yield from ((key, _run(*task)) for key, task in tasks.items())
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(_run, *task): key for key, task in tasks.items()}
        yield from ((running[done], done.result()) for done in as_completed(running))


def main(command: Sequence[str] | None = None) -> dict[str, Any]:
    """Run what is missing, and return the contents of `results.json`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("experiment", type=Path, help="YAML file")
    parser.add_argument("--seeds", type=int, nargs="+", help="instead of the file's")
    parser.add_argument("--arms", nargs="+", help="instead of all")
    parser.add_argument("--jobs", type=int, default=2, help="processes, each with one thread")
    parser.add_argument("--output_dir", type=Path, help="instead of outputs/stress and the file's name")
    asked = parser.parse_args(command)
    experiment = yaml.safe_load(asked.experiment.read_text())
    output = asked.output_dir or Path("outputs/stress") / asked.experiment.stem
    chosen = {name: arm for name, arm in arms(experiment).items() if name in (asked.arms or experiment["arms"])}
    seeds = asked.seeds or experiment["seeds"]
    files = {
        (name, seed): output / "runs" / f"{re.sub('[^A-Za-z0-9]+', '-', name)}-seed{seed}.json"
        for seed in seeds
        for name in chosen
    }
    start = output.parent / "start"
    Digits(start, dense=True).load(output, quantised=False)  # makes it once, for all runs
    measured = experiment["measured"]
    missing = [key for key, file in files.items() if not _is_done(file, chosen[key[0]], measured)]
    tasks = {(name, seed): (chosen[name], seed, start, measured, files[name, seed]) for name, seed in missing}
    for number, ((name, seed), line) in enumerate(_done(tasks, asked.jobs), 1):
        print(f"{number:3d}/{len(missing)}  seed {seed}  {line}  {name}", flush=True)
    runs: Runs = {
        name: {seed: json.loads(files[name, seed].read_text())["figures"] for seed in seeds} for name in chosen
    }
    results = {
        "settings": experiment,
        "versions": {package: version(package) for package in run.PACKAGES},
        "runs": runs,
    }
    (output / "results.json").write_text(json.dumps(results))
    draw(output / "arms.png", runs)
    print(table(experiment, runs))
    return results


if __name__ == "__main__":
    main()
