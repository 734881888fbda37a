"""With nothing of ours switched on, our trainer is TRL's: same parameters and metrics, bit for bit."""

import itertools
from pathlib import Path

import pytest
import torch

from tests import tiny
from trl_steady.checks import NATIVE_LOSS_TYPES


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("model", ["dense", "moe"])
@pytest.mark.parametrize(
    ("beta", "num_iterations", "steps_per_generation"), itertools.product((0.0, 0.04), (1, 2), (1, 4))
)
@pytest.mark.parametrize("loss_type", NATIVE_LOSS_TYPES)
def test_everything_off_is_trl_bit_for_bit(
    models: dict[str, Path],
    tmp_path: Path,
    loss_type: str,
    beta: float,
    num_iterations: int,
    steps_per_generation: int,
    model: str,
    lora: bool,
) -> None:
    options = {
        "loss_type": loss_type,
        "beta": beta,
        "num_iterations": num_iterations,
        "steps_per_generation": steps_per_generation,
        "gradient_accumulation_steps": 2,
    }
    before = tiny.parameters(tiny.trainer(models[model], tmp_path, lora=lora, **options))
    theirs, ours = (
        tiny.train(tiny.trainer(models[model], tmp_path, ours=ours, lora=lora, padded=True, **options))
        for ours in (False, True)
    )

    assert len(tiny.history(ours)) == 7  # six steps and the summary
    assert tiny.history(ours) == tiny.history(theirs)
    after, expected = tiny.parameters(ours), tiny.parameters(theirs)
    assert after.keys() == expected.keys() == before.keys()
    assert all(torch.equal(after[name], expected[name]) for name in after)
    assert not all(torch.equal(after[name], before[name]) for name in after)
