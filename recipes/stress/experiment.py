"""Run an experiment: all its arms with all its seeds. Write the figures, a table and a picture.

python recipes/stress/experiment.py recipes/stress/engine.yaml [--seeds 0 1] [--arms exact nothing] [--jobs 2]
python recipes/stress/experiment.py recipes/stress/engine.yaml --redraw recipes/stress/results/engine.json

Runs that were finished before, with the same settings, are not repeated.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import torch
import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import report, run
from stress import grid
from stress.train import Arm, task_of, train
from trl_steady.report.compare import interval

__all__ = ["LAST", "Comparison", "Kind", "arms", "cells", "compare", "endpoint", "load", "main", "table"]

LAST = 3  # checks whose mean is the endpoint
LONG_NAME = 30  # letters, of which two columns of a legend have room
Runs = dict[str, dict[int, dict[str, Any]]]  # arm -> seed -> figures


class Figure(NamedTuple):
    """How a figure of a run is shown."""

    title: str
    """In the picture."""
    heading: str
    """In the table."""
    form: str
    scale: int = 1
    decimals: int = 3
    """Of differences, times `scale`. Shares have differences in points."""


SHARE = {"scale": 100, "decimals": 1}
CHECKED = {
    "accuracy": Figure("Held-out accuracy, sampled", "accuracy", ".1%", **SHARE),
    "truncated": Figure("Held-out accuracy, sampled with top-p", "truncated", ".1%", **SHARE),
    "distance": Figure("KL to the optimum, nats an answer", "distance", ".3f"),
    "turns": Figure("Held-out turns that are right, sampled", "right turns", ".1%", **SHARE),
    "greedy": Figure("Held-out accuracy, greedy", "greedy", ".1%", **SHARE),
    "pass@8": Figure("Held-out pass@8", "pass@8", ".1%", **SHARE),
    "longer/accuracy": Figure("Longer problems, sampled", "longer, sampled", ".1%", **SHARE),
    "longer/greedy": Figure("Longer problems, greedy", "longer, greedy", ".1%", **SHARE),
    "longer/pass@8": Figure("Longer problems, pass@8", "longer, pass@8", ".1%", **SHARE),
}
"""Figures of the checks. One of them is the endpoint."""
SHOWN = CHECKED | {
    "outside": Figure("Ratios outside 0.8 to 1.2, share", "outside", ".1%"),
    "ess": Figure("Effective sample size, share", "ESS", ".2f"),
    "grad_norm": Figure("Gradient norm before its limit", "gradient norm", ".2f"),
    "frac_reward_zero_std": Figure("Groups without a signal, share", "idle", ".1%"),
    "dynamic_sampling/generated": Figure("Answers, as a multiple of the rollout", "answers", ".2f"),
    "reward": Figure("Reward of the rollout", "reward", ".2f"),
    "kl": Figure("KL of the log", "KL", ".3f"),
    "sampling_mask/kept_mass": Figure("Kept mass", "kept mass", ".3f"),
    "rerouted": Figure("Experts that differ, share", "experts that differ", ".1%"),
    "weight": Figure("Weight of the correction, mean", "weight", ".2g"),
    "clip_ratio/region_mean": Figure("Clipped tokens, share", "clipped", ".2%"),
    "changed": Figure("Experts that change in a rollout, share", "experts changed", ".1%"),
    "log_ratio_std": Figure("Standard deviation of the log-ratios", "log-ratios, std", ".3f"),
    "teacher/kl": Figure("KL to the teacher, nats a token", "KL to teacher", ".3f"),
    "teacher/agreement": Figure("Tokens where teacher and rewards agree, share", "agreement", ".1%"),
    "value/explained_variance": Figure("Variance that the critic explains, share", "explained", ".1%"),
}
USUAL = ("accuracy", "outside", "ess", "grad_norm")
"""Figures in the picture, unless the YAML has `pictured`."""
TEXTS = ("question", "control", "endpoint", "failure", "analysis", "chosen")
"""Keys of an experiment that are for readers."""
SHAPE = ("arms", "grid", "baseline", "seeds", "measured", "figure", "pictured", "columns", "drawn", "level")
"""Keys of an experiment that no arm has."""


class Kind(NamedTuple):
    """A kind of runs. Those of this recipe are `STRESS`."""

    arm: type
    """A dataclass, whose fields are keys of an experiment and of an arm, which overrules it. Mappings are merged."""
    prepare: Callable[[Any, Path], Any]
    """Takes an arm and a folder, in which it makes the starting model."""
    train: Callable[[Any, int, Path, Mapping[str, Any]], dict[str, Any]]
    """Takes an arm, a seed, this folder and the experiment's `measured`. Returns the figures of a run."""
    show: Callable[[Path, Mapping[str, Any], Runs], None] | None = None
    """Takes the path of the picture, the experiment and its runs, and shows more of them."""
    packages: Sequence[str] = run.PACKAGES
    """Packages whose versions stand in `results.json`, if they are installed."""


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


