"""The command `trl-steady report`."""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from trl_steady.report.history import History, counted
from trl_steady.report.symptoms import Finding, diagnose, verdict

_LEVELS = ("warning", "critical")
_WAIT = 10.0  # seconds between two looks at a run that is watched


def report(arguments: Sequence[str], refuse: Callable[[str], NoReturn]) -> int:
    """Print the diagnosis of runs, write a page, and return the exit status: 1 if `--fail-on` finds its level, else 0.

    Args:
        arguments: The arguments of the command.
        refuse: Called with the message of an invalid command line.
    """
    parser = argparse.ArgumentParser(prog="trl-steady report", description="Say what is wrong with a run.")
    vars(parser)["error"] = refuse
    parser.add_argument("path", nargs="*", help="an output folder, a checkpoint, or a trainer_state.json")
    parser.add_argument("--compare", nargs="+", default=(), metavar="PATH", help="runs for one page, such as a-seed0")
    parser.add_argument("--output", type=Path, help="the page; by default report.html or comparison.html")
    parser.add_argument("--json", action="store_true", help="print the diagnosis as JSON, and write no page")
    parser.add_argument("--fail-on", choices=_LEVELS, help="exit with 1 if a symptom of this level or above is found")
    parser.add_argument("--watch", action="store_true", help="do it again when a run has logged more")
    asked = parser.parse_args(list(arguments))
    paths = [*asked.path, *asked.compare]
    if not paths or (asked.path and asked.compare) or (asked.output and len(asked.path) > 1):
        refuse("give a PATH, several without --output, or --compare PATH PATH ...")
    while True:
        try:
            runs = {path: History.read(path) for path in paths}
        except ValueError as error:
            refuse(str(error))
        present: list[Finding] = []
        plain: dict[str, object] = {}
        for path, run in runs.items():
            findings, missing = diagnose(run)
            present += [finding for finding in findings if finding.passed is None]
            plain[path] = _plain(findings, missing)
            if not asked.json:
                print(f"{path}, {counted(run.last_step, 'step')}: {verdict(findings)}", flush=True)
        if asked.json:
            print(json.dumps(plain, indent=1), flush=True)
        else:
            _write(runs, asked.output, together=bool(asked.compare))
        if not asked.watch:
            break
        shown = last_steps = [run.last_step for run in runs.values()]
        while last_steps == shown:
            time.sleep(_WAIT)
            with contextlib.suppress(OSError, ValueError):  # a checkpoint that is being written or deleted
                last_steps = [History.read(path).last_step for path in paths]
    if asked.fail_on is None:
        return 0
    failing = _LEVELS[_LEVELS.index(asked.fail_on) :]
    return int(any(finding.symptom.level in failing for finding in present))


def _write(runs: Mapping[str, History], output: Path | None, *, together: bool) -> None:
    """Write the pages of the runs, or one of all of them, and print where they are."""
    if find_spec("matplotlib") is None:
        print("trl-steady: the page needs matplotlib. pip install 'trl-steady[report]'", file=sys.stderr)
        return
    from trl_steady.report.page import write, write_comparison

    if together:
        file = output or Path("comparison.html")
        write_comparison(file, runs)
        print(file, flush=True)
        return
    for path, run in runs.items():
        folder = Path(path)
        if not folder.is_dir():
            folder = folder.parent
        file = output or folder / "report.html"
        write(file, path, run)
        print(file, flush=True)


def _plain(findings: Sequence[Finding], missing: Mapping[str, str]) -> dict[str, object]:
    """Return a diagnosis for JSON."""
    found: list[dict[str, object]] = []
    for finding in findings:
        found.append(
            {
                "name": finding.symptom.name,
                "level": finding.symptom.level,
                "what": finding.symptom.what,
                "page": finding.symptom.page,
                "since": finding.since,
                "evidence": finding.evidence,
                "advice": finding.advice,
                "cause": finding.cause,
                "passed": finding.passed,
            }
        )
    skipped: list[dict[str, str]] = []
    for name, metric in missing.items():
        skipped.append({"name": name, "missing": metric})
    return {"findings": found, "skipped": skipped}
