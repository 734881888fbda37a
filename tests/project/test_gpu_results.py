"""`make gpu`: its block is accepted as printed and refused otherwise, and no part depends on another."""

import json
import subprocess
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import block, parts, run, tests
from benchmarks.gpu.block import Figure, Part, Results
from benchmarks.gpu.parts import Work

ROOT = Path(__file__).parents[2]
HEADS = {
    "recorded": "2026-01-02 03:04 UTC",
    "device": "made up, 16.0 GiB, compute capability 8.0, CUDA 13.0",
    "versions": "python 3.12.3, torch 2.13.0",
    "source": "commit 0123456789ab",
}
FIGURES = Figure("lognormal, ours: TRL's seconds over ours", 1.5), Figure("GRPO: a step with its rollout", 2.25, "s")
OF_STEPS = Part("steps in bf16", "failed", 12, "PPO: OutOfMemoryError: CUDA out of memory", FIGURES)


def results() -> Results:
    """One part has failed, and the others have passed."""
    found = [OF_STEPS if name == OF_STEPS.name else Part(name, "passed", 60) for name in block.NAMES]
    return Results(HEADS, found)


def signed(lines: Sequence[str]) -> str:
    """Return lines with a last one that fits them."""
    check = zlib.crc32("\n".join(lines).encode())
    return "\n".join([*lines, f"=== end, {len(lines)} lines, check {check:08x} ==="])


PRINTED = block.written(results())
LINES = PRINTED.splitlines()[:-1]


def test_the_last_line_counts_and_checks_the_others() -> None:
    assert signed(LINES) == PRINTED


@pytest.mark.parametrize(
    "pasted",
    [
        PRINTED,
        f"I ran it.\n\n```text\n{PRINTED}\n```\nThank you",
        "\r\n".join(f"> {line}  " for line in PRINTED.splitlines()),
        PRINTED.replace("\n", "\n\n  "),
    ],
    ids=["as printed", "fenced", "quoted", "indented"],
)
def test_a_pasted_block_is_accepted(pasted: str) -> None:
    found = block.read(pasted)
    assert found == results() and not found.is_rehearsal


def test_a_rehearsal_is_told_from_a_gpu() -> None:
    rehearsed = Results({**HEADS, "device": f"{block.REHEARSAL}, 2 threads"}, results().parts)
    assert block.read(block.written(rehearsed)).is_rehearsal


@pytest.mark.parametrize(
    ("pasted", "why"),
    [
        ("", "missing: no line is"),
        ("\n".join(PRINTED.splitlines()[1:]), "missing: no line is"),
        ("\n".join(LINES), "end of the block is missing"),
        ("\n".join([*LINES[:7], *LINES[8:], PRINTED.splitlines()[-1]]), "lines, and its last one counts"),
        (PRINTED.replace("over ours: 1.5", "over ours: 2.5"), "was changed"),
        (signed([line for line in LINES if not line.startswith("source")]), "where its source should be"),
        (signed(LINES[:3]), "ends before its versions"),
        (signed([line for line in LINES if not line.startswith("[replay]")]), "It should have"),
        (signed([*LINES, "[more] passed, 1 s"]), "It should have"),
        (signed([line.replace("] failed", "] splendid") for line in LINES]), "the outcome 'splendid'"),
        (signed([line.replace(": 1.5", ": nan") for line in LINES]), "is nan. It should be a finite number"),
        (signed([line.replace(": 1.5", ": many") for line in LINES]), "is many. It should be a finite number"),
        (signed([*LINES[:5], "hello", *LINES[5:]]), "before its first part"),
        (signed([*LINES, "hello"]), "which is no figure"),
    ],
)
def test_another_block_is_refused(pasted: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        block.read(pasted)


def test_the_command_accepts_and_refuses_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "pasted.txt"
    path.write_text(PRINTED)
    assert command.main(["--accept", str(path)]) == 0
    assert capsys.readouterr().out == f"accepted: {HEADS['device']}; parts: 8 passed, 1 failed\n"
    path.write_text(PRINTED[:-1])
    assert command.main(["--accept", str(path)]) != 0
    assert capsys.readouterr().out.startswith("refused: ")


def test_the_form_asks_for_the_block() -> None:
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/gpu-results.yml").read_text())
    (asked,) = [field for field in form["body"] if field["id"] == "block"]
    assert form["name"] == "GPU results" and asked["validations"]["required"]
    assert block.FIRST.split(",")[0] in asked["attributes"]["description"]


def test_a_machine_without_a_gpu_gets_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "devices", lambda: 0)
    assert command.main([]) != 0
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and "finds no device" in printed.err