def _prepare(arm: Arm, folder: Path) -> None:
    task_of(arm, folder).load(folder, quantised=False)


STRESS = Kind(Arm, _prepare, train)


def arms(experiment: Mapping[str, Any], arm: type = Arm) -> dict[str, Any]:
    """Return the arms of an experiment by name. They are of the class `arm`.

    Raises:
        ValueError: If the experiment or an arm has a key that nothing reads.
    """
    keys = {field.name for field in fields(arm)}
    _refuse_unknown("The experiment", experiment, keys | {*TEXTS, *SHAPE})
    found: dict[str, Any] = {}
    for name, own in experiment["arms"].items():
        _refuse_unknown(f"The arm {name!r}", own, keys | {"against"})
        settings: dict[str, Any] = {}
        for key in keys:
            given = [of[key] for of in (experiment, own) if key in of]
            if given:
                settings[key] = _merged(given)
        found[name] = arm(**settings)
    return found


def _refuse_unknown(what: str, given: Mapping[str, Any], known: set[str]) -> None:
    unknown = given.keys() - known
    if unknown:
        raise ValueError(f"{what} has {sorted(unknown)}. It can have {sorted(known)}.")


def _merged(given: Sequence[Any]) -> Any:
    """Return the last of several settings, or what they have together if all are mappings."""
    if not all(isinstance(each, Mapping) for each in given):
        return given[-1]
    together: dict[str, Any] = {}
    for each in given:
        together |= each
    return together


def load(path: Path) -> dict[str, Any]:
    """Return the experiment in a YAML file. If it has a `grid`, its arms are all pairs of a cell and a setting."""
    experiment = yaml.safe_load(path.read_text())
    if "grid" in experiment:
        experiment["arms"] = grid.arms(experiment["grid"])
    return experiment


def endpoint(experiment: Mapping[str, Any], figures: Mapping[str, Any]) -> float:
    """Return the mean of the last checks of the experiment's `figure`."""
    return float(np.mean(list(figures[experiment.get("figure", "accuracy")].values())[-LAST:]))


def cells(experiment: Mapping[str, Any], runs: Runs) -> dict[str, grid.Cell]:
    """Return the cells of an experiment with a `grid`."""
    ends = {}
    for name, own in runs.items():
        ends[name] = {seed: endpoint(experiment, figures) for seed, figures in own.items()}
    return grid.cells(experiment["grid"], ends)


def compare(experiment: Mapping[str, Any], runs: Runs) -> dict[str, Comparison]:
    """Compare each arm with the baseline, or with the arm it names as `against`, seed by seed."""
    found = {}
    for name, own in runs.items():
        against = experiment["arms"][name].get("against", experiment["baseline"])
        ends = {seed: endpoint(experiment, figures) for seed, figures in own.items()}
        mean = float(np.mean(list(ends.values())))
        if name == against or against not in runs:
            found[name] = Comparison(mean, None, None, None, None)
            continue
        gains = np.array([end - endpoint(experiment, runs[against][seed]) for seed, end in ends.items()])
        found[name] = Comparison(mean, float(gains.mean()), *interval(gains), _sign_flip(gains))
    return found


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


def _corrected(found: Mapping[str, Comparison]) -> dict[str, float]:
    """Return the corrected p-values by arm."""
    values = {name: row.p for name, row in found.items() if row.p is not None}
    return dict(zip(values, holm(list(values.values())), strict=True))


def table(experiment: Mapping[str, Any], runs: Runs) -> str:
    """Return a Markdown table with a row for each arm. `columns` adds means over all rollouts and seeds."""
    found = compare(experiment, runs)
    corrected = _corrected(found)
    own, columns = SHOWN[experiment.get("figure", "accuracy")], experiment.get("columns", ())
    headings = "".join(f" {SHOWN[name].heading} |" for name in columns)
    lines = [f"| arm | endpoint | difference (95 % interval) | p |{headings}", "|---" * (4 + len(columns)) + "|"]
    for name, row in found.items():
        compared = "| | "
        if row.difference is not None:
            compared = f"| {_signed(own, row)} | {corrected[name]:.3f} "
        means = "".join(f" {_mean(runs[name], column)} |" for column in columns)
        lines.append(f"| {name} | {row.mean:{own.form}} {compared}|{means}")
    return "\n".join(lines)


def _signed(own: Figure, row: Comparison) -> str:
    """Return a difference with its interval, as the table and the picture write it."""
    values = (row.difference, row.low, row.high)
    middle, low, high = (f"{own.scale * value:+.{own.decimals}f}" for value in values if value is not None)
    return f"{middle} ({low} to {high})"


