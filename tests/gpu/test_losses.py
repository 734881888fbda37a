"""Every loss under bf16 is that of float32, within bf16's rounding."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu import models
from tests.tools import tiny
from tests.tools.losses import NATIVE_LOSS_TYPES, SEQUENCE_RATIO_LOSS_TYPES
from tests.tools.places import Place, everywhere
from tests.tools.recorder import Figures

LOSSES = (*NATIVE_LOSS_TYPES, *SEQUENCE_RATIO_LOSS_TYPES, "gmpo")
SEQUENCES = 8
# log-ratios of the sequences, far from the ends of the clip range: rounding must not move one across an end
INSIDE, OUTSIDE = 0.05, 0.7
CLIP = {"epsilon": 0.3, "epsilon_high": 0.35}


def batch(place: Place) -> dict[str, Any]:
    """Sequences of unequal lengths, half of them with a ratio inside the clip range."""
    draw = torch.Generator().manual_seed(0)
    tokens = place.choose(12, 96)
    lengths = torch.linspace(2, tokens, SEQUENCES).long()
    mask = torch.arange(tokens) < lengths.unsqueeze(-1)
    found = {
        "prompt_ids": torch.randint(50, 200, (SEQUENCES, 4), generator=draw),
        "prompt_mask": torch.ones(SEQUENCES, 4, dtype=torch.long),
        "completion_ids": torch.randint(50, 200, (SEQUENCES, tokens), generator=draw),
        "completion_mask": mask.long(),
        "advantages": torch.tensor([1.0, -1.0, 0.5, -2.0, 2.0, -0.5, 1.5, -1.5]),
        "num_items_in_batch": mask.sum(),
    }
    return {name: value.to(place.device) for name, value in found.items()}


def scored(trainer: Any, inputs: dict[str, Any]) -> Tensor:
    """The policy's log-probs."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    tokens = inputs["completion_ids"].size(1)
    with torch.no_grad():
        return trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, tokens)[0]


def outcome(trainer: Any, inputs: dict[str, Any]) -> tuple[float, list[Tensor]]:
    """Loss and gradients."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1  # set by the training loop, which does not run here
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.item(), [p.grad.float() for p in trainer.model.parameters() if p.grad is not None]


def apart(own: list[Tensor], true: list[Tensor]) -> float:
    """The distance of gradients, relative to the length of the true one."""
    pairs = list(zip(own, true, strict=True))
    off = sum(float((a - b).double().square().sum()) for a, b in pairs)
    return (off / sum(float(b.double().square().sum()) for _, b in pairs)) ** 0.5


@everywhere(slow=True)
@pytest.mark.parametrize("loss_type", LOSSES)
def test_a_loss_in_bf16_is_that_in_float32(place: Place, loss_type: str, tmp_path: Path, figures: Figures) -> None:
    place.need_bf16()
    folder = models.save_model(tmp_path / "model", place.choose(models.SMALL, models.MIDDLE))
    options = {**place.arguments, **CLIP, "loss_type": loss_type, "beta": 0.04, "max_steps": 1}
    if loss_type in ("gspo", "gspo_token", "gmpo"):
        options["steps_per_generation"] = 4
    exact = tiny.trainer(folder, tmp_path / "out", **options)
    inputs = batch(place)
    logps = scored(exact, inputs)
    signs = torch.tensor([INSIDE, -INSIDE, OUTSIDE, -OUTSIDE] * 2, device=place.device).unsqueeze(-1)
    inputs |= {"old_per_token_logps": logps - signs, "ref_per_token_logps": logps - 0.1}
    loss, gradients = outcome(exact, inputs)
    assert any(gradient.any() for gradient in gradients)
    del exact  # the trainers of a process share one precision, that of the last
    rounded = tiny.trainer(folder, tmp_path / "out", **{**options, "bf16": True})
    own = scored(rounded, inputs)
    assert own.dtype == torch.float32  # a ratio of log-probs in bf16 would be off by 1 %
    is_token = inputs["completion_mask"].bool()
    error = float((own - logps)[is_token].abs().max())
    assert 0 < error < 0.2  # it is bf16 that runs, and no ratio crosses an end of the clip range
    other, off = outcome(rounded, inputs)
    distance = apart(off, gradients)
    # A rounding to bf16 is at most 2**-9 of a number, 0.2 %. A gradient passes some ten of them in a row, for each of
    # the layers, and the ratio inside the loss is off by as much as the log-probs are.
    assert distance < 0.05 + error
    assert abs(other - loss) < (0.05 + error) * max(abs(loss), 0.1)
    figures("gradient, distance from float32 of its length", distance, "")
    figures("largest error of a token's log-prob", error, "nats")
