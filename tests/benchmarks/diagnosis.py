"""Compare what the diagnosis says of recorded runs with what it must say: tests/data/runs.toml.

    python -m tests.benchmarks.diagnosis evaluate [--running]
    python -m tests.benchmarks.diagnosis record [--only TEXT] [--again]

`record` trains the runs whose log tests/data/runs.jsonl.xz lacks, each in 1 to 30 seconds.
"""

import argparse
import json
import lzma
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT)]
from tests.report.runs import recorded

from trl_steady.report import History, diagnose
from trl_steady.report.symptoms import SYMPTOMS

LOGS = ROOT / "tests/data/runs.jsonl.xz"
TABLE = tomllib.loads((ROOT / "tests/data/runs.toml").read_text())
RUNS: Mapping[str, Mapping[str, Any]] = TABLE["healthy"] | TABLE["sick"]
LEVELS = TABLE["levels"] | {symptom.name: symptom.level for symptom in SYMPTOMS}


def logs() -> dict[str, dict[str, Any]]:
    """Return the recorded logs by the name of their run: "rows", and "run", the contents of steady.json."""
    lines = lzma.decompress(LOGS.read_bytes()).decode().splitlines() if LOGS.is_file() else []
    return {found["name"]: found for found in map(json.loads, lines)}


def record(only: str, again: bool) -> None:
    """Train the runs that have no log, and save each."""
    from tests.benchmarks.recorded import train

    for name, about in RUNS.items():
        known = logs()
        if only not in name or (name in known and not again):
            continue
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            known[name] = {"name": name, **train(about["run"], TABLE["sets"], Path(folder))}
        lines = [json.dumps(known[each], separators=(",", ":")) for each in RUNS if each in known]
        LOGS.write_bytes(lzma.compress("\n".join(lines).encode(), preset=9))
        print(
            f"{time.perf_counter() - start:5.0f} s, all logs {LOGS.stat().st_size / 1000:.0f} kB: {name}", flush=True
        )


def names(about: Mapping[str, Any], key: str) -> list[str]:
    return [word for each in about.get(key, "").split() for word in TABLE["words"].get(each, each).split()]


def judged(about: Mapping[str, Any], found: list[str]) -> dict[str, list[str]]:
    """Return what must be said and is, what is missed, and what is false."""
    must = names(about, "must")
    said = [each for each in must if {*each.split("|")} & {*found}]
    allowed = {*names(about, "may"), *(name for each in must for name in each.split("|"))}
    return {
        "said": said,
        "missed": [each for each in must if each not in said],
        "false": [name for name in found if name not in allowed],
    }


def said_of(rows: list[dict[str, Any]], run: dict[str, Any], is_running: bool) -> list[str]:
    """Return the names that a run shows at its end, or that it has printed while it ran."""
    lengths = [len(rows)]
    while is_running and lengths[-1] > 1:  # as features/training_report.py does
        lengths.append(lengths[-1] - 1 - lengths[-1] // 20)
    found = (finding for length in reversed(lengths) for finding in diagnose(History(rows[:length], run))[0])
    return list(dict.fromkeys(finding.symptom.name for finding in found))


def evaluate(is_running: bool) -> None:
    """Print for each run what must be said, what is said, missed and false; then precision and recall."""
    known, kept = logs(), recorded(ROOT)
    given = {name: (about, known[name]["rows"], known[name]["run"]) for name, about in RUNS.items() if name in known}
    given |= {name: (about, *kept[name]) for name, about in TABLE["recipes"].items()}
    counts, causes = Counter[tuple[str, str]](), Counter[bool]()
    for name, (about, rows, run) in given.items():
        found = said_of(rows, run, is_running)
        parts = judged(about, found)
        for kind, those in parts.items():
            counts.update((kind, level) for each in those for level in ("all", LEVELS[each.split("|")[0]]))
        if must := names(about, "must"):
            causes[bool(found) and found[0] in must[0].split("|")] += 1
        shown = {"must": must, "found": found, "MISSED": parts["missed"], "FALSE": parts["false"]}
        print(f"{name}: " + "; ".join(f"{key} {', '.join(those)}" for key, those in shown.items() if those))
    print(f"\n{len(given)} runs; {causes.total()} of them must show something")
    for level in ("all", "critical"):
        said, missed, false = (counts[kind, level] for kind in ("said", "missed", "false"))
        rates = f"precision {said / max(said + false, 1):.2f}, recall {said / max(said + missed, 1):.2f}"
        print(f"{level}: {said} said, {missed} missed, {false} false; {rates}")
    print(f"what comes first is the cause in {causes[True]} of {causes.total()} runs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("evaluate", "record"))
    parser.add_argument("--only", default="", help="part of the name of a run")
    parser.add_argument("--again", action="store_true", help="train runs that have a log too")
    parser.add_argument("--running", action="store_true", help="what a run prints while it runs, too")
    options = parser.parse_args()
    record(options.only, options.again) if options.what == "record" else evaluate(options.running)


if __name__ == "__main__":
    main()
