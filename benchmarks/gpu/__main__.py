"""Measure trl-steady on a GPU in at most 15 minutes: `make gpu`, or after an installation `python -m benchmarks.gpu`.

It runs the parts of parts.py, each in a process of its own with a time limit, so that none depends on another. It ends
in a block to paste into an issue, and keeps the same and more in outputs/gpu-results.json, and a log of each part in
outputs/gpu. Nothing is sent anywhere. This file needs Python alone; the parts need what `make gpu` installs.
"""

import argparse
import ctypes
import importlib.util
import os
import shutil
import signal
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu import block
from benchmarks.gpu.run import FAILED, NO_DEVICE, Run

CUDA = 13000  # that of the packages in constraints.txt
CAPABILITY = (7, 5)  # the lowest of torch's builds for it
_MAJOR, _MINOR = 75, 76  # numbers of cuDeviceGetAttribute
_PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
_INSTALL = f"For example: apt install gcc {_PYTHON}-dev {_PYTHON}-venv"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all parts, and return the exit status: 0 if none failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="run all that a CPU can, in small sizes")
    parser.add_argument("--check", action="store_true", help="only say whether there is a GPU")
    parser.add_argument("--installed", action="store_true", help="with --check: torch is installed already")
    parser.add_argument("--accept", metavar="FILE", help="only say whether a file has a whole block; - is stdin")
    options = parser.parse_args(arguments)
    if options.accept:
        return accepted(options.accept)
    problem = "" if options.rehearse else missing(driver(), installed=options.installed)
    if problem:
        print(f"make gpu: {problem}", file=sys.stderr)
        return NO_DEVICE
    if options.check:
        return 0
    return Run(rehearse=options.rehearse).all_parts()


class Driver(NamedTuple):
    """The answers of the CUDA driver."""

    devices: int = 0
    version: int = 0
    """The CUDA that it can run, such as 13000."""
    capability: tuple[int, int] = (0, 0)
    """The compute capability of the first device."""


def driver() -> Driver:
    """Ask the CUDA driver, as torch does. Without one there are no devices."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Driver()
    if cuda.cuInit(0) != 0:
        return Driver()
    count, version, device, major, minor = (ctypes.c_int(0) for _ in range(5))
    if cuda.cuDeviceGetCount(ctypes.byref(count)) != 0 or not count.value:
        return Driver()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    cuda.cuDeviceGet(ctypes.byref(device), 0)
    cuda.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
    return Driver(count.value, version.value, (major.value, minor.value))


def missing(found: Driver, *, installed: bool = False) -> str:
    """Return why `make gpu` would fail here, before anything is installed; "" if nothing is known.

    `installed`: a build of torch is there already, perhaps for an older CUDA.
    """
    if not found.devices:
        return "the CUDA driver (libcuda.so.1) finds no device here, so nothing runs."
    is_own_build = installed or bool(os.environ.get("PIP_FLAGS"))  # of torch
    if found.version < CUDA and not is_own_build:
        return (
            f"torch on PyPI is built for CUDA {CUDA // 1000}, and this driver runs CUDA {found.version // 1000}."
            f"{found.version % 1000 // 10}. Update the driver, or install another build: "
            'make gpu PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cu126"'
        )
    if found.capability < CAPABILITY and not is_own_build:
        return f"the GPU has compute capability {_dotted(found.capability)}, and torch needs {_dotted(CAPABILITY)}."
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return f"Triton compiles when it starts, and there is no gcc. {_INSTALL}"
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        return f"Triton compiles when it starts, and there is no Python.h. {_INSTALL}"
    if importlib.util.find_spec("ensurepip") is None and not installed:  # Debian has it in a package of its own
        return f"Python cannot make a virtual environment: it has no ensurepip. {_INSTALL}"
    return ""


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def accepted(path: str) -> int:
    """Say whether a file has a whole block."""
    text = sys.stdin.read() if path == "-" else Path(path).read_text()
    try:
        results = block.read(text)
    except ValueError as error:
        print(f"refused: {error}")
        return FAILED
    kind = "a rehearsal without a GPU" if results.is_rehearsal else results.heads["device"]
    outcomes = [part.outcome for part in results.parts]
    counts = ", ".join(f"{outcomes.count(each)} {each}" for each in block.OUTCOMES if each in outcomes)
    print(f"accepted: {kind}; parts: {counts}")
    return 0


if __name__ == "__main__":
    for lost in (signal.SIGHUP, signal.SIGTERM):  # the part that runs ends too, and the block is written
        signal.signal(lost, signal.default_int_handler)
    sys.exit(main())
