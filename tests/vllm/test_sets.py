"""Kept tokens of a vLLM engine in the trainer's process: what it is asked, and that one on CPU cannot return them."""

import dataclasses
import inspect
from pathlib import Path

import pytest
import torch
from trl.generation import vllm_generation

from tests.features.sampling_mask.tools import SETS
from tests.vllm.tools import Colocated, needs_vllm
from trl_steady.features.router_replay.feature import ROUTES
from trl_steady.features.sampling_mask.feature import SAMPLING_MASK

pytestmark = needs_vllm


def test_a_completion_has_the_fields_that_are_read() -> None:
    from vllm import EngineArgs
    from vllm.outputs import CompletionOutput, SamplingMask

    fields = {field.name for field in dataclasses.fields(CompletionOutput)}
    assert {SAMPLING_MASK.field, ROUTES.field, "token_ids"} <= fields
    assert SamplingMask([[5, 7], [3]]).token_ids == [[5, 7], [3]]
    for extra in (SAMPLING_MASK, ROUTES):
        assert extra.flag in inspect.signature(EngineArgs).parameters
        assert extra.flag in inspect.signature(vllm_generation.LLM).parameters


@pytest.mark.refuses(
    "keep_sampling_mask",
    on="vLLM colocate",
    where="on CPU",
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU vLLM can")
@pytest.mark.parametrize("replay", [None, "R3"])
def test_an_engine_on_cpu_says_why_it_cannot(
    mixture: Path, tmp_path: Path, colocated: Colocated, replay: str | None
) -> None:
    said = r"(?s)keep_sampling_mask=True.*: vLLM cannot be built.*distribution replay requires Model Runner V2"
    with pytest.raises(ValueError, match=said):
        colocated(mixture, tmp_path, router_replay=replay, **SETS)
    assert SAMPLING_MASK.flag not in vllm_generation.LLM.keywords  # of the fixture's
