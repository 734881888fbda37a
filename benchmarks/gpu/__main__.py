"""Measure trl-steady on a GPU in at most 15 minutes: `make gpu`, or after an installation `python -m benchmarks.gpu`.

It runs the parts of parts.py, each in a process of its own with a time limit, so that none depends on another. It ends
in a block to paste into an issue, and keeps the same and more in outputs/gpu-results.json, and a log of each part in
outputs/gpu. Nothing is sent anywhere. This file needs Python alone; the parts need what `make gpu` installs.
"""

import argparse
import ctypes
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu import block
from benchmarks.gpu.run import FAILED, NO_DEVICE, Run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all parts, and return the exit status: 0 if none failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="run all that a CPU can, in small sizes")
    parser.add_argument("--check", action="store_true", help="only say whether there is a GPU")
    parser.add_argument("--accept", metavar="FILE", help="only say whether a file has a whole block; - is stdin")
    options = parser.parse_args(arguments)
    if options.accept:
        return accepted(options.accept)
    if not options.rehearse and not devices():
        print("make gpu: the CUDA driver (libcuda.so.1) finds no device here, so nothing runs.", file=sys.stderr)
        return NO_DEVICE
    if options.check:
        return 0
    return Run(rehearse=options.rehearse).all_parts()


def devices() -> int:
    """Return the number of devices that the CUDA driver finds. 0: there is no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0:
        return 0
    if driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


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
    sys.exit(main())
