"""Run all arms of plan.yaml with all its seeds. Write the figures, tables and a picture.

python recipes/deepseekmath/figures.py recipes/deepseekmath/plan.yaml [--seeds 0] [--arms start "GRPO, outcome"]
python recipes/deepseekmath/figures.py recipes/deepseekmath/plan.yaml --redraw recipes/deepseekmath/results/runs.json

Runs that were finished before, with the same settings, are not repeated.
"""

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
import yaml
from matplotlib.axes import Axes
from trl import TrlParser

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import evaluate, run
from deepseekmath import train
from stress.experiment import table
from trl_steady import GRPOConfig
from trl_steady.report.compare import interval

CHECKS = "held-out greedy accuracy by step"
SETS = {"held out": "Held-out problems", "large digits": "Out of domain: large digits only"}
ENDPOINTS = (
    ("held out", "pass@k", 0),
    ("held out", "maj@k", -1),
    ("held out", "pass@k", -1),
    ("large digits", "pass@k", 0),
)
"""Problems, score, and the place of K: the first, which is 1, or the last."""
Figures = Mapping[str, Any]
Runs = dict[str, dict[int, Figures]]  # arm -> seed -> figures


def command(plan: Path, arm: Mapping[str, Any], seed: int, output: Path) -> list[str]:
    """Return the arguments of `train.py` for one run."""
    options = {**arm.get("options", {}), "seed": seed, "output_dir": output, "start": output.parent / "start"}
    given = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    return ["--config", str(plan.parent / arm["config"]), *given]


def measured(arguments: Sequence[str], file: Path) -> Figures:
    """Do one run, and return its figures. `file` keeps them, with the settings, for the next call."""
    torch.set_num_threads(1)
    recipe, args = TrlParser((train.RecipeArguments, GRPOConfig)).parse_args_and_config(list(arguments))
    settings = json.loads(json.dumps([[*arguments], yaml.safe_load(Path(arguments[1]).read_text())]))
    if file.exists() and (kept := json.loads(file.read_text()))["settings"] == settings:
        return kept["figures"]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        found = train.main(recipe, args)
    right = [round(row["right"], 4) for row in found["history"] if "right" in row]
    scores: dict[str, dict[str, list[float]]] = {}
    for of, own in found["scores"].items():
        scores[of] = {metric: [round(point["mean"], 4) for point in own[metric]] for metric in evaluate.METRICS}
    kept = {CHECKS: found[CHECKS], "scores": scores, "right": right, "seconds": found["seconds"]["in all"]}
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(json.dumps({"settings": settings, "figures": kept}))
    os.replace(unfinished, file)
    return json.loads(json.dumps(kept))


def tables(plan: Mapping[str, Any], runs: Runs) -> str:
    """Return a Markdown table for each endpoint, with Holm's correction within it."""
    texts = []
    for of, metric, at in ENDPOINTS:
        ends = {
            name: {seed: {"accuracy": {"end": each["scores"][of][metric][at]}} for seed, each in own.items()}
            for name, own in runs.items()
        }
        some = next(own for arm in runs.values() for own in arm.values())
        k = evaluate.KS[: len(some["scores"][of][metric])][at]
        texts.append(f"{SETS[of]}, {metric[:-1]}{k}\n\n{table(plan, ends)}")
    return "\n\n".join(texts)


def _over_updates(names: Sequence[str], title: str) -> Callable[[Axes, Runs], None]:
    def panel(axis: Axes, runs: Runs) -> None:
        for i, name in enumerate(names):
            if name not in runs:
                continue
            checks = [own[CHECKS] for own in runs[name].values()]
            steps, values = [int(step) for step in checks[0]], np.array([[*own.values()] for own in checks])
            axis.plot(steps, values.mean(axis=0), "o-", markersize=3, color=f"C{i}", label=name)
            _band(axis, steps, values, f"C{i}")
        axis.set(title=title, xlabel="update", ylabel="held-out accuracy, greedy")
        axis.legend(fontsize="small")

    return panel


