"""Every loss under bf16 is that of float32, within bf16's rounding."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu import models
from tests.gpu.places import Place, everywhere
from tests.gpu.recorder import Figures
from tests.tools import tiny
from tests.tools.losses import NATIVE_LOSS_TYPES, SEQUENCE_RATIO_LOSS_TYPES

LOSSES = (*NATIVE_LOSS_TYPES, *SEQUENCE_RATIO_LOSS_TYPES, "gmpo", "dppo")
# log-ratios of the sequences, far from the ends of the clip range: rounding must not move one across an end
INSIDE, OUTSIDE = 0.05, 0.7
CLIP = {"epsilon": 0.3, "epsilon_high": 0.35}


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


@everywhere(slow=True)
@pytest.mark.parametrize("loss_type", LOSSES)
def test_a_loss_in_bf16_is_that_in_float32(place: Place, loss_type: str, tmp_path: Path, figures: Figures) -> None:
    place.need_bf16()
    folder = models.save_model(tmp_path / "model", place.choose(models.SMALL, models.MIDDLE))
    options = {**place.arguments, **CLIP, "loss_type": loss_type, "beta": 0.04, "max_steps": 1}
    if loss_type in ("gspo", "gspo_token", "gmpo", "dppo"):
        options["steps_per_generation"] = 4
    exact = tiny.trainer(folder, tmp_path / "out", **options)
    inputs: dict[str, Any] = models.batch(place)
    advantages = torch.tensor([1.0, -1.0, 0.5, -2.0, 2.0, -0.5, 1.5, -1.5], device=place.device)
    inputs |= {"advantages": advantages, "num_items_in_batch": inputs["completion_mask"].sum()}
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
    distance = models.apart(off, gradients)
    # A rounding to bf16 is at most 2**-9 of a number, 0.2 %. A gradient passes some ten of them in a row, for each of
    # the layers, and the ratio inside the loss is off by as much as the log-probs are.
    assert distance < 0.05 + error
    assert abs(other - loss) < (0.05 + error) * max(abs(loss), 0.1)
    figures("gradient, distance from float32 of its length", distance, "")
    figures("largest error of a token's log-prob", error, "nats")
