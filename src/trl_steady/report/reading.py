"""The logs of a path: an output folder, a checkpoint, or a file of any kind that has rows of metrics."""

import csv
import io
import json
import math
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import IO, Any, NamedTuple

from trl_steady.report.exports import csv_columns, csv_records, csv_runs, json_records, row_records
from trl_steady.report.forms import records
from trl_steady.report.frameworks import STEPS, TRL, Framework
from trl_steady.report.log import Log, read_records
from trl_steady.report.record import Record

RUN_FILE = "steady.json"
"""File of a checkpoint with the settings of the run and its warnings."""
STDIN = "-"
_STATE = "trainer_state.json"
_LOGS = ("*.log", "*.txt", "*.out", "*.jsonl")
_LARGEST = 500_000_000  # bytes of a log that nobody has named
_OF_RUN = {"settings": dict, "notes": list, "formats": dict, "versions": dict, "answers": list}  # of steady.json
_FORMATS = "trl-steady: engine"  # the beginning of the line that `EngineCheck` prints
_LIVE = 600.0  # seconds since a file was written, within which its run may go on; longer if it is written less often
_LATEST = 3600.0  # seconds by which a checkpoint of a live run may be late


class Reading(NamedTuple):
    """The rows of a run, and how they were read."""

    rows: Sequence[Mapping[str, Any]]
    run: Mapping[str, Any]
    is_over: bool = True
    """False if the run may go on."""
    framework: Framework = TRL
    flags: Mapping[str, frozenset[str]] = {}
    remarks: Sequence[str] = ()
    """How it was read, for the line of the run."""
    warnings: Sequence[str] = ()
    """Files that could not be read."""
    has_ended: bool = False
    """True if the log says that the run has ended."""
    written_every: float = 1.0
    """Steps from one writing of the file to the next."""


def read(path: str | Path) -> Reading:
    """Read an output folder, a checkpoint, a file with a log, or standard input for "-".

    Raises:
        ValueError: There is no log. The message has one line, with the file and what it has.
    """
    if str(path) == STDIN:
        return _read_stream(sys.stdin.buffer)
    path = Path(path)
    try:
        if path.is_dir():
            return _read_folder(path)
        if not path.exists():
            raise ValueError(f"there is no file or folder {path}.")
        return _read_file(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror or error}).") from None


# Folders.


def _read_folder(folder: Path) -> Reading:
    warnings: list[str] = []
    for file in _states(folder):
        try:
            found = _read_file(file)
            written = file.stat().st_mtime
        except FileNotFoundError:  # the run has deleted an old checkpoint
            continue
        except ValueError as error:
            warnings.append(str(error))
            continue
        logs = _logs(folder, written_after=written)
        return _with_later_rows(found._replace(warnings=warnings), logs)
    logs = _logs(folder)
    if len(logs) == 1:
        [(file, found)] = logs.items()
        return found._replace(remarks=[f"read from {file.name}", *found.remarks])
    if logs:
        names = ", ".join(sorted(file.name for file in logs))
        raise ValueError(f"{folder} has several logs: {names}. Give one of them, or those of one run with --join.")
    if warnings:
        raise ValueError(f"{folder} has no checkpoint that can be read: {warnings[0]}")
    raise ValueError(
        f"{folder} has no {_STATE}, no checkpoint with one, and no log. "
        "Give an output folder, a checkpoint, or the file of a log."
    )


def _states(folder: Path) -> list[Path]:
    """Return the states of an output folder and of its checkpoints, newest first."""
    steps: dict[Path, int] = {}
    for file in (folder / _STATE, *folder.glob(f"checkpoint-*/{_STATE}")):
        if not file.is_file():
            continue
        _, _, number = file.parent.name.rpartition("-")
        steps[file] = int(number) if number.isdigit() else 0
        try:
            steps[file] = int(json.loads(file.read_text()).get("global_step", 0))
        except (OSError, ValueError, TypeError, AttributeError, OverflowError):
            continue  # it is named when it is read
    return sorted(steps, key=lambda file: steps[file], reverse=True)


def _logs(folder: Path, written_after: float = 0.0) -> dict[Path, Reading]:
    """Return the files of a folder that have rows of a log, and were written after this time."""
    found: dict[Path, Reading] = {}
    for pattern in _LOGS:
        for file in sorted(folder.glob(pattern)):
            about = file.stat()
            if about.st_mtime < written_after or about.st_size > _LARGEST:  # such as a data set
                continue
            try:
                found[file] = _read_file(file)
            except (OSError, ValueError):
                continue
    return found


def _with_later_rows(found: Reading, logs: Mapping[Path, Reading]) -> Reading:
    """Add the rows of a log behind those of a checkpoint, if it is a log of the same run."""
    last = max(map(_step, found.rows), default=-1)
    if last < 0:
        return found
    for file, log in logs.items():
        later = [row for row in log.rows if _step(row) > last]
        if later and _agree(found.rows, log.rows):
            remark = f"the steps after {last} are from {file.name}"
            remarks = [*found.remarks, remark, *log.remarks]
            return found._replace(rows=[*found.rows, *later], remarks=remarks, is_over=log.is_over)
    return found


