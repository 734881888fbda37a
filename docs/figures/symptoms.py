"""Diagnose the runs of the recipe `stress`, print a table, and write its counts to docs/report.md.

python docs/figures/symptoms.py

The results hold figures of each rollout, not logs. They get the names of the log's metrics here.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))

from stress.experiment import endpoint
from trl_steady.report import History, diagnose
from trl_steady.report.compare import interval

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/report.md"
NAMES = {"ess": "mismatch/effective_sample_size", "changed": "routing/changed"}
"""ESS is that of answers here, and that of tokens in a log. It is lower."""
LENGTH = 11  # tokens of nearly all answers
LOGGED = ("reward", "grad_norm", "clip_ratio/region_mean", "kl", "ratio/sequence_max", "sampling_mask/kept_mass")


def history(figures: Mapping[str, Any], options: Mapping[str, Any]) -> History:
    """Return the log of a run, with a row for each rollout and for each check of the held-out problems."""
    steps = max(map(int, figures["accuracy"]))
    rows: list[dict[str, Any]] = []
    for name in (*LOGGED, *NAMES):
        values = figures.get(name, [])
        every = steps / max(len(values), 1)
        rows += [{"step": round((i + 1) * every), NAMES.get(name, name): value} for i, value in enumerate(values)]
    rows += [{"step": int(step), "eval_reward": share} for step, share in figures["accuracy"].items()]
    rows += [{"step": step, "completions/mean_length": LENGTH} for step in (0, steps)]
    return History(sorted(rows, key=lambda row: row["step"]), {"settings": dict(options)})


def arms(results: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return for each arm of an experiment how it ends beside the control, and what is named on how many seeds."""
    experiment, runs = results["settings"], results["runs"]
    worse = 1 if experiment.get("figure") == "distance" else -1
    ends = {arm: {seed: endpoint(experiment, run) for seed, run in seeds.items()} for arm, seeds in runs.items()}
    control, found = experiment["control"], {}
    for arm, seeds in runs.items():
        losses = np.array([worse * (end - ends[control][seed]) for seed, end in ends[arm].items()])
        own = experiment["arms"][arm]
        options = {**experiment["options"], **own.get("options", {})}
        named: Counter[str] = Counter()
        for figures in seeds.values():
            findings = diagnose(history(figures, options))[0]
            named.update(finding.symptom.name for finding in findings if finding.symptom.level != "note")
        # as `failure` in the YAML files: the 95 % interval of the paired difference excludes 0
        fails = arm != control and interval(losses)[0] > 0
        found[arm] = {"fails": fails, "seeds": len(seeds), "named": named}
    return found


def table(found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """Return a Markdown table with a row for each experiment, and the counts above it."""
    headings = [
        "experiment",
        "failing arms",
        "named on most seeds",
        "symptoms",
        "not named",
        "other arms that are named",
    ]
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    counts: Counter[str] = Counter()
    for experiment, of in found.items():
        fails = {arm for arm, row in of.items() if row["fails"]}
        named = {arm for arm in fails if max(of[arm]["named"].values(), default=0) > of[arm]["seeds"] / 2}
        others = [arm for arm, row in of.items() if arm not in fails and row["named"]]
        counts.update(failing=len(fails), named=len(named), others=len(of) - len(fails), loud=len(others))
        half = {arm: of[arm]["seeds"] / 2 for arm in named}
        names = {name for arm in named for name, seeds in of[arm]["named"].items() if seeds > half[arm]}
        lists = ([f"`{name}`" for name in sorted(names)], sorted(fails - named), others)
        cells = [experiment, len(fails), len(named), *("; ".join(each) for each in lists)]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    said = f"A symptom is named on most seeds in {counts['named']} of {counts['failing']} failing arms."
    silent = f"{counts['others'] - counts['loud']} of the {counts['others']} other arms are silent."
    return f"{said} {silent}\n\n" + "\n".join(lines)


def main() -> None:
    """Print the table, and write its first line."""
    files = sorted((ROOT / "recipes/stress/results").glob("*.json"))
    text = table({file.stem: arms(json.loads(file.read_text())) for file in files})
    begin, end = "<!-- stress -->\n", "\n<!-- /stress -->"
    first, page = text.splitlines()[0], PAGE.read_text()
    PAGE.write_text(re.sub(f"{begin}.*?{end}", lambda _: begin + first + end, page, flags=re.DOTALL))
    print(text)


if __name__ == "__main__":
    main()
