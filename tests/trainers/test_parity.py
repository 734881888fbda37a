"""With nothing of ours switched on, our trainer is TRL's: same parameters and metrics, bit for bit."""

import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import trl_steady
from tests.tools import tiny
from tests.tools.cases import cases
from tests.tools.losses import NATIVE_LOSS_TYPES
from trl_steady.losses import LOSSES

ON_POLICY = {"steps_per_generation": 1, "gradient_accumulation_steps": 1}


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


@pytest.mark.parametrize("loss_type", [name for name, loss in LOSSES.items() if loss.is_ours])
def test_with_one_update_per_rollout_a_loss_trains_as_its_warning_says(
    models: dict[str, Path], tmp_path: Path, loss_type: str
) -> None:
    """TRL's default would train something else: some of our losses reduce tokens otherwise."""
    options: dict[str, Any] = {"optim": "sgd", "learning_rate": 1.0, "max_steps": 1, "max_grad_norm": 0.0}
    options |= {"steps_per_generation": 2, "gradient_accumulation_steps": 2, "beta": 0.04}
    config = trl_steady.GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, loss_type=loss_type, **ON_POLICY)
    said = re.search(r"set loss_type='(\w+)', which then trains the same", config.idle_options["loss_type"])
    assert said is not None
    before = tiny.parameters(tiny.trainer(models["dense"], tmp_path, **options))
    changes: dict[str, torch.Tensor] = {}
    for each in (loss_type, said[1], "dapo"):
        after = tiny.parameters(tiny.train(tiny.trainer(models["dense"], tmp_path, loss_type=each, **options)))
        changes[each] = torch.cat([(after[name] - value).flatten() for name, value in before.items()]).double()
    own = changes[loss_type]
    scale = float(own.norm())
    assert scale > 0 and float((changes[said[1]] - own).norm()) < 1e-4 * scale  # float32, and another order of sums
    if said[1] != "dapo":
        assert float((changes["dapo"] - own).norm()) > 0.05 * scale