def _mean(runs: Mapping[int, Mapping[str, Any]], name: str) -> str:
    """Return the mean of a figure over rollouts or checks, and seeds; nothing if the arm has no such figure."""
    if any(name not in figures for figures in runs.values()):
        return ""
    means: list[float] = []
    for figures in runs.values():
        _, values = _curve(figures, name)
        means.append(float(np.mean([value for value in values if value is not None])))
    return format(float(np.mean(means)), SHOWN[name].form)


def draw_differences(path: Path, experiment: Mapping[str, Any], runs: Runs) -> None:
    """Draw what `table` says: a row for each arm, with its 95 % interval. It is grey if it holds 0."""
    found, own = compare(experiment, runs), SHOWN[experiment.get("figure", "accuracy")]
    corrected = _corrected(found)
    figure, axis = plt.subplots(figsize=(4.4, 0.42 * len(found) + 0.6))
    for place, (name, row) in enumerate(found.items()):
        means = [_mean(runs[name], column) for column in experiment.get("columns", ())]
        columns = "".join(f" [{mean}]" for mean in means if mean)
        figures = f"{row.mean:{own.form}}"
        if row.difference is not None:
            middle, low, high = (own.scale * value for value in (row.difference, row.low, row.high))
            colour = "0.6" if low <= 0 <= high else "C0"
            axis.plot([low, high], [place, place], color=colour, linewidth=2)
            axis.plot(middle, place, "o", color=colour, markersize=5)
            figures += f"   {_signed(own, row)}   p {corrected[name]:.3f}"
        where = {"transform": axis.get_yaxis_transform(), "ha": "left"}
        axis.text(-1.42, place, f"{name}{columns}", va="bottom", fontsize=8.5, **where)
        axis.text(-1.42, place + 0.04, figures, va="top", fontsize=7.5, color="0.35", **where)
    axis.axvline(0, color="0.2", linewidth=0.8)
    axis.set(ylim=(len(found) - 0.4, -0.6), yticks=[])
    axis.tick_params(labelsize=8)
    axis.spines[["left", "right", "top"]].set_visible(False)
    figure.subplots_adjust(left=0.6, right=0.98, top=0.99, bottom=0.3 / figure.get_figheight())
    figure.savefig(path, dpi=200)
    plt.close(figure)


def draw(path: Path, experiment: Mapping[str, Any], runs: Runs) -> None:
    """Draw the arms over the updates: the mean of the seeds, and the range of the figures of the checks.

    If the YAML has `drawn`, only these arms are drawn.
    """
    styles = list(itertools.product("-:", [f"C{i}" for i in range(10) if i != 7]))  # C7 is grey, as the grid
    names = experiment.get("pictured", USUAL)
    drawn_arms = {arm: runs[arm] for arm in experiment.get("drawn", runs) if arm in runs} or runs

    def panel(name: str) -> report.Panel:
        def drawn(axis: Any, _: Any) -> None:
            for (line, colour), (arm, own) in zip(styles, drawn_arms.items(), strict=False):
                curves = [_curve(figures, name) for figures in own.values() if name in figures]
                if not curves:
                    continue
                steps = min((of_run for of_run, _ in curves), key=max)  # runs of `rollouts` end at different updates
                at_steps = [np.interp(steps, of_run, np.array(own, dtype=float)) for of_run, own in curves]
                values = np.array(at_steps)
                axis.plot(steps, values.mean(axis=0), line, color=colour, linewidth=2, label=arm)
                if name in CHECKED:
                    axis.fill_between(steps, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.07)
            axis.set(title=SHOWN[name].title, yscale="log" if name == "grad_norm" else "linear")
            if name in CHECKED:
                axis.set_ylim(bottom=0)
            if name == names[0]:
                handles = axis.get_legend_handles_labels()
                columns = 4 if len(drawn_arms) < 5 else 3
                if max(map(len, drawn_arms)) > LONG_NAME:
                    columns = 2
                axis.get_figure().legend(*handles, loc="outside lower center", ncols=columns)

        return drawn

    panels = [[panel(name) for name in names[i : i + 2]] for i in range(0, len(names), 2)]
    report.draw(path, panels, runs, width=3.9)


def _curve(figures: Mapping[str, Any], name: str) -> tuple[list[int], list[float]]:
    if name in CHECKED:
        return [int(step) for step in figures[name]], list(figures[name].values())
    steps = max(int(step) for step in figures["accuracy"])
    values = figures[name]
    return [round((i + 1) * steps / len(values)) for i in range(len(values))], values


def _settings(arm: Any, measured: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps({**asdict(arm), "measured": dict(measured)}))  # as a file gives it: lists, no tuples


