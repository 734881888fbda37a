"""The command `trl-steady report`."""

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from trl_steady.report.history import History, counted
from trl_steady.report.reading import STDIN
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
    parser.add_argument("path", nargs="*", help="an output folder, a checkpoint, a file with a log, or - for a pipe")
    parser.add_argument("--join", action="store_true", help="the paths are logs of the processes of one run")
    parser.add_argument("--compare", nargs="+", default=(), metavar="PATH", help="runs for one page, such as a-seed0")
    parser.add_argument("--output", type=Path, help="the page; by default report.html or comparison.html")
    parser.add_argument("--json", action="store_true", help="print the diagnosis as JSON, and write no page")
    parser.add_argument("--fail-on", choices=_LEVELS, help="exit with 1 if a symptom of this level or above is found")
    parser.add_argument("--watch", action="store_true", help="do it again when a run has logged more")
    asked = parser.parse_args(list(arguments))
    paths = [*asked.path, *asked.compare]
    is_ambiguous = asked.output and len(asked.path) > 1 and not asked.join
    if not paths or (asked.path and asked.compare) or is_ambiguous:
        refuse("give a PATH, several without --output or with --join, or --compare PATH PATH ...")
    if STDIN in paths and asked.watch:
        refuse("--watch cannot read a pipe again. Give the file of the log.")
    while True:
        try:
            runs = _read(paths, join=asked.join)
        except ValueError as error:
            refuse(str(error))
        present: list[Finding] = []
        plain: dict[str, object] = {}
        for path, run in runs.items():
            for warning in run.warnings:
                print(f"trl-steady: {warning} The checkpoint before it is read.", file=sys.stderr)
            findings, missing = diagnose(run)
            present += [finding for finding in findings if finding.passed is None]
            plain[path] = {"log": _about(run), **_plain(findings, missing)}
            if not asked.json:
                _say(f"{path}: {_about(run)}: {verdict(findings)}")
        if asked.json:
            _say(json.dumps(plain, indent=1))
        elif find_spec("matplotlib") is None:
            print("trl-steady: the page needs matplotlib. pip install matplotlib", file=sys.stderr)
        else:
            try:
                for page in _write(runs, paths, asked.output, together=bool(asked.compare)):
                    _say(str(page))
            except OSError as error:
                print(f"trl-steady: the page cannot be written ({error}). Set --output.", file=sys.stderr)
        if not asked.watch:
            break
        shown = last_steps = [run.last_step for run in runs.values()]
        while last_steps == shown:
            time.sleep(_WAIT)
            with contextlib.suppress(OSError, ValueError):  # a checkpoint that is being written or deleted
                last_steps = [run.last_step for run in _read(paths, join=asked.join).values()]
    if asked.fail_on is None:
        return 0
    failing = _LEVELS[_LEVELS.index(asked.fail_on) :]
    return int(any(finding.symptom.level in failing for finding in present))


def _read(paths: Sequence[str], *, join: bool) -> dict[str, History]:
    """Return the runs by path, or one run of all paths. Raises ValueError for a log of another kind of training."""
    runs: dict[str, History] = {}
    if join:
        runs[" + ".join(paths)] = History.joined(paths)
        paths = ()
    for path in paths:
        runs[path] = History.read(path)
    for path, run in runs.items():
        if run.other_task:
            raise ValueError(f"{path}: {run.other_task}")
    return runs


def _about(run: History) -> str:
    """Return which log this is, how far the run is, and how it was read: "verl log, 9 steps, 9 logs (from a.log)"."""
    title = run.framework
    if "notes" in run.run:  # of steady.json
        title = "trl-steady"
    steps = counted(run.last_step, "step")
    planned = run.settings.get("max_steps") or 0
    if planned > run.last_step:
        steps = f"{run.last_step} of {counted(planned, 'step')}"
    logs = max((len(run[key].steps) for key in run.keys), default=0)
    about = f"{title} log, {steps}, {counted(logs, 'log')}"
    if run.remarks:
        about += f" ({', '.join(run.remarks)})"
    return about


def _say(text: str) -> None:
    """Print a text, also if nobody reads on, as `head -1` does not."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _write(
    runs: Mapping[str, History], paths: Sequence[str], output: Path | None, *, together: bool
) -> Iterator[Path]:
    """Write one page of all runs, or the page of each beside its log, and yield where each is."""
    from trl_steady.report.page import write, write_comparison

    name = "comparison.html" if together else "report.html"
    if output is not None and output.is_dir():
        output /= name
    if together:
        file = output or Path(name)
        write_comparison(file, runs)
        yield file
        return
    written: list[Path] = []
    for (title, run), path in zip(runs.items(), paths, strict=False):  # a joined run has several paths
        if path == STDIN and output is None:
            continue  # a pipe has no folder
        file = output or _page_of(Path(path), written)
        write(file, title, run)
        written.append(file)
        yield file


def _page_of(log: Path, written: Sequence[Path]) -> Path:
    """Return the page of a log, in its folder, under another name if that of another log stands there."""
    folder = log if log.is_dir() else log.parent
    file = folder / "report.html"
    for name in (log.stem, log.name):
        if file in written:
            file = folder / f"report-{name}.html"
    return file


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