def test_the_driver_is_asked_as_torch_asks_it() -> None:
    assert bool(command.devices()) == torch.cuda.is_available()


@pytest.mark.parametrize(("status", "found"), [(0, 2), (100, 0)])
def test_devices_are_those_of_the_driver(monkeypatch: pytest.MonkeyPatch, status: int, found: int) -> None:
    """100 is CUDA's error for no device."""

    def count(pointer: Any) -> int:
        pointer._obj.value = 2
        return 0

    driver = SimpleNamespace(cuInit=lambda flags: status, cuDeviceGetCount=count)
    monkeypatch.setattr(command.ctypes, "CDLL", lambda name: driver)
    assert command.devices() == found


def test_the_parts_are_those_of_the_block() -> None:
    assert tuple(work.name for work in parts.PARTS) == block.NAMES


def test_all_files_of_tests_run_but_the_recipes() -> None:
    files = {path.stem.removeprefix("test_") for path in (ROOT / tests.FOLDER).glob("test_*.py")}
    assert {*tests.ORDER} == files - {"recipes"}


WRITES = """
import sys
from benchmarks.gpu import block
from pathlib import Path
block.save(Path(sys.argv[-1]), {"note": "1 of 2", "figures": [{"name": "ratio", "value": 1.5, "unit": ""}]})
"""
MADE_UP = (
    Work("raises", "", 60, ("-c", "raise RuntimeError('early')"), small=()),
    Work("hangs", "", 1, ("-c", f"{WRITES}\nimport time\ntime.sleep(600)"), small=()),
    Work("dies", "", 60, ("-c", "import os\nos.kill(os.getpid(), 9)"), small=()),
    Work("lacks a package", "", 60, ("-c", ""), small=(), needs="no_such_package"),
    Work("passes", "", 60, ("-c", WRITES), small=()),
)


def test_no_part_depends_on_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "PARTS", MADE_UP)
    monkeypatch.setattr(run, "OUTPUTS", tmp_path)
    monkeypatch.setattr(run, "PATIENCE", 5)
    monkeypatch.setattr(block, "NAMES", tuple(work.name for work in MADE_UP))
    assert command.main(["--rehearse"]) != 0
    found = block.read(capsys.readouterr().out)
    ratio = (Figure("ratio", 1.5),)
    assert [(part.name, part.outcome, part.note, part.figures) for part in found.parts] == [
        ("raises", "failed", "RuntimeError: early", ()),
        ("hangs", "timed out", "1 of 2", ratio),
        ("dies", "failed", "ended by SIGKILL", ()),
        ("lacks a package", "skipped", "no_such_package is not installed", ()),
        ("passes", "passed", "1 of 2", ratio),
    ]
    assert block.read(json.loads((tmp_path / "gpu-results.json").read_text())["block"]) == found


def test_no_part_starts_when_the_time_is_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "PARTS", MADE_UP[-1:])
    monkeypatch.setattr(run, "OUTPUTS", tmp_path)
    monkeypatch.setattr(run, "MINUTES", 0)
    assert command.main(["--rehearse"]) == 0
    assert "[passes] not started, 0 s: the time is over" in capsys.readouterr().out


@pytest.mark.slow
def test_the_rehearsal_ends_and_its_block_is_accepted() -> None:
    """All parts run on a CPU, in small sizes."""
    rehearsal = [sys.executable, "-m", "benchmarks.gpu", "--rehearse"]
    ended = subprocess.run(rehearsal, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout
    found = block.read(ended.stdout)
    outcomes = {part.name: part.outcome for part in found.parts}
    assert found.is_rehearsal and outcomes.pop("vLLM") in ("skipped", "passed")
    assert {*outcomes.values()} == {"passed"}
    assert all(part.figures for part in found.parts if part.name not in ("tests", "vLLM"))
