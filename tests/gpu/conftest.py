"""The file with the figures of the tests for CUDA.

`make test-gpu` runs the tests marked `gpu`, on the first GPU. The same functions run on the CPU in `make test`, with
small models. `tests/gpu/places.py` has what differs.
"""

import os
from pathlib import Path

import pytest

from tests.gpu.recorder import Figures, Recorder

# a trainer with several GPUs would use them all in one process, which turns padding-free passes off
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
_recorder = Recorder(Path(__file__).parents[2] / "outputs/gpu.json")


def pytest_configure(config: pytest.Config) -> None:
    """Register the recorder."""
    config.pluginmanager.register(_recorder, "gpu figures")


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Figures:
    """Return the function that records a name, a value and a unit."""
    return _recorder.figures(request.node.nodeid)
