"""With nothing of ours switched on, our trainer is TRL's: same parameters and metrics, bit for bit."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch

from tests.tools import tiny
from tests.tools.cases import cases
from tests.tools.losses import NATIVE_LOSS_TYPES


def _settings() -> Iterator[tuple[str, float, int, int, str, bool]]:
    """Every loss with both values of each setting; every pair of values of any two settings is among them."""
    for loss_type, (reference, again, later) in zip(NATIVE_LOSS_TYPES, product((0, 1), repeat=3), strict=True):
        row = reference, again, later, reference ^ again ^ later, reference ^ again
        for inverse in (0, 1):
            beta, passes, steps, mixture, lora = (value ^ inverse for value in row)
            yield loss_type, 0.04 * beta, 1 + passes, 1 + 3 * steps, "moe" if mixture else "dense", bool(lora)


SETTINGS = list(_settings())
# one of the two of each loss, by turns
FAST = [row for i, row in enumerate(SETTINGS) if i % 4 in (0, 3)]


@pytest.mark.parametrize(
    ("loss_type", "beta", "num_iterations", "steps_per_generation", "model", "lora"), cases(SETTINGS, FAST)
)
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
