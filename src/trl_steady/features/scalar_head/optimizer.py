"""The optimizer of a model with a scalar head, apart from the policy's."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from trl_steady.core.feature import Trainer
from trl_steady.features.nonfinite_steps import NonfiniteSteps
from trl_steady.features.scalar_head.model import ScalarHeadModel
from trl_steady.trl_bridge import models

_SCALER = "loss_scaler"  # in a saved state, which has names of parameters beside it


class ScalarHeadOptimizer:
    """Trains all parameters of a critic or a reward model with AdamW. Every process must call all methods.

    The policy's optimizer and DDP take the parameters that need a gradient when a training begins. Those of the model
    need one only after `enable(True)`, so they are in neither. Create the optimizer after FSDP2 has sharded the model.
    `weight_decay` is for parameters with more than one dimension.

    Under fp16 the optimizer has a loss scaler of its own: the loss of a critic may be orders of magnitude larger than
    the policy's, and one scale for both would be too small for the policy's gradients.
    """

    def __init__(
        self,
        model: ScalarHeadModel,
        trainer: Trainer,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        self._model = model
        self._trainer = trainer
        self._max_grad_norm = trainer.args.max_grad_norm
        self._parameters = model.parameters
        matrices: list[torch.nn.Parameter] = []
        vectors: list[torch.nn.Parameter] = []
        for parameter in self._parameters:
            if parameter.dim() > 1:
                matrices.append(parameter)
            else:
                vectors.append(parameter)
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.adamw = AdamW(groups, betas=betas, eps=eps, fused=True)  # fused needs no copies of all parameters
        accelerator = trainer.accelerator
        self.scaler = GradScaler(accelerator.device.type, enabled=accelerator.mixed_precision == "fp16")
        self._loss = torch.zeros((), device=accelerator.device)
        self.scaler.scale(self._loss)  # makes its tensors, also on a process that gets no micro-batch

    def enable(self, is_enabled: bool) -> None:
        """Let the parameters collect gradients, or not. Gradients so far are lost."""
        for parameter in self._parameters:
            parameter.requires_grad_(is_enabled)
            parameter.grad = None

    def add_loss(self, loss: Tensor) -> None:
        """Add the loss of a micro-batch to the figures that are printed if the step is left out."""
        self._loss = self._loss + loss.detach()

    def step(self, learning_rate: float, owner: str) -> Tensor | None:
        """Take a step of the `owner` with the mean gradients of all processes if they are finite, and clear them.

        Returns:
            The norm of the gradients before they are clipped; None if there are none.
        """
        models.reshard(self._model.backbone)
        if self._trainer.accelerator.num_processes > 1:
            self._average_gradients()
        loss = self._loss
        self._loss = torch.zeros_like(loss)
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if not gradients:
            return None
        self.scaler.unscale_(self.adamw)
        norm = models.whole(torch.nn.utils.get_total_norm(gradients))
        steps = self._trainer.feature(NonfiniteSteps)
        if steps.judge_step(owner, norm, self._named_gradients(), self.scaler, loss=loss):
            if self._max_grad_norm > 0:
                torch.nn.utils.clip_grads_with_norm_(self._parameters, self._max_grad_norm, norm)
            self.scaler.step(self.adamw)
        self.scaler.update()
        self.adamw.zero_grad()
        return norm

    def _named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None:
                yield name, parameter.grad

    def _average_gradients(self) -> None:
        for parameter in self._parameters:
            if isinstance(parameter, DTensor):  # FSDP2 has averaged them
                continue
            if parameter.grad is None:  # an expert that no token of this process has reached
                parameter.grad = torch.zeros_like(parameter)
            torch.distributed.all_reduce(parameter.grad.div_(self._trainer.accelerator.num_processes))

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of the optimizer's state by the names of parameters, whole and on the CPU."""
        state: dict[str, Tensor] = {}
        for name, parameter in self._model.named_parameters():
            for key, value in self.adamw.state.get(parameter, {}).items():
                state[f"{name}.{key}"] = models.whole(value).to("cpu", copy=True)
        for key, number in self.scaler.state_dict().items():
            state[f"{_SCALER}.{key}"] = torch.tensor(number, dtype=torch.float64)
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""
        parameters = dict(self._model.named_parameters())
        scaler_state = self.scaler.state_dict()
        self.adamw.state.clear()
        for entry, value in state.items():
            name, _, key = entry.rpartition(".")
            if name == _SCALER:
                if key in scaler_state:  # empty except under fp16
                    scaler_state[key] = type(scaler_state[key])(value.item())
                continue
            parameter = parameters[name]
            restored = value.to(parameter.device, copy=True)
            if key != "step":
                restored = models.like(parameter, restored)
            self.adamw.state[parameter][key] = restored
        self.scaler.load_state_dict(scaler_state)
