"""Compute the loss of an optimizer step in other micro-batches than TRL's, inside TRL's last one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from trl_steady.host.names import overridden

__all__ = ["backward_of", "divided_by"]


@contextmanager
def divided_by(trainer: Any, share: float) -> Iterator[Callable[[Tensor], Tensor]]:
    """Give the loss of a micro-batch, whose size is a `share` of TRL's, its share in the accumulation window.

    The context gives a function to apply to the loss, which is computed inside it.
    """
    if not trainer.loss_is_scaled_for_ga:  # transformers will divide by the window
        yield lambda loss: loss * share
        return
    window = trainer.current_gradient_accumulation_steps
    with nullcontext() if share == 1 else overridden(trainer, {"current_gradient_accumulation_steps": window / share}):
        yield lambda loss: loss


def backward_of(trainer: Any, model: torch.nn.Module, compute: Callable[[], Tensor], share: float) -> Tensor:
    """Run a micro-batch before the last one with its backward pass, and return its loss without gradient."""
    always = trainer.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
    # gradients are reduced in the last micro-batch, unless the user wants it each time
    unsynchronised = nullcontext() if always else trainer.accelerator.no_sync(model)
    with trainer.until_backward_ends(), unsynchronised, divided_by(trainer, share) as scaled:
        loss = scaled(compute())
        window = 1 if trainer.loss_is_scaled_for_ga else trainer.current_gradient_accumulation_steps
        trainer.accelerator.backward(loss / window)
    return loss.detach()
