"""Batches, and whether prompts are shared."""

import pytest

from tests.features.padding_free.tools import BATCHES
from tests.oracles.padding import Batch


@pytest.fixture(params=BATCHES.values(), ids=BATCHES.keys())
def batch(request: pytest.FixtureRequest) -> Batch:
    return request.param


@pytest.fixture(params=[False, True], ids=["apart", "shared"])
def share(request: pytest.FixtureRequest) -> bool:
    return request.param