def _is_done(file: Path, arm: Any, measured: Mapping[str, Any]) -> bool:
    return file.exists() and json.loads(file.read_text())["settings"] == _settings(arm, measured)


def _run(kind: Kind, arm: Any, seed: int, folder: Path, measured: Mapping[str, Any], file: Path) -> str:
    torch.set_num_threads(1)
    figures = kind.train(arm, seed, folder, measured)
    kept = {"settings": _settings(arm, measured), "figures": figures}
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(kept))
    os.replace(unfinished, file)
    return f"{figures['seconds']:4d} s"


def _versions(packages: Sequence[str]) -> Iterator[tuple[str, str]]:
    for package in packages:
        with suppress(PackageNotFoundError):
            yield package, version(package)


def _done(tasks: Mapping[Any, tuple[Any, ...]], jobs: int) -> Iterator[tuple[Any, str]]:
    """Run the tasks, and yield the key and the line of each when it has ended."""
    if jobs == 1:
        yield from ((key, _run(*task)) for key, task in tasks.items())
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(_run, *task): key for key, task in tasks.items()}
        yield from ((running[done], done.result()) for done in as_completed(running))


def main(command: Sequence[str] | None = None, kind: Kind = STRESS) -> dict[str, Any]:
    """Run what is missing, and return the contents of `results.json`.

    A line tells when a run has ended, and nothing of its figures: a plan allows one look, after all seeds.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("experiment", type=Path, help="YAML file")
    parser.add_argument("--seeds", type=int, nargs="+", help="instead of the file's")
    parser.add_argument("--arms", nargs="+", help="instead of all")
    parser.add_argument("--jobs", type=int, default=2, help="processes, each with one thread")
    parser.add_argument("--output_dir", type=Path, help="instead of outputs, the file's folder and name")
    parser.add_argument("--redraw", type=Path, help="results.json of an earlier run: draw its picture and run nothing")
    run.refuse_dry_run(parser, "Try one of them: --arms NAME --seeds 0 --output_dir FOLDER.")
    asked = parser.parse_args(command)
    experiment = load(asked.experiment)
    if asked.redraw:
        recorded = json.loads(asked.redraw.read_text())
        _show(kind, asked.redraw.with_suffix(".png"), experiment, recorded["runs"])
        return recorded
    output = asked.output_dir or Path("outputs") / asked.experiment.resolve().parent.name / asked.experiment.stem
    names = asked.arms or list(experiment["arms"])
    unknown = set(names) - experiment["arms"].keys()
    if unknown:
        parser.error(f"--arms {sorted(unknown)}: the experiment has {list(experiment['arms'])}")
    chosen = {name: arm for name, arm in arms(experiment, kind.arm).items() if name in names}
    seeds = asked.seeds or experiment["seeds"]
    files: dict[tuple[str, int], Path] = {}
    for seed in seeds:
        for name in chosen:
            stem = re.sub("[^A-Za-z0-9]+", "-", name)
            files[name, seed] = output / "runs" / f"{stem}-seed{seed}.json"
    folder = output.parent
    for arm in chosen.values():
        kind.prepare(arm, folder)  # makes the starting models once, for all runs
    measured = experiment["measured"]
    tasks: dict[tuple[str, int], tuple[Any, ...]] = {}
    for (name, seed), file in files.items():
        if not _is_done(file, chosen[name], measured):
            tasks[name, seed] = (kind, chosen[name], seed, folder, measured, file)
    for number, ((name, seed), line) in enumerate(_done(tasks, asked.jobs), 1):
        print(f"{number:3d}/{len(tasks)}  seed {seed}  {line}  {name}", flush=True)
    runs: Runs = {name: {} for name in chosen}
    for (name, seed), file in files.items():
        runs[name][seed] = json.loads(file.read_text())["figures"]
    results = {
        "settings": experiment,
        "versions": dict(_versions(kind.packages)),
        "runs": runs,
    }
    (output / "results.json").write_text(json.dumps(results, separators=(",", ":")))
    _show(kind, output / "arms.png", experiment, runs)
    return results


def _show(kind: Kind, picture: Path, experiment: Mapping[str, Any], runs: Runs) -> None:
    """Draw the picture, and print the table."""
    if "grid" in experiment:
        found = cells(experiment, runs)
        grid.draw(picture, experiment["grid"], found)
        grid.draw_gaps(picture.with_stem(f"{picture.stem}-gaps"), experiment["grid"], found)
        print(grid.table(found), grid.summary(found), sep="\n\n")
        return
    draw(picture, experiment, runs)
    draw_differences(picture.with_stem(f"{picture.stem}-differences"), experiment, runs)
    print(table(experiment, runs))
    if kind.show is not None:
        kind.show(picture, experiment, runs)


if __name__ == "__main__":
    main()
