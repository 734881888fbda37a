"""The command `trl-steady report`."""

import argparse
import contextlib
import json
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from trl_steady.report.diagnosis import Finding, Skipped, diagnose
from trl_steady.report.history import History

_LEVELS = {"warning": {"warning", "critical"}, "critical": {"critical"}}
_WAIT = 10.0  # seconds between two looks at a run that is watched


def report(arguments: Sequence[str], refuse: Callable[[str], NoReturn]) -> int:
    """Print the diagnosis of runs, and return the exit status: 1 if `--fail-on` finds its level, else 0.

    Args:
        arguments: The arguments of the command.
        refuse: Called with the message of an invalid command line.
    """
    parser = argparse.ArgumentParser(prog="trl-steady report", description="Say what is wrong with a run.")
    vars(parser)["error"] = refuse
    parser.add_argument("path", nargs="+", help="an output folder, a checkpoint, or a trainer_state.json")
    parser.add_argument("--json", action="store_true", help="print the diagnosis as JSON")
    parser.add_argument("--fail-on", choices=_LEVELS, help="exit with 1 if a symptom of this level or above is found")
    parser.add_argument("--watch", action="store_true", help="print the diagnosis again when a run has logged more")
    asked = parser.parse_args(list(arguments))
    while True:
        runs = _read(asked.path, refuse)
        found = {path: diagnose(run) for path, run in runs.items()}
        if asked.json:
            print(json.dumps({path: _plain(*each) for path, each in found.items()}, indent=1), flush=True)
        else:
            for path, each in found.items():
                print(f"{path}, {runs[path].last_step} steps: {verdict(*each)}", flush=True)
        if not asked.watch:
            levels = {finding.symptom.level for findings, _ in found.values() for finding in findings}
            return int(asked.fail_on is not None and not levels.isdisjoint(_LEVELS[asked.fail_on]))
        shown = last_steps = [run.last_step for run in runs.values()]
        while last_steps == shown:
            time.sleep(_WAIT)
            with contextlib.suppress(OSError, ValueError):  # a checkpoint that is being written or deleted
                last_steps = [History.read(path).last_step for path in asked.path]


def _read(paths: Sequence[str], refuse: Callable[[str], NoReturn]) -> dict[str, History]:
    try:
        return {path: History.read(path) for path in paths}
    except ValueError as error:
        refuse(str(error))


def verdict(findings: Sequence[Finding], skipped: Sequence[Skipped]) -> str:
    """Return what a run shows: a line for each symptom, and which symptoms its log cannot show."""
    lines = [f"symptoms: {len(findings)}", *(f"  {finding}" for finding in findings)]
    if skipped:
        lines.append(f"  not in the log: {', '.join(each.symptom.name for each in skipped)}")
    return "\n".join(lines)


def _plain(findings: Sequence[Finding], skipped: Sequence[Skipped]) -> dict[str, list[dict[str, object]]]:
    of_symptom, of_finding = ("name", "level", "what", "advice", "page"), ("confidence", "since", "evidence")
    return {
        "findings": [
            {name: getattr(finding.symptom, name) for name in of_symptom}
            | {name: getattr(finding, name) for name in of_finding}
            for finding in findings
        ],
        "skipped": [{"name": each.symptom.name, "missing": each.missing} for each in skipped],
    }
