"""Write what `make test-gpu` measures to a JSON file: the device, the versions, and each test with its figures.

The file is written again after each test, so that it is complete up to a test that fails or never ends.
"""

import datetime
import gc
import json
import math
import os
import platform
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import trl_steady

PACKAGES = ("torch", "trl", "transformers", "peft", "bitsandbytes", "accelerate")
Figures = Callable[[str, float, str], None]
"""Record a name, a value and a unit for the running test."""


def environment() -> dict[str, Any]:
    """Return the GPU, and the versions of what runs on it."""
    properties = torch.cuda.get_device_properties(0)
    versions = {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}
    return {
        "device": {
            "name": torch.cuda.get_device_name(0),
            "memory_bytes": properties.total_memory,
            "capability": list(torch.cuda.get_device_capability(0)),
            "cuda": torch.version.cuda,
        },
        "versions": {**versions, "trl_steady": trl_steady.__version__},
    }


class Recorder:
    """A plugin of pytest that records the tests marked `gpu`."""

    def __init__(self, path: Path, environment: Callable[[], dict[str, Any]] = environment) -> None:
        self._path, self._environment = path, environment
        self._tests: dict[str, dict[str, Any]] = {}
        self._figures: dict[str, list[dict[str, Any]]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Measure the memory of a test, which may reset the allocator's own peak."""
        if not _is_recorded(item) or not torch.cuda.is_available():
            return (yield)
        row, reset = self._row(item.nodeid), torch.cuda.reset_peak_memory_stats
        for name in ("last_exc", "last_type", "last_value", "last_traceback"):  # pytest's, of a test that has failed
            vars(sys).pop(name, None)
        gc.collect()  # trainers have cycles
        torch.cuda.empty_cache()
        reset()

        def keep_and_reset(*arguments: Any) -> None:
            row["peak_bytes"] = max(row["peak_bytes"], torch.cuda.max_memory_allocated())
            reset(*arguments)

        try:
            with patch.object(torch.cuda, "reset_peak_memory_stats", keep_and_reset):
                return (yield)
        finally:
            keep_and_reset()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        """Record the outcome of each phase of a test, the worst of all phases last."""
        report: Any = yield
        if _is_recorded(item):
            row = self._row(item.nodeid)
            row["seconds"] += report.duration
            if report.failed:
                row["outcome"], row["reason"] = "failed", str(report.longrepr).strip().splitlines()[-1]
            elif report.skipped and row["outcome"] != "failed":
                reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else str(report.longrepr)
                row["outcome"], row["reason"] = "skipped", reason.removeprefix("Skipped: ")
            if report.when == "teardown":
                self._write()
        return report

    def figures(self, nodeid: str) -> Figures:
        """Return the function that records figures of a test."""

        def record(name: str, value: float, unit: str) -> None:
            figures = self._figures.setdefault(nodeid, [])
            if not math.isfinite(value):
                raise ValueError(f"{name} is {value}, and a figure is a finite number")
            if name in (figure["name"] for figure in figures):
                raise ValueError(f"{name} is recorded twice in {nodeid}")
            figures.append({"name": name, "value": float(value), "unit": unit})

        return record

    def _row(self, nodeid: str) -> dict[str, Any]:
        figures = self._figures.setdefault(nodeid, [])
        row = {"test": nodeid, "outcome": "passed", "seconds": 0.0, "peak_bytes": 0, "figures": figures}
        return self._tests.setdefault(nodeid, row)

    def _write(self) -> None:
        done = list(self._tests.values())
        if all(row["outcome"] == "skipped" for row in done):  # as on a machine without CUDA
            return
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_suffix(".part")
        temporary.write_text(json.dumps({"recorded": now, **self._environment(), "tests": done}, indent=1) + "\n")
        os.replace(temporary, self._path)


def _is_recorded(item: pytest.Item) -> bool:
    return item.get_closest_marker("gpu") is not None
