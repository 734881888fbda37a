"""Run the parts of `make gpu` one after another. This file needs Python alone."""

import contextlib
import datetime
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import block
from benchmarks.gpu.block import Figure, Part, Results
from benchmarks.gpu.parts import PARTS, Work

ROOT = Path(__file__).resolve().parents[2]
OUTPUTS = ROOT / "outputs"
MINUTES = 15
PATIENCE = 6  # times as long for a rehearsal, whose machine may be slow or busy
_LONGEST_NOTE = 300  # a terminal that breaks lines would break the block
_MEMORY = 15 * 2**30  # bytes; a card of 16 GB shows a little less
LEAST = 10  # seconds; no part starts with fewer
_ENDED_BY = "ended by"
NO_DEVICE = 3  # exit status
FAILED = 1


class Run:
    """One run of all parts."""

    def __init__(self, *, rehearse: bool) -> None:
        self.rehearse = rehearse
        self.patience = PATIENCE if rehearse else 1
        self.end = time.monotonic() + 60 * MINUTES * self.patience
        self.folder = OUTPUTS / "gpu"
        self.parts: dict[str, Part] = {}
        self.found: dict[str, Any] = {}
        """The figures that the parts wrote, by the names of the parts."""
        self.heads: dict[str, str] = {}
        self.machine: dict[str, Any] = {}
        self.environment = _environment(rehearse=rehearse)

    def all_parts(self) -> int:
        """Look at the machine, run the parts and print the block."""
        self.folder.mkdir(parents=True, exist_ok=True)
        problem = self._look_at_machine()
        if problem:
            print(f"make gpu: {problem}", file=sys.stderr)
            return NO_DEVICE
        self._announce()
        status = 0
        try:
            if not self.rehearse:  # once for all parts, whose limits have no time for it
                unpack = ["-c", "from benchmarks import measuring; measuring.unpacked()"]
                run_python(unpack, self.environment, self.folder / "unpack.log", limit=120)
            for work in PARTS:
                part = self._ended(work)
                self._keep(part)
                print(f"  {part.outcome}, {part.seconds} s  {part.note}".rstrip(), flush=True)
        except KeyboardInterrupt:
            print("stopped; the block has what was found so far")
            status = 130
        text = block.written(self._results())
        self._write()
        print(f"\n{text}\n", flush=True)
        (OUTPUTS / "gpu-block.txt").write_text(f"{text}\n")
        print("Please paste the block into an issue with the form 'GPU results', also if parts failed.")
        print("It stands in outputs/gpu-block.txt too.")
        print("Attach outputs/gpu-results.json, and of parts that failed the logs in outputs/gpu.")
        failures = [part.name for part in self.parts.values() if part.outcome in ("failed", "timed out")]
        return status or (FAILED if failures else 0)

    def _look_at_machine(self) -> str:
        """Fill in the heads. Return what is wrong, if that is not possible."""
        path, log = self.folder / "machine.json", self.folder / "machine.log"
        path.unlink(missing_ok=True)
        run_python(["-m", "benchmarks.gpu.machine", "--json", str(path)], self.environment, log, limit=120)
        if not path.exists():
            return f"the machine cannot be described: {_last_line(log)}"
        self.machine = json.loads(path.read_text())
        device = self.machine["device"]
        if not self.rehearse and not device["cuda"]:
            torch = self.machine["versions"]["torch"]
            if device["built_for"]:
                return f"torch {torch} finds no device, and outputs/gpu/machine.log may say why."
            return f"torch {torch} is a CPU build. `make clean` removes it, and `make gpu` then installs another one."
        now = datetime.datetime.now(datetime.UTC)
        if self.rehearse:
            described = f"{block.REHEARSAL}, {device['name']}"
        else:
            size, free = (device[name] / 2**30 for name in ("memory_bytes", "free_bytes"))
            described = (
                f"{device['name']}, {size:.1f} GiB ({free:.1f} free), compute capability "
                f"{device['capability'][0]}.{device['capability'][1]}, CUDA {device['cuda']}"
            )
        versions = [f"{name} {found}" for name, found in self.machine["versions"].items() if found]
        self.heads = {
            "recorded": now.strftime("%Y-%m-%d %H:%M UTC"),
            "device": described,
            "versions": ", ".join(versions),
            "source": _source(),
        }
        return ""

    def _announce(self) -> None:
        """Print what follows."""
        print(f"{self.heads['device']}\n{self.heads['versions']}")
        print(f"Nothing is downloaded and nothing is sent. At most {MINUTES * self.patience} minutes:")
        if not self.rehearse and self.machine["device"]["memory_bytes"] < _MEMORY:
            print("This GPU has less than 16 GB, so some tests may run out of memory.")
        for work in PARTS:
            print(f"  {work.name}, about {work.limit * self.patience} s at most: {work.what}")
        print(flush=True)

    def _ended(self, work: Work) -> Part:
        """Run a part, unless something is missing."""
        print(work.name, flush=True)
        reason = self._reason_to_skip(work)
        if reason:
            return Part(work.name, "skipped", note=reason)
        left = int(self.end - time.monotonic())
        if left < LEAST:
            return Part(work.name, "not started", note="the time is over")
        limit = min(self._limit(work, left), left)
        name = work.name.replace(" ", "-")
        path, log = self.folder / f"{name}.json", self.folder / f"{name}.log"
        path.unlink(missing_ok=True)
        command = [*work.command, "--json", str(path)]
        if self.rehearse:
            command += work.small
        started = time.monotonic()
        outcome = run_python(command, self.environment, log, limit)
        seconds = round(time.monotonic() - started)
        found = _read(path)
        if found:
            self.found[work.name] = found
        note = found.get("note", "")
        last = _last_line(log)
        if outcome == "failed" and not note:
            note = last
        elif outcome == "failed" and last.startswith(_ENDED_BY):
            note = f"{last}; {note}"
        figures: list[Figure] = []
        for each in found.get("figures", []):
            figure = Figure(**each)
            if math.isfinite(figure.value):
                figures.append(figure)
            else:
                note = f"{figure.name} is {figure.value}; {note}"
        found["figures"] = [figure._asdict() for figure in figures]  # NaN is no JSON
        return Part(work.name, outcome, seconds, note[:_LONGEST_NOTE], tuple(figures))

    def _limit(self, work: Work, left: float) -> float:
        """Return the seconds of a part: its own, and up to twice as many if later parts leave them."""
        own = work.limit * self.patience
        later = PARTS[PARTS.index(work) + 1 :]
        needed = sum(other.limit for other in later if not self._reason_to_skip(other)) * self.patience
        return min(max(own, left - needed), 2 * own)

    def _reason_to_skip(self, work: Work) -> str:
        """Return why a part cannot run here."""
        if work.needs and importlib.util.find_spec(work.needs) is None:
            return f"{work.needs} is not installed; make gpu does not bring it"
        if work.needs_bf16 and not self.rehearse and tuple(self.machine["device"]["capability"]) < (8, 0):
            return "bf16 needs compute capability 8.0"
        return ""

    def _keep(self, part: Part) -> None:
        """Write what is known, so that a machine that goes away loses one part at most."""
        self.parts[part.name] = part
        self._write()

    def _results(self) -> Results:
        """Return the results of all parts, also of those that have not run."""
        parts = [self.parts.get(work.name, Part(work.name, "not started")) for work in PARTS]
        return Results(self.heads, parts)

    def _write(self) -> None:
        results = self._results()
        parts = [{**part._asdict(), "figures": [each._asdict() for each in part.figures]} for part in results.parts]
        kept = {"heads": self.heads, "parts": parts, "details": self.found, "block": block.written(results)}
        try:
            block.save(OUTPUTS / "gpu-results.json", kept)
        except OSError as error:  # a full disk must not cost the block
            print(f"outputs/gpu-results.json cannot be written: {error}", file=sys.stderr)


