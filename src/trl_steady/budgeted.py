"""`trl.GRPOTrainer` whose micro-batches may be measured in tokens."""

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor

from trl_steady.checks import refuse_means_over_micro_batches
from trl_steady.host import overridden, rollout_number
from trl_steady.routed import RoutedTrainer

__all__ = ["BudgetedTrainer"]

# a sum over the tokens of an optimizer step, divided by what is known before; the others are means over sequences
_TOKEN_SUMS = ("dapo", "cispo", "vespo")
_STEPS_IN_BACKWARD = ("lomo", "adalomo")


class BudgetedTrainer(RoutedTrainer):
    """With `token_budget`, an optimizer step's sequences go through the policy by tokens, not by TRL's count.

    The loss stays that of the whole step. TRL's metrics become means over the micro-batches of the budget.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self._waiting: list[tuple[int, Mapping[str, Any]]] = []
        super().__init__(*arguments, **keywords)
        budget = f"token_budget={self.args.token_budget}"
        if self.args.token_budget is None:
            return
        if self.why_padded:
            raise ValueError(f"{budget} does not count padding, and {self.why_padded}. Leave token_budget unset.")
        if self.reads_more_than_text:
            raise ValueError(f"{budget} regroups text, and the model reads more. Leave token_budget unset.")
        if self.aux_loss_enabled:
            raise ValueError(
                f"{budget} with a load-balancing loss, a mean over the tokens of each of TRL's micro-batches. Set "
                "router_aux_loss_coef=0.0, or leave token_budget unset."
            )
        if self.accelerator.distributed_type == DistributedType.DEEPSPEED or self.args.optim in _STEPS_IN_BACKWARD:
            raise ValueError(
                f"{budget} goes backward more than once in an optimizer step's last micro-batch, and DeepSpeed, like "
                f"the optimizers {' and '.join(_STEPS_IN_BACKWARD)}, would step each time. Train with DDP and another "
                "optimizer, or leave token_budget unset."
            )
        if type(self).compute_loss is not BudgetedTrainer.compute_loss:
            raise ValueError(
                f"{budget} goes backward inside compute_loss, where {type(self).__name__}.compute_loss would see the "
                "last of its micro-batches only. Override micro_batch_loss, or leave token_budget unset."
            )

    def get_batch_samples(self, *arguments: Any, **keywords: Any) -> Any:
        """TRL's. What still waits is of an optimizer step that an error has ended."""
        self._waiting.clear()
        return super().get_batch_samples(*arguments, **keywords)

    def compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any], *arguments: Any, **keywords: Any) -> Tensor:
        """TRL's. With a budget, the micro-batches of an optimizer step wait for its last, and go through regrouped."""
        if self.args.token_budget is None or not self.model.training:
            return super().compute_loss(model, inputs, *arguments, **keywords)
        self._waiting.append((rollout_number(self), inputs))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.accelerator.device, requires_grad=True)
        refuse_means_over_micro_batches(self.args.token_budget, self)  # which a callback may have set
        waiting, self._waiting = self._waiting, []
        window: float = self.current_gradient_accumulation_steps
        *others, last = self._regrouped(model, waiting)
        total = torch.zeros((), device=self.accelerator.device)
        for group, share in others:
            with self.until_backward_ends(), self._unsynchronised(model), self._divided_by(window / share):
                loss = super().compute_loss(model, group, *arguments, **keywords)
                self.accelerator.backward(loss)
            total += loss.detach()
        group, share = last
        with self._divided_by(window / share):
            return total + super().compute_loss(model, group, *arguments, **keywords)

    def _unsynchronised(self, model: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
        """Gradients of other processes wait for the last micro-batch, unless the user wants them each time."""
        always = self.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        return contextlib.nullcontext() if always else self.accelerator.no_sync(model)

    def _divided_by(self, divisor: float) -> contextlib.AbstractContextManager[None]:
        """What TRL divides the loss of a micro-batch by, where it is a mean over sequences."""
        if self.loss_type in _TOKEN_SUMS:
            return contextlib.nullcontext()
        return overridden(self, {"current_gradient_accumulation_steps": divisor})

    def _regrouped(
        self, model: torch.nn.Module, waiting: Sequence[tuple[int, Mapping[str, Any]]]
    ) -> Iterator[tuple[dict[str, Any], float]]:
        """Micro-batches of the budget, each with its sequences as a share of a micro-batch of TRL's."""
        for _, rollout in itertools.groupby(waiting, key=lambda waits: waits[0]):  # others have other widths
            parts = [inputs for _, inputs in rollout]
            whole = {name: _together([part[name] for part in parts]) for name in parts[0]}
            order, counts = self.batches(
                model,
                torch.cat([whole["prompt_ids"], whole["completion_ids"]], dim=1),
                torch.cat([whole["prompt_mask"], whole["completion_mask"]], dim=1),
                whole["prompt_ids"].size(1),
            )
            for rows in order.split(counts):
                group = {name: _taken(values, rows) for name, values in whole.items()}
                yield group, len(rows) / len(parts[0]["completion_ids"])


def _together(values: Sequence[Any]) -> Any:
    """One value of the micro-batches of a rollout; what is not of samples is the same in all."""
    first = values[0]
    if isinstance(first, Tensor) and first.dim():
        return torch.cat(list(values))
    return list(itertools.chain(*values)) if isinstance(first, list) else first


def _taken(values: Any, rows: Tensor) -> Any:
    if isinstance(values, Tensor) and values.dim():
        return values[rows]
    return [values[row] for row in rows.tolist()] if isinstance(values, list) else values