def _agree(rows: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> bool:
    """Tell whether the rewards of two logs are the same where both have one, as far as they are printed."""
    rewards = {_step(row): row["reward"] for row in rows if isinstance(row.get("reward"), (int, float))}
    common = [row for row in others if _step(row) in rewards and isinstance(row.get("reward"), (int, float))]
    if not common:
        return False
    same = 0
    for row in common:
        difference = abs(row["reward"] - rewards[_step(row)])
        same += difference <= 0.01 + 0.01 * abs(row["reward"])  # a live line has two digits
    return same >= 0.9 * len(common)


# Files.


def _read_file(file: Path) -> Reading:
    with file.open("rb") as stream:
        found = _read_bytes(stream, str(file), file)
    if found.has_ended:
        return found
    planned = found.run.get("settings", {}).get("max_steps", 0)
    is_new = time.time() - file.stat().st_mtime < _longest_pause(found)
    is_moved = file.name == _STATE and not file.parent.name.startswith("checkpoint-")  # out of its checkpoint
    if is_new and not is_moved and found.rows and planned > _step(found.rows[-1]):
        remark = "the file is new, so the run may go on"
        return found._replace(is_over=False, remarks=[*found.remarks, remark])
    return found


def _longest_pause(found: Reading) -> float:
    """Return the seconds for which a run that goes on may write nothing, such as until its next checkpoint."""
    times = [row.get("step_time") for row in found.rows]
    seconds = [each for each in times if isinstance(each, (int, float)) and math.isfinite(each)]
    if not seconds:
        return _LIVE
    usual = found.written_every * median(seconds)
    late = min(usual, _LATEST)  # an evaluation, or longer answers, take their time
    return max(_LIVE, usual + late)


def _read_stream(stream: IO[bytes]) -> Reading:
    return _read_bytes(stream, "standard input", None)


def _read_bytes(stream: IO[bytes], name: str, file: Path | None) -> Reading:
    """Read a file or a pipe. Its form is decided by its content."""
    buffered = io.BufferedReader(stream, 1 << 20)  # pyright: ignore[reportArgumentType]
    head = buffered.peek(1 << 16)
    if not head.strip():
        raise ValueError(f"{name} is empty.")
    encoding = "utf-8-sig"
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):  # PowerShell
        encoding = "utf-16"
    elif b"\0" in head[:4096]:
        raise ValueError(f"{name} is no text. Give a {_STATE}, a log as text, JSON lines, or a CSV file.")
    text = io.TextIOWrapper(buffered, encoding, errors="replace")
    start = head.decode(encoding, "replace").lstrip()
    if start[:1] in "{[":
        return _read_json(text, name, file)
    columns = csv_columns(start.splitlines()[0])
    if columns:
        return _read_csv(text, name, csv_runs(columns))
    return _read_lines(text, name)  # a carriage return, as bars have it, ends a line too


def _read_lines(lines: Iterable[str], name: str) -> Reading:
    """Read the output of a run, also the number formats that `EngineCheck` prints."""
    formats: dict[str, str | None] = {}
    found = _read_rows(records(_noting_formats(lines, formats)), name)
    if not formats:
        return found
    return found._replace(run={**found.run, "formats": formats})


def _noting_formats(lines: Iterable[str], formats: dict[str, str | None]) -> Iterator[str]:
    """Yield the lines. Put number formats that they name into `formats`."""
    for line in lines:
        if _FORMATS in line:
            match = re.search(rf"{_FORMATS} (\w+), trainer (\w+) \((.+)\)", line)
            if match is not None:
                engine = None if match[1] == "unknown" else match[1]
                formats.update(engine=engine, trainer=match[2], about=match[3])
        yield line


def _read_csv(text: IO[str], name: str, runs: Sequence[str]) -> Reading:
    try:
        found = _read_rows(csv_records(text), name)
    except csv.Error as error:
        raise ValueError(f"{name} is no log of a run: its CSV is damaged ({error}).") from None
    if len(runs) < 2:
        return found
    return found._replace(remarks=[f"the first of its {len(runs)} runs is read: {runs[0]}", *found.remarks])


def _read_json(text: IO[str], name: str, file: Path | None) -> Reading:
    """Read JSON, JSON lines, or a console log that begins with a bracket."""
    content = text.read()
    try:
        data = json.loads(content, parse_int=_integer)
    except ValueError as error:
        lines = content.splitlines()
        is_record = [_is_json(line) for line in lines if line.strip()]
        are_records = is_record[:1] == [True] and sum(is_record) > len(is_record) / 2  # others are cut off or damaged
        if are_records and '"log_history"' not in lines[0]:  # the last of ms-swift's lines has one
            return _read_rows(row_records(map(_parsed, lines)), name)
        if '"log_history"' in content[-200_000:] or '"log_history"' in content[:200_000]:
            raise ValueError(f"{name} is no log of a run: it is cut off or damaged ({error}).") from None
        return _read_lines(lines, name)
    except RecursionError:
        raise ValueError(f"{name} is no log of a run: its JSON is nested too deeply.") from None
    if isinstance(data, Mapping):
        for key in ("log_history", "history"):
            if key in data and (key == "log_history" or _has_steps(data[key])):
                return _read_state(data, key, name, file)
    found = json_records(data)
    if found is None and isinstance(data, Mapping) and not STEPS.isdisjoint(data):  # one line of JSON lines
        found = list(row_records([data]))
    if found is None:
        raise ValueError(f"{name} is no log of a run: it has no rows under 'log_history'.")
    return _read_rows(found, name)