def _environment(*, rehearse: bool) -> dict[str, str]:
    """Return the environment of the parts: one GPU, or none."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    settings = {
        "CUDA_VISIBLE_DEVICES": "" if rehearse else first,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])),
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "ignore::FutureWarning",
        "HF_HUB_OFFLINE": "1",
        "TRITON_CACHE_DIR": str(OUTPUTS / "gpu/triton"),
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0",  # images of NVIDIA set it, and tests compare float32
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    return {**os.environ, **settings}


def run_python(command: Sequence[str], environment: Mapping[str, str], log: Path, limit: float) -> str:
    """Run Python with a log and a time limit. Return the outcome."""
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # so that its own children end with it
        )
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            return "timed out"
        finally:
            _end(process)
    if status < 0:
        with log.open("a") as output:
            output.write(f"\n{_ENDED_BY} {signal.Signals(-status).name}\n")
    return "failed" if status else "passed"


def _read(path: Path) -> dict[str, Any]:
    """Return what a part has written; empty if that is nothing, or cut off."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_line(log: Path) -> str:
    """Return the last line of a log that says something, without paths of this machine."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    lines = [line for line in lines if line]
    if not lines:
        return "the process ended without a word"
    return lines[-1].replace(str(ROOT), ".").replace(str(Path.home()), "~")[:300]


def _source() -> str:
    """Return the commit, and whether files differ from it."""
    git = ["git", "-C", str(ROOT)]
    try:
        commit = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "no git repository"
    if changed.stdout.strip():
        return f"commit {commit.stdout.strip()}, changed"
    return f"commit {commit.stdout.strip()}"
