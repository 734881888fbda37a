"""Batches, and whether prompts are shared."""

import pytest
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

AttentionInterface.register("of_a_script", sdpa_attention_forward)


@pytest.fixture(params=[False, True], ids=["apart", "shared"])
def share(request: pytest.FixtureRequest) -> bool:
    return request.param
