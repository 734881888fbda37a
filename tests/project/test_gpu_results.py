"""`make gpu`: its block is accepted as printed and refused otherwise, and no part depends on another."""

import json
import re
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
    monkeypatch.setattr(command, "driver", command.Driver)
    assert command.main([]) != 0
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and "finds no device" in printed.err


def test_the_driver_is_asked_as_torch_asks_it() -> None:
    assert bool(command.driver().devices) == torch.cuda.is_available()


@pytest.mark.parametrize(("status", "found"), [(0, (2, 12040, (8, 9))), (100, (0, 0, (0, 0)))])
def test_devices_are_those_of_the_driver(monkeypatch: pytest.MonkeyPatch, status: int, found: Any) -> None:
    """100 is CUDA's error for no device."""

    def give(pointer: Any, value: int) -> int:
        pointer._obj.value = value
        return 0

    driver = SimpleNamespace(
        cuInit=lambda flags: status,
        cuDeviceGetCount=lambda pointer: give(pointer, 2),
        cuDriverGetVersion=lambda pointer: give(pointer, 12040),
        cuDeviceGet=lambda pointer, number: give(pointer, number),
        cuDeviceGetAttribute=lambda pointer, name, device: give(pointer, {75: 8, 76: 9}[name]),
    )
    monkeypatch.setattr(command.ctypes, "CDLL", lambda name: driver)
    assert command.driver() == found


CU126 = "--extra-index-url https://download.pytorch.org/whl/cu126"
GPU = command.Driver(1, 13000, (7, 5))


@pytest.mark.parametrize(
    ("driver", "why"),
    [
        (GPU, ""),
        (GPU._replace(devices=0), "finds no device here"),
        (
            GPU._replace(version=12080),
            r"is built for CUDA 13, and this driver runs CUDA 12\.8\. Update the driver, or",
        ),
        (GPU._replace(capability=(7, 0)), r"has compute capability 7\.0, and torch needs 7\.5"),
    ],
)
def test_what_is_missing_is_said_before_gigabytes_are_installed(
    monkeypatch: pytest.MonkeyPatch, driver: Any, why: str
) -> None:
    monkeypatch.delenv("PIP_FLAGS", raising=False)
    monkeypatch.setattr(command.Path, "is_file", lambda path: True)
    monkeypatch.setenv("CC", "cc")
    assert re.search(why, command.missing(driver)) and bool(why) == bool(command.missing(driver))


def test_triton_needs_a_compiler_and_pythons_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(command.shutil, "which", lambda name: None)
    assert "there is no gcc" in command.missing(GPU)
    monkeypatch.setattr(command.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(command.sysconfig, "get_paths", lambda: {"include": "/nowhere"})
    assert "there is no Python.h" in command.missing(GPU)


def test_another_build_of_torch_goes_with_an_older_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a later run, when it is installed."""
    older = GPU._replace(version=12060, capability=(7, 0))
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr(command.Path, "is_file", lambda path: True)
    monkeypatch.delenv("PIP_FLAGS", raising=False)
    assert command.missing(older) and command.missing(older, installed=True) == ""
    monkeypatch.setenv("PIP_FLAGS", "--extra-index-url https://download.pytorch.org/whl/cu126")
    assert command.missing(older) == ""


@pytest.mark.parametrize(("flags", "keeps"), [("", True), ("--index-url https://x/whl/cpu", True), (CU126, False)])
def test_a_build_for_another_cuda_brings_its_own_libraries(flags: str, keeps: bool) -> None:
    """torch 2.13.0+cu126 does not go with the CUDA 13 of the constraints, and pip would fall back to PyPI's build."""
    make = ["make", "--no-print-directory", "--dry-run", "--always-make", ".venv/.test", f"PIP_FLAGS={flags}"]
    lines = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = re.search(r"-c (\S*constraints\.txt)", lines)
    assert found is not None
    pinned = (ROOT / found[1]).read_text()
    assert "torch==" in pinned and keeps == ("nvidia-" in pinned) == ("cuda-toolkit==" in pinned)


def test_a_virtual_environment_needs_ensurepip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr(command.Path, "is_file", lambda path: True)
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    assert re.search(r"no ensurepip\..*apt install gcc python3\.\d+-dev python3\.\d+-venv", command.missing(GPU))
    assert command.missing(GPU, installed=True) == ""


def test_the_parts_are_those_of_the_block() -> None:
    assert tuple(work.name for work in parts.PARTS) == block.NAMES


def test_all_files_of_tests_run_but_the_recipes() -> None:
    files = {path.stem.removeprefix("test_") for path in (ROOT / tests.FOLDER).glob("test_*.py")}
    assert {*tests.ORDER} == files - {"recipes"}


def test_colours_and_what_a_terminal_swallows_are_left_out() -> None:
    coloured = Part("steps in bf16", "failed", 12, "\x1b[31mRuntimeError\x1b[0m: \x07bad\x00 end")
    text = block.written(results()._replace(parts=[coloured, *results().parts[1:]]))
    assert "RuntimeError: bad end" in text and text.replace("\n", "").isprintable()


NAN = """
import sys
from benchmarks.gpu import block
from pathlib import Path
figures = [{"name": "ratio", "value": float("nan"), "unit": ""}, {"name": "other", "value": 2.0, "unit": "s"}]
block.save(Path(sys.argv[-1]), {"note": "long " * 200, "figures": figures})
"""


def test_a_figure_that_is_not_finite_goes_to_a_note_of_a_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "PARTS", (Work("nan", "", 60, ("-c", NAN), small=()),))
    monkeypatch.setattr(run, "OUTPUTS", tmp_path)
    monkeypatch.setattr(block, "NAMES", ("nan",))
    assert command.main(["--rehearse"]) == 0
    [part] = block.read(capsys.readouterr().out).parts
    assert part.figures == (Figure("other", 2.0, "s"),) and part.note.startswith("ratio is nan; long long")
    assert len(part.note) <= 300 and "NaN" not in (tmp_path / "gpu-results.json").read_text()
    assert command.main(["--accept", str(tmp_path / "gpu-block.txt")]) == 0


def test_a_part_gets_what_later_parts_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    works = (Work("a", "", 60, ()), Work("b", "", 100, ()), Work("c", "", 100, (), needs="no_such_package"))
    monkeypatch.setattr(run, "PARTS", works)
    made = run.Run(rehearse=False)
    made.machine = {"device": {"capability": [8, 0]}}
    limits = [made._limit(works[0], left) for left in (120, 190, 1000)]  # pyright: ignore[reportPrivateUsage]
    assert limits == [60, 90, 120]


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
    Work("dies late", "", 60, ("-c", f"{WRITES}\nimport os\nos.kill(os.getpid(), 11)"), small=()),
    Work("is cut off", "", 60, ("-c", "import sys\nopen(sys.argv[-1], 'w').write('{')\nsys.exit('full')"), small=()),
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
        ("dies late", "failed", "ended by SIGSEGV; 1 of 2", ratio),
        ("is cut off", "failed", "full", ()),
        ("lacks a package", "skipped", "no_such_package is not installed; make gpu does not bring it", ()),
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
