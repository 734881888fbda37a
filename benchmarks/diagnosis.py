"""Compare what the diagnosis says of recorded runs with what it must say: tests/data/runs.toml.

    python -m benchmarks.diagnosis evaluate [--logs FILE]
    python -m benchmarks.diagnosis record [--logs FILE --seed N] [--only TEXT] [--again]

`record` trains the runs whose log FILE lacks, each in 1 to 30 seconds. FILE is tests/data/runs.jsonl.xz by default.
With another seed, runs can be recorded that nobody had seen when the limits were chosen.
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

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from tests.report.runs import recorded

from trl_steady.report import History, diagnose
from trl_steady.report.symptoms import SYMPTOMS

LOGS = ROOT / "tests/data/runs.jsonl.xz"
TABLE = tomllib.loads((ROOT / "tests/data/runs.toml").read_text())
RUNS: Mapping[str, Mapping[str, Any]] = TABLE["healthy"] | TABLE["sick"]
LEVELS = TABLE["levels"] | {symptom.name: symptom.level for symptom in SYMPTOMS}


def logs(file: Path = LOGS) -> dict[str, dict[str, Any]]:
    """Return the recorded logs by the name of their run: "rows", and "run", the contents of steady.json."""
    lines = lzma.decompress(file.read_bytes()).decode().splitlines() if file.is_file() else []
    return {found["name"]: found for found in map(json.loads, lines)}


def record(file: Path, only: str, again: bool, seed: int) -> None:
    """Train the runs that have no log, and save each."""
    from benchmarks.recorded import train

    for name, about in RUNS.items():
        known = logs(file)
        if only not in name or (name in known and not again):
            continue
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            known[name] = {"name": name, **train(about["run"], TABLE["sets"], Path(folder), seed)}
        lines = [json.dumps(known[each], separators=(",", ":")) for each in RUNS if each in known]
        file.write_bytes(lzma.compress("\n".join(lines).encode(), preset=9))
        print(
            f"{time.perf_counter() - start:5.0f} s, all logs {file.stat().st_size / 1000:.0f} kB: {name}", flush=True
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


def evaluate(file: Path = LOGS) -> dict[str, tuple[float, float]]:
    """Print for each run what must be said, what is said, missed and false. Return level -> precision and recall.

    A symptom that has passed counts as said.
    """
    known = {name: (about, log["rows"], log["run"]) for name, log in logs(file).items() if (about := RUNS.get(name))}
    if file == LOGS:
        kept = recorded(ROOT)
        known |= {name: (about, *kept[name]) for name, about in TABLE["recipes"].items()}
    counts, causes = Counter[tuple[str, str]](), Counter[bool]()
    for name, (about, rows, run) in known.items():
        found = [finding.symptom.name for finding in diagnose(History(rows, run))[0]]
        parts = judged(about, found)
        for kind, those in parts.items():
            counts.update((kind, level) for each in those for level in ("all", LEVELS[each.split("|")[0]]))
        if must := names(about, "must"):
            causes[bool(found) and found[0] in must[0].split("|")] += 1
        shown = {"must": must, "found": found, "MISSED": parts["missed"], "FALSE": parts["false"]}
        print(f"{name}: " + "; ".join(f"{key} {', '.join(those)}" for key, those in shown.items() if those))
    print(f"\n{len(known)} runs; {causes.total()} of them must show something")
    rates: dict[str, tuple[float, float]] = {}
    for level in ("all", "critical"):
        said, missed, false = (counts[kind, level] for kind in ("said", "missed", "false"))
        rates[level] = said / max(said + false, 1), said / max(said + missed, 1)
        print(
            "{}: {} said, {} missed, {} false; precision {:.2f}, recall {:.2f}".format(
                level, said, missed, false, *rates[level]
            )
        )
    print(f"what comes first is the cause in {causes[True]} of {causes.total()} runs")
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("evaluate", "record"))
    parser.add_argument("--only", default="", help="part of the name of a run")
    parser.add_argument("--again", action="store_true", help="train runs that have a log too")
    parser.add_argument("--logs", type=Path, default=LOGS, help="file of the logs")
    parser.add_argument("--seed", type=int, default=0, help="added to the seed of each run that is recorded")
    options = parser.parse_args()
    if options.what == "record":
        record(options.logs, options.only, options.again, options.seed)
    else:
        evaluate(options.logs)


if __name__ == "__main__":
    main()