def _integer(text: str) -> float:
    """Return an integer, or infinity if no float can hold it."""
    return int(text) if len(text) < 300 else float(text)


def _is_json(line: str) -> bool:
    return isinstance(_parsed(line), Mapping)


def _parsed(line: str) -> object:
    try:
        return json.loads(line, parse_int=_integer)
    except (ValueError, RecursionError):
        return None


def _has_steps(rows: object) -> bool:
    if not isinstance(rows, Sequence) or not rows:
        return False
    return isinstance(rows[0], Mapping) and "step" in rows[0]


def _read_state(state: Mapping[str, Any], key: str, name: str, file: Path | None) -> Reading:
    """Read a trainer_state.json, or a file of recipes, which has the rows under "history"."""
    rows = state[key]
    if not isinstance(rows, Sequence) or isinstance(rows, str):
        raise ValueError(f"{name} is no log of a run: '{key}' is {json.dumps(rows)[:40]}, not a list of rows.")
    kept = [row for row in rows if isinstance(row, Mapping)]
    if rows and not kept:
        raise ValueError(f"{name} is no log of a run: the rows of '{key}' are {type(rows[0]).__name__}, not objects.")
    run = _run(file)
    max_steps = state.get("max_steps")
    if isinstance(max_steps, int) and max_steps > 0:  # the config of a run of epochs has -1
        run["settings"] = {**run.get("settings", {}), "max_steps": max_steps}
    step = state.get("global_step")
    has_ended = isinstance(step, int) and isinstance(max_steps, int) and 0 < max_steps <= step
    save_steps = state.get("save_steps")
    written_every = 1
    if isinstance(step, int) and isinstance(save_steps, int):
        written_every = min(step, save_steps)  # save_steps has its default, 500, in a run that saves each epoch
    return Reading(kept, run, has_ended=has_ended, written_every=written_every)


def _run(file: Path | None) -> dict[str, Any]:
    """Return the contents of steady.json beside a file; empty if there is none, or if it is damaged."""
    if file is None:
        return {}
    run_file = file.parent / RUN_FILE
    if not run_file.is_file():
        return {}
    try:
        run = json.loads(run_file.read_text())
    except ValueError:
        return {}
    kept: dict[str, Any] = {}
    for name, kind in _OF_RUN.items():
        if isinstance(run, dict) and isinstance(run.get(name), kind):
            kept[name] = run[name]
    return kept


def _read_rows(found: Iterable[Record], name: str) -> Reading:
    log = read_records(found)
    if not log.rows:
        raise ValueError(f"{name} is no log of a run of GRPO, RLOO or PPO: it has {log.seen}.")
    return _reading(log)


def _reading(log: Log) -> Reading:
    run: dict[str, Any] = {}
    if log.max_steps:
        run["settings"] = {"max_steps": log.max_steps}
    return Reading(
        log.rows,
        run,
        framework=log.framework,
        flags=log.flags,
        remarks=log.remarks,
        has_ended=log.has_ended,
        written_every=_usual_gap(log.rows),
    )


def _usual_gap(rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the steps from one row to the next."""
    gaps = [_step(after) - _step(before) for before, after in pairwise(rows)]
    return median([gap for gap in gaps if 0 < gap < math.inf] or [1.0])


def _step(row: Mapping[str, Any]) -> float:
    """Return the step of a row; -1 if it has none."""
    step = row.get("step")
    return step if isinstance(step, (int, float)) else -1


def joined(readings: Mapping[str, Reading]) -> Reading:
    """Return one run from the logs of its processes, whose rows are joined by their steps.

    Raises:
        ValueError: Two of them have a reward, so that they are two runs.
    """
    merged: dict[float, dict[str, Any]] = {}
    rewards: list[str] = []
    for path, found in readings.items():
        if any("reward" in row for row in found.rows):
            rewards.append(path)
        for row in found.rows:
            if _step(row) < 0:
                continue
            target = merged.setdefault(row["step"], {"step": row["step"]})
            for key, value in row.items():
                target.setdefault(key, value)
    if len(rewards) > 1:
        raise ValueError(f"{' and '.join(rewards)} both have a reward: they are two runs. Leave --join out.")
    first = next(iter(readings.values()))
    flags: dict[str, frozenset[str]] = {}
    run: dict[str, Any] = {}
    remarks: list[str] = []
    for found in readings.values():
        flags |= found.flags
        run |= found.run
        remarks += found.remarks
    rows = [merged[step] for step in sorted(merged)]
    return first._replace(rows=rows, run=run, flags=flags, remarks=remarks)
