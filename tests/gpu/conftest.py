"""The order of the tests for CUDA, and the file with their figures.

`make test-gpu` runs the tests marked `gpu`, on the first GPU. The same functions run on the CPU in `make test`, with
small models. `tests/tools/places.py` has what differs.
"""

import os
from pathlib import Path

import pytest

from tests.tools.recorder import Figures, Recorder

ROOT = Path(__file__).parents[2]
OUTPUT = ROOT / "outputs/gpu.json"

# small pieces first, so that an error shows early; then whole trainers, memory, and speed
ORDER = (
    "test_attention.py",
    "test_losses.py",
    "test_ratio.py",
    "test_sampling.py",
    "test_replay.py",
    "test_reference.py",
    "test_ppo.py",
    "test_reward_model.py",
    "test_padding.py",
    "test_trainers.py",
    "test_memory.py",
    "test_speed.py",
    "test_recipes.py",  # all `slow`: not in `make test-gpu`
)

# a trainer with several GPUs would use them all in one process, which turns padding-free passes off
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
_recorder = Recorder(OUTPUT)


def pytest_configure(config: pytest.Config) -> None:
    """Register the recorder."""
    config.pluginmanager.register(_recorder, "gpu figures")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests of this folder by `ORDER`. Tests of other folders stay where they are."""
    here = Path(__file__).parent
    own = [number for number, item in enumerate(items) if item.path.parent == here]
    ordered = sorted((items[number] for number in own), key=lambda item: ORDER.index(item.path.name))
    for number, item in zip(own, ordered, strict=True):
        items[number] = item


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Figures:
    """Return the function that records a name, a value and a unit."""
    return _recorder.figures(request.node.nodeid)
