"""Scripts of docs/figures as modules."""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def figure(name: str, *, draws: bool = True) -> Iterator[Any]:
    """Give the script docs/figures/`name`.py. One that draws needs matplotlib."""
    if draws:
        pytest.importorskip("matplotlib", reason="needs the recipes extra")
    path = Path(__file__).parents[2] / f"docs/figures/{name}.py"
    spec = importlib.util.spec_from_file_location(f"figure_{name}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    paths = [*sys.path]  # a script adds the folder of what it imports
    sys.modules[spec.name] = module  # where dataclasses look for their module
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop(spec.name, None)
    sys.path[:] = paths
