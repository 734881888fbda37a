"""Steps whose gradient is not finite, and runs in which these steps are not taken."""

import math
from collections.abc import Container
from typing import Any

import torch
from transformers import TrainerCallback

from tests.tools import tiny

OPTIONS: dict[str, Any] = {
    "lr_scheduler_type": "linear",  # so that a step of the scheduler shows
    "num_iterations": 2,
    "gradient_accumulation_steps": 2,
    "beta": 0.04,
}


def poison_loss(trainer: Any, steps: Container[int], value: float = math.nan) -> Any:
    """Let the loss of the first micro-batch of some steps be NaN. The second one is as always."""

    class Poisoned(type(trainer)):
        def compute_loss(self, *arguments: Any, **keywords: Any) -> Any:
            loss = super().compute_loss(*arguments, **keywords)
            is_first = self._step % self.args.gradient_accumulation_steps == 0
            return loss * value if is_first and self.state.global_step in steps else loss

    trainer.__class__ = Poisoned
    return trainer


def poison_gradients(
    trainer: Any, steps: Container[int], *, of: Any = None, count: int = 1, value: float = math.nan
) -> Any:
    """Let an element of the gradient of some parameters be NaN in some steps."""

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        if trainer.state.global_step not in steps:
            return gradient
        spoilt = gradient.clone()
        spoilt.view(-1)[0] = value
        return spoilt

    parameters = trainer.model.parameters() if of is None else of
    for parameter in [own for own in parameters if of is not None or own.requires_grad][2 : 2 + count]:
        needs_gradient = parameter.requires_grad
        parameter.requires_grad_(True).register_hook(spoil)
        parameter.requires_grad_(needs_gradient)
    return trainer


class Without(TrainerCallback):
    """Takes some steps by no means of ours: without gradients, and without a step of the scheduler."""

    def __init__(self, trainer: Any, steps: Container[int]) -> None:
        self.trainer, self.steps = trainer, steps

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step in self.steps:
            for parameter in self.trainer.model.parameters():
                parameter.grad = None
            scheduler = self.trainer.lr_scheduler
            scheduler.step = lambda: vars(scheduler).pop("step")


def without(trainer: Any, steps: Container[int]) -> Any:
    trainer.add_callback(Without(trainer, steps))
    return trainer


def state(trainer: Any) -> dict[str, Any]:
    """Parameters, moments, learning rates and the scheduler."""
    optimizer = trainer.optimizer.state_dict()
    return {
        "parameters": tiny.parameters(trainer),
        "moments": optimizer["state"],
        "groups": optimizer["param_groups"],
        "scheduler": {k: v for k, v in trainer.lr_scheduler.state_dict().items() if k != "lr_lambdas"},
        "rates": [row.get("learning_rate") for row in trainer.state.log_history],
    }
