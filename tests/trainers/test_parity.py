"""With nothing of ours switched on, our trainer is TRL's: same parameters and metrics, bit for bit."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tools import tiny
from tests.tools.losses import NATIVE_LOSS_TYPES


def _settings() -> Iterator[Any]:
    """All of them; every pair of values of any two is among the eighth that is not slow."""
    for reference, again, later, mixture, lora in itertools.product((False, True), repeat=5):
        is_slow = mixture != reference ^ again ^ later or lora != reference ^ again
        yield pytest.param(
            0.04 if reference else 0.0,
            2 if again else 1,
            4 if later else 1,
            "moe" if mixture else "dense",
            lora,
            marks=[pytest.mark.slow] if is_slow else [],
        )


@pytest.mark.parametrize(("beta", "num_iterations", "steps_per_generation", "model", "lora"), _settings())
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
