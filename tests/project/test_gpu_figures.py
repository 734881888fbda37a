"""The figures of `make test-gpu`: how they are recorded, and that docs/performance.md shows the recorded file."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tools.recorder import Figures, Recorder
from tests.tools.script import figure

ENVIRONMENT = {
    "device": {"name": "made up", "memory_bytes": 16 * 2**30, "capability": [8, 0], "cuda": "13.0"},
    "versions": {"torch": "2.13.0", "bitsandbytes": None},
}
TESTS = """
import pytest

@pytest.fixture
def broken():
    yield
    raise ValueError("late")

@pytest.mark.gpu
def test_passes(figures):
    figures("ratio", 1.5, "")
    figures("peak", 3, "MiB")

@pytest.mark.gpu
def test_fails(figures):
    figures("before", 1, "s")
    assert 1 == 2, "early"

@pytest.mark.gpu
def test_fails_in_teardown(broken):
    pass

@pytest.mark.gpu
def test_skips():
    pytest.skip("no flash | attention")

def test_on_the_cpu(figures):
    figures("ratio", 1, "")
"""


class Fixtures:
    """The fixture of `tests/gpu/conftest.py` with another recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    @pytest.fixture
    def figures(self, request: pytest.FixtureRequest) -> Figures:
        return self.recorder.figures(request.node.nodeid)


@pytest.fixture
def script() -> Iterator[Any]:
    with figure("gpu", draws=False) as module:
        yield module


def test_every_outcome_and_figure_is_recorded_and_shown(script: Any, tmp_path: Path) -> None:
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_made_up.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    output = tmp_path / "outputs/gpu.json"
    recorder = Recorder(output, lambda: ENVIRONMENT)
    arguments = ["-p", "no:cacheprovider", "-p", "no:terminal", "--import-mode=importlib", "--rootdir", str(folder)]
    assert pytest.main([*arguments, str(folder)], plugins=[recorder, Fixtures(recorder)]) == 1
    sys.modules.pop("test_made_up", None)
    results = json.loads(output.read_text())
    rows = {row["test"].split("::")[1]: row for row in results["tests"]}
    outcomes = {"test_passes": "passed", "test_fails": "failed", "test_fails_in_teardown": "failed"}
    assert {name: row["outcome"] for name, row in rows.items()} == {**outcomes, "test_skips": "skipped"}
    figures = {name: [tuple(figure.values()) for figure in row["figures"]] for name, row in rows.items()}
    assert figures["test_passes"] == [("ratio", 1.5, ""), ("peak", 3.0, "MiB")]
    assert figures["test_fails"] == [("before", 1.0, "s")]

    page, recorded = tmp_path / "page.md", tmp_path / "gpu.json"
    page.write_text(f"before\n\n{script.START}\nold\n{script.END}\n\nafter\n")
    script.main([], page=page, recorded=recorded)
    assert page.read_text() == f"before\n\n{script.START}\n{script.NOT_YET}\n{script.END}\n\nafter\n"
    script.main([str(output)], page=page, recorded=recorded)
    assert recorded.read_bytes() == output.read_bytes()
    text = page.read_text()
    assert text.startswith("before\n\n") and text.endswith("\n\nafter\n") and script.NOT_YET not in text
    assert "made up with 16 GiB, compute capability 8.0, CUDA 13.0. Versions: torch 2.13.0." in text
    assert "1 tests passed, 2 failed, 1 were skipped." in text and "- failed: `test_made_up.py::test_fails`. " in text
    assert "- skipped: `test_made_up.py::test_skips`. no flash \\| attention\n" in text
    assert "| `test_made_up.py::test_passes` | ratio | 1.5 |\n|  | peak | 3 MiB |\n" in text


def test_the_page_shows_the_recorded_file(script: Any) -> None:
    results = json.loads(script.RECORDED.read_text()) if script.RECORDED.exists() else None
    page = script.PAGE.read_text()
    assert script.filled(page, script.table(results)) == page, "run `python docs/figures/gpu.py`"
