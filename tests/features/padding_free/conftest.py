"""Batches, and whether prompts are shared."""

import pytest
import torch

from tests.features.padding_free.tools import BATCHES
from tests.oracles.padding import Batch


@pytest.fixture(params=BATCHES.values(), ids=BATCHES.keys())
def batch(request: pytest.FixtureRequest) -> Batch:
    return request.param


@pytest.fixture(params=[False, True], ids=["apart", "shared"])
def share(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture
def all_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what transformers does in float32 whatever the model's type: norms, rotary angles and "eager" softmaxes."""
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