def _over_k(of: str, names: Sequence[str]) -> Callable[[Axes, Runs], None]:
    def panel(axis: Axes, runs: Runs) -> None:
        for i, name in enumerate(names):
            for metric, style in evaluate.STYLES.items() if name in runs else ():
                values = np.array([own["scores"][of][metric] for own in runs[name].values()])
                ks = evaluate.KS[: values.shape[1]]
                axis.plot(ks, values.mean(axis=0), style, color=f"C{i}", label=f"{name}, {metric}")
                _band(axis, ks, values, f"C{i}")
        axis.set_xscale("log", base=2)
        axis.set_xticks(evaluate.KS, [str(k) for k in evaluate.KS])
        axis.set(title=SETS[of], xlabel="K", ylabel="share of problems")
        if of == "held out":  # for both
            axis.get_figure().legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=len(names))

    return panel


def _band(axis: Axes, at: Sequence[int], values: np.ndarray, colour: str) -> None:
    """Draw the 95 % bootstrap interval of the mean of values (seeds, points)."""
    if len(values) > 1:
        low, high = zip(*(interval(own) for own in values.T), strict=True)
        axis.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)


def draw(path: Path, plan: Mapping[str, Any], runs: Runs) -> None:
    """Save a picture like the paper's figures 5, 6 and 7: methods, iterations, and scores over K."""
    pictured = plan["pictured"]
    panels = (
        _over_updates(pictured["methods"], "Methods"),
        _over_updates(pictured["iterations"], "Iterations"),
        *(_over_k(of, pictured["scores"]) for of in SETS),
    )
    figure, axes = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")
    for axis, panel in zip(axes.flat, panels, strict=True):
        panel(axis, runs)
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(command_line: Sequence[str] | None = None) -> dict[str, Any]:
    """Run what is missing, and return the contents of `runs.json`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("plan", type=Path, help="YAML file")
    parser.add_argument("--seeds", type=int, nargs="+", help="instead of the file's")
    parser.add_argument("--arms", nargs="+", help="instead of all")
    parser.add_argument("--jobs", type=int, default=2, help="processes, each with one thread")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/deepseekmath"), help="for runs and pictures")
    parser.add_argument("--redraw", type=Path, help="runs.json of an earlier run: draw its picture and run nothing")
    train_one = "python recipes/deepseekmath/train.py --config recipes/deepseekmath/grpo-outcome.yaml --dry-run"
    run.refuse_dry_run(parser, f"Try one of them: {train_one}")
    asked = parser.parse_args(command_line)
    plan = yaml.safe_load(asked.plan.read_text())
    output: Path = asked.output_dir
    if asked.redraw:
        recorded = json.loads(asked.redraw.read_text())
        draw(asked.redraw.with_suffix(".png"), plan, recorded["runs"])
        print(tables(plan, recorded["runs"]))
        return recorded
    names, seeds = asked.arms or [*plan["arms"]], asked.seeds or plan["seeds"]
    if unknown := {*names} - {*plan["arms"]}:
        parser.error(f"--arms {sorted(unknown)}: the plan has {[*plan['arms']]}")
    output.mkdir(parents=True, exist_ok=True)
    train.Chain(output / "start").load(output, quantised=False)  # makes the starting model once, for all runs
    runs: Runs = {name: {} for name in names}
    with ProcessPoolExecutor(asked.jobs, multiprocessing.get_context("spawn")) as pool:
        running = {}
        for seed in seeds:
            for name in names:
                folder = output / f"{re.sub('[^A-Za-z0-9]+', '-', name)}-seed{seed}"
                arguments = command(asked.plan, plan["arms"][name], seed, folder)
                running[pool.submit(measured, arguments, folder.with_suffix(".json"))] = name, seed
        for number, done in enumerate(as_completed(running), 1):
            (name, seed), own = running[done], done.result()
            runs[name][seed] = own
            ends = "  ".join(f"{of} {scores['pass@k'][0]:.1%}" for of, scores in own["scores"].items())
            print(f"{number:3d}/{len(running)}  seed {seed}  {own['seconds']:4d} s  {ends}  {name}", flush=True)
    results = {
        "plan": plan,
        "versions": {package: version(package) for package in run.PACKAGES},
        "runs": {name: {seed: own[seed] for seed in seeds} for name, own in runs.items()},
    }
    (output / "runs.json").write_text(json.dumps(results))
    draw(output / "runs.png", plan, results["runs"])
    print(tables(plan, results["runs"]))
    return results


if __name__ == "__main__":
    main()
