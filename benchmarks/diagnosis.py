"""Compare what the diagnosis says of runs with what it must say of them.

    python -m benchmarks.diagnosis evaluate [--every 5] [--logs FILE]
    python -m benchmarks.diagnosis real
    python -m benchmarks.diagnosis record [--logs FILE --seed N] [--only TEXT] [--again]

`evaluate` judges the recorded runs of tests/data/runs.toml, whose logs are in FILE, by default
tests/data/runs.jsonl.xz. With `--every N`, it judges the logs that the same runs would have had with logging_steps=N.
`real` judges public logs that others have written: tests/data/real_logs.toml.
`record` trains the runs whose log FILE lacks, each in 1 to 60 seconds. With another seed, runs can be recorded that
nobody had seen when the limits were chosen.
"""

import argparse
import json
import lzma
import math
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from tests.report.runs import recorded

from trl_steady.report import History, diagnose
from trl_steady.report.symptoms import SYMPTOMS

LOGS = ROOT / "tests/data/runs.jsonl.xz"
TABLE = tomllib.loads((ROOT / "tests/data/runs.toml").read_text())
RUNS: Mapping[str, Mapping[str, Any]] = TABLE["healthy"] | TABLE["sick"]
LEVELS = TABLE["levels"] | {symptom.name: symptom.level for symptom in SYMPTOMS}
LEAST = 6
"""Logs that a copy of a run must have to be judged."""
REAL_LOGS = ROOT / "tests/data/real_logs.jsonl.xz"
REAL: Mapping[str, Mapping[str, Any]] = tomllib.loads((ROOT / "tests/data/real_logs.toml").read_text())["logs"]
NOT_JUDGED = ("unjudgeable", "short", "nan")
"""Kinds of real logs of which nobody can tell whether the run was well."""

# Metrics that a log does not average over the steps since the last one. Ours are pooled over the tokens of these
# steps, so that the mean of their means, quantiles and sample sizes comes near.
_LAST = ("step", "epoch", "grad_norm", "learning_rate", "num_tokens")
_LAST_PREFIXES = ("ref/",)
_LEAST_OF_ALL = ("ratio/sequence_min",)
_GREATEST_OF_ALL = ("ratio/sequence_max", "sampling_mask/kept_tokens_max")
_SUMS = ("steps/nonfinite",)


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


def thinned(rows: Sequence[Mapping[str, Any]], every: int) -> list[Mapping[str, Any]]:
    """Return the log that the same run would have had with logging_steps=every."""
    kept: list[Mapping[str, Any]] = []
    since_last: list[Mapping[str, Any]] = []
    for row in rows:
        if "loss" not in row:  # an evaluation, or the summary at the end
            if "train_loss" in row:
                row = {**_rest(since_last), **row}
            kept.append(row)
            continue
        since_last.append(row)
        if row["step"] % every == 0:
            kept.append(_one_log(since_last))
            since_last = []
    return kept


