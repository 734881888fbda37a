"""docs/performance.md shows the figures that `make test-gpu` has recorded."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.gpu.recorder import Recorder
from tests.tools.script import figure

FIGURES = [{"name": "ratio", "value": 1.5, "unit": ""}, {"name": "peak", "value": 3.0, "unit": "MiB"}]
TESTS = [
    {"test": "tests/gpu/test_made_up.py::test_passes[cuda]", "outcome": "passed", "figures": FIGURES},
    {"test": "tests/gpu/test_made_up.py::test_fails", "outcome": "failed", "reason": "early", "figures": []},
    {"test": "tests/gpu/test_made_up.py::test_skips", "outcome": "skipped", "reason": "no a | b", "figures": []},
]
RESULTS = {
    "recorded": "today",
    "device": {"name": "made up", "memory_bytes": 16 * 2**30, "capability": [8, 0], "cuda": "13.0"},
    "versions": {"torch": "2.13.0", "bitsandbytes": None},
    "tests": [{**test, "seconds": 1.0, "peak_bytes": 0} for test in TESTS],
}


@pytest.fixture
def script() -> Iterator[Any]:
    with figure("gpu", draws=False) as module:
        yield module


def test_the_table_shows_the_figures(script: Any, tmp_path: Path) -> None:
    output, page, recorded = (tmp_path / name for name in ("outputs.json", "page.md", "gpu.json"))
    output.write_text(json.dumps(RESULTS))
    page.write_text(f"before\n\n{script.START}\nold\n{script.END}\n\nafter\n")
    script.main([], page=page, recorded=recorded)
    assert page.read_text() == f"before\n\n{script.START}\n{script.NOT_YET}\n{script.END}\n\nafter\n"
    script.main([str(output)], page=page, recorded=recorded)
    assert recorded.read_bytes() == output.read_bytes()
    text = page.read_text()
    assert text.startswith("before\n\n") and text.endswith("\n\nafter\n") and script.NOT_YET not in text
    assert "made up with 16 GiB, compute capability 8.0, CUDA 13.0. Versions: torch 2.13.0." in text
    assert "1 tests passed, 1 failed, 1 were skipped." in text and "- failed: `test_made_up.py::test_fails`. " in text
    assert "- skipped: `test_made_up.py::test_skips`. no a \\| b\n" in text
    assert "| `test_made_up.py::test_passes` | ratio | 1.5 |\n|  | peak | 3 MiB |\n" in text


def test_the_page_shows_the_recorded_file(script: Any) -> None:
    results = json.loads(script.RECORDED.read_text()) if script.RECORDED.exists() else None
    page = script.PAGE.read_text()
    assert script.filled(page, script.table(results)) == page, "run `python docs/figures/gpu.py`"


def report(recorder: Recorder, outcome: str, nodeid: str, *, gpu: bool) -> None:
    """Let the recorder see the last phase of a test."""
    item: Any = SimpleNamespace(nodeid=nodeid, get_closest_marker=lambda name: True if gpu else None)
    phase = recorder.pytest_runtest_makereport(item)
    next(phase)
    with pytest.raises(StopIteration):
        skipped, reason = outcome == "skipped", ("file", 1, "Skipped: needs CUDA")
        phase.send(SimpleNamespace(skipped=skipped, failed=False, longrepr=reason, duration=1.0, when="teardown"))


def test_a_run_without_a_gpu_records_nothing(tmp_path: Path) -> None:
    """`pytest tests/gpu` runs the tests for the CPU too, which record figures."""
    path = tmp_path / "gpu.json"
    recorder = Recorder(path, lambda: RESULTS)
    recorder.figures("cpu")("ratio", 1.5, "")
    report(recorder, "passed", "cpu", gpu=False)
    report(recorder, "skipped", "cuda", gpu=True)
    assert not path.exists()
    recorder.figures("later")("ratio", 2.5, "")
    report(recorder, "passed", "later", gpu=True)
    tests = {row["test"]: (row["outcome"], row["figures"]) for row in json.loads(path.read_text())["tests"]}
    assert tests == {"cuda": ("skipped", []), "later": ("passed", [{"name": "ratio", "value": 2.5, "unit": ""}])}
