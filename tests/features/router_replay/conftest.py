"""The models that routes are replayed on."""

import pytest
from transformers import PreTrainedModel

from tests.features.router_replay import mixtures
from tests.features.router_replay.passes import CASES


@pytest.fixture
def qwen() -> PreTrainedModel:
    return mixtures.build(CASES[0])


@pytest.fixture(params=[True, False], ids=["reentrant", "not reentrant"])
def checkpointing(request: pytest.FixtureRequest) -> dict[str, bool]:
    return {"use_reentrant": request.param}