def _rest(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what TRL adds to the summary of the steps since the last log. Transformers' numbers are not logged."""
    return {key: value for key, value in _one_log(rows).items() if key not in ("loss", "grad_norm", "learning_rate")}


def _one_log(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the log of several steps, as transformers, TRL and trl-steady write it."""
    values: dict[str, list[Any]] = {}
    for row in rows:
        for key, value in row.items():
            values.setdefault(key, []).append(value)
    return {key: _logged(key, each) for key, each in values.items()}


def _logged(key: str, values: Sequence[Any]) -> Any:
    if key in _LAST or key.startswith(_LAST_PREFIXES):
        return values[-1]
    numbers = [value for value in values if isinstance(value, (int, float)) and not math.isnan(value)]
    if not numbers:
        return None
    if key in _LEAST_OF_ALL:
        return min(numbers)
    if key in _GREATEST_OF_ALL:
        return max(numbers)
    if key in _SUMS:
        return sum(numbers)
    return sum(numbers) / len(numbers)


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


class Run(NamedTuple):
    """A run of the table."""

    about: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    run: Mapping[str, Any]


def table_runs(file: Path, every: int) -> Iterator[tuple[str, Run]]:
    """Yield name and run of each run of the table that has a log, as it is logged every so many steps.

    Another seed can make another run of the same options. If a run did not become what its line says, what must be
    said is only allowed. A fact that the means of the log show is allowed of each run.
    """
    for name, log in logs(file).items():
        if name not in RUNS:
            continue
        about = RUNS[name]
        if not has_become(about, log["rows"]):
            print(f"{name}: did not become what its line says")
            about = allowed(about, "")
        about = {**about, "may": f"{about.get('may', '')} {' '.join(plain_facts(log['rows']))}"}
        yield from logged_every(every, name, Run(about, log["rows"], log["run"]))
    if file != LOGS:
        return
    kept = recorded(ROOT)
    for name, about in TABLE["recipes"].items():
        yield from logged_every(every, name, Run(about, *kept[name]))


def has_become(about: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> bool:
    """Tell whether a run became what its line says: "lost" is a reward that ends below half of its start.

    The means of a tenth of the logs are compared, and nothing that the diagnosis says.
    """
    if about.get("becomes") != "lost":
        return True
    rewards = [row["reward"] for row in rows if "reward" in row]
    part = max(len(rewards) // 10, 1)
    return sum(rewards[-part:]) < sum(rewards[:part]) / 2


def plain_facts(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return symptoms that are true by the means of the last sixth of the logs, whichever seed it is."""

    def end(key: str) -> float:
        values = [row[key] for row in rows if row.get(key) is not None]
        last = values[-max(len(values) // 6, 1) :]
        return sum(last) / max(len(last), 1)

    facts: list[str] = []
    if end("completions/clipped_ratio") > 0.5:
        facts.append("answers-cut-off")
    if end("frac_reward_zero_std") >= 0.9 and end("reward") >= 0.9:
        facts.append("groups-all-right")
    return facts


def allowed(about: Mapping[str, Any], must: str) -> Mapping[str, Any]:
    """Return the labels of a run in which what had to be said is only allowed, and `must` has to be said."""
    may = f"{about.get('may', '')} {about['must'].replace('|', ' ')}"
    return {**about, "must": must, "may": may}


def logged_every(every: int, name: str, run: Run) -> Iterator[tuple[str, Run]]:
    """Yield the run, or its thinned copy if that is long enough, with what must be said of it then."""
    if every == 1:
        yield name, run
        return
    rows = thinned(run.rows, every)
    count = sum("loss" in row for row in rows)
    if count < LEAST:
        return
    about = run.about
    visible = about.get("seldom", {}).get(str(every))
    if visible is not None and about.get("must"):
        about = allowed(about, visible)
    settings = run.run.get("settings", {})
    if "logging_steps" in settings:
        settings = {**settings, "logging_steps": every}
    yield name, Run(about, rows, {**run.run, "settings": settings})


def evaluate(file: Path = LOGS, every: int = 1) -> dict[str, tuple[float, float]]:
    """Print for each run what must be said, what is said, missed and false. Return level -> precision and recall.

    A symptom that has passed counts as said.
    """
    known = dict(table_runs(file, every))
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


def real_logs() -> dict[str, dict[str, Any]]:
    """Return name -> the contents of a trainer_state.json."""
    lines = lzma.decompress(REAL_LOGS.read_bytes()).decode().splitlines()
    return {found["name"]: found["state"] for found in map(json.loads, lines)}


def judged_log(about: Mapping[str, Any], history: History) -> tuple[Counter[str], list[str]]:
    """Return what `judge_real_logs` counts of one log, and its heads that are not true."""
    found = diagnose(history)[0]
    now = [finding for finding in found if finding.passed is None and finding.symptom.level != "note"]
    named = {finding.symptom.name for finding in now}
    heads = [finding.symptom.name for finding in now if not finding.cause]
    must = {*about["must"].split()}
    true = must | {*about["may"].split()}
    false = [head for head in heads if head not in true]
    counts = Counter({"heads": len(heads), "true heads": len(heads) - len(false)})
    if must:
        counts += Counter({"sick": 1, "cause": bool(named & must), "cause or effect": bool(named & true)})
    elif about["kind"] == "healthy":
        is_alarmed = any(finding.symptom.level == "critical" for finding in found)
        counts += Counter({"well": 1, "well, false": bool(false), "well, critical": is_alarmed})
    return counts, false


def judge_real_logs() -> Counter[str]:
    """Print what is missed and false in the real logs, and return what is counted over them.

    Heads are findings that are neither effects, nor notes, nor passed. A sick log has the "cause" if one of the right
    diagnoses is named. A well log is "critical" if something critical was said at any look.
    """
    total = Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        for name, state in real_logs().items():
            about = REAL[name]
            if about["kind"] in NOT_JUDGED:
                continue
            file = Path(folder) / "trainer_state.json"
            file.write_text(json.dumps(state))
            counts, false = judged_log(about, History.read(file))
            total += counts
            if counts["cause"] < counts["sick"]:
                print(f"{name} [{about['kind']}] MISSED: {about['must']}")
            if false:
                print(f"{name} [{about['kind']}] FALSE: {', '.join(false)}")
    print("; ".join(f"{what} {count}" for what, count in total.items()))
    print(f"precision {total['true heads'] / max(total['heads'], 1):.2f}")
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("evaluate", "real", "record"))
    parser.add_argument("--only", default="", help="part of the name of a run")
    parser.add_argument("--again", action="store_true", help="train runs that have a log too")
    parser.add_argument("--logs", type=Path, default=LOGS, help="file of the logs")
    parser.add_argument("--every", type=int, default=1, help="judge the runs as logged every so many steps")
    parser.add_argument("--seed", type=int, default=0, help="added to the seed of each run that is recorded")
    options = parser.parse_args()
    if options.what == "record":
        record(options.logs, options.only, options.again, options.seed)
    elif options.what == "real":
        judge_real_logs()
    else:
        evaluate(options.logs, options.every)


if __name__ == "__main__":
    main()
