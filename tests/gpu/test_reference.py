"""The moving reference with LoRA on NF4 and int8: the base stays, the reference becomes the policy."""

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.measuring import seconds

from tests.features.reference.tools import MOVING, base_tensors
from tests.gpu.places import Place, everywhere
from tests.gpu.recorder import Figures
from tests.tools import tiny
from tests.tools import wide as wide_model
from trl_steady.features.reference.feature import Reference
from trl_steady.features.reference.tensors import refresh


@everywhere(slow=True)
@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("base", wide_model.BASES)
def test_the_base_stays_and_the_reference_moves(
    place: Place, wide: Path, tmp_path: Path, base: str, bf16: bool, figures: Figures
) -> None:
    if bf16:
        place.need_bf16()
    options: dict[str, Any] = {**MOVING, **place.arguments, "bf16": bf16, "max_steps": place.choose(6, 22)}
    model = wide_model.load(wide, base, device=place.choose("cpu", "cuda:0"))
    trainer = tiny.trainer(model, tmp_path, lora=True, **options)
    before = [value.clone() for value in base_tensors(trainer.model)]
    trainer.train()
    after = base_tensors(trainer.model)
    assert before and len(after) == len(before) and all(map(torch.equal, after, before))
    assert [step for step, _, _ in trainer.reference_refreshes] == list(range(4, options["max_steps"], 4))
    pairs = trainer.feature(Reference).callback.pairs()
    assert any(not torch.equal(pair.policy, pair.reference) for pair in pairs)  # it trained after the last refresh
    took = [seconds(lambda: refresh(pairs, 1.0)) for _ in range(6)]
    assert all(torch.equal(pair.policy, pair.reference) for pair in pairs)
    figures("seconds of a refresh, median of five", statistics.median(took[1:]), "s")
    figures("bytes of the reference", sum(pair.reference.nbytes for pair in pairs), "bytes")
