"""Run tests/gpu, and write the outcomes after each test: `python -m benchmarks.gpu.tests --json PATH [--small]`."""

import argparse
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.gpu import block

FOLDER = "tests/gpu"
_STICKY = ("CUDA error", "device-side assert")
_SHOWN = 120  # characters of the first reason
# the most telling first, should the time not do for all; what takes longest last
ORDER = (
    *("sampling", "trainers", "attention", "losses", "replay", "padding", "reward_model", "reference", "ratio"),
    *("memory", "speed", "ppo"),
)


class Outcomes:
    """A plugin of pytest that keeps the outcome of each test in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.collected = 0
        self.outcomes: dict[str, str] = {}
        self.reasons: dict[str, str] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Count the tests that should run."""
        self._session = session
        self.collected = len(session.items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the worst outcome of a test's phases."""
        if report.when == "call" or not report.passed:
            self.outcomes[report.nodeid] = report.outcome
        if report.failed:
            reason = _reason(report)
            self.reasons[report.nodeid] = reason
            if any(words in reason for words in _STICKY):  # every later test would fail with it
                self._session.shouldstop = "the device is lost"
        self._write()

    def _write(self) -> None:
        counts = Counter(self.outcomes.values())
        note = ", ".join(f"{counts[each]} {each}" for each in ("passed", "failed", "skipped"))
        note = f"{note}, of {self.collected}"
        failed = [_short(test) for test, outcome in self.outcomes.items() if outcome == "failed"]
        if failed:
            first = " ".join(next(iter(self.reasons.values())).split())
            note = f"{note}; the first: {first[:_SHOWN]}; failed: {' '.join(failed)}"
        found = {"note": note, "figures": [], "outcomes": self.outcomes, "reasons": self.reasons}
        block.save(self._path, found)


def _reason(report: pytest.TestReport) -> str:
    """Return the message of the error, or the last line of what pytest shows."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return str(crash.message)
    return str(report.longrepr).strip().splitlines()[-1]


def _short(test: str) -> str:
    return test.removeprefix(f"{FOLDER}/test_").replace("-cuda]", "]").replace("[cuda]", "")


def main() -> int:
    """Run the tests for CUDA, or a file of those for the CPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--small", action="store_true", help="one file of tests on the CPU")
    options = parser.parse_args()
    names, marks = ORDER, "gpu"
    if options.small:
        names, marks = ("sampling",), "not gpu and not slow"
    files = [f"{FOLDER}/test_{name}.py" for name in names]
    kept = ["-o", "tmp_path_retention_policy=failed"]  # models of several GB
    command = ["-q", "-p", "no:cacheprovider", *kept, "-m", marks, *files]
    return pytest.main(command, plugins=[Outcomes(options.json)])


if __name__ == "__main__":
    sys.exit(main())
