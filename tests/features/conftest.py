"""What tests of several features need."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model_of(models: dict[str, Path], wide: Path) -> Callable[[str], Path]:
    """Return a function from a kind of run ("lora", "full" or "nf4") to the folder of its model."""
    return lambda kind: wide if kind == "nf4" else models["dense"]
