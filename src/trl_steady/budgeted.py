"""`trl.GRPOTrainer` with micro-batches that are measured in tokens."""

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

# sums over the tokens of an optimizer step, divided by a known number; the other losses are means over sequences
_TOKEN_SUMS = ("dapo", "cispo", "vespo")
_STEPS_IN_BACKWARD = ("lomo", "adalomo")


class BudgetedTrainer(RoutedTrainer):
    """Trainer that regroups the sequences of an optimizer step by their tokens, with `token_budget`.

    The loss stays that of the whole step. TRL's metrics become means over the new micro-batches.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self._waiting: list[tuple[int, Mapping[str, Any]]] = []
        super().__init__(*arguments, **keywords)
        budget = f"token_budget={self.args.token_budget}"
        if self.args.token_budget is None:
            return
        if self.why_padded:
            raise ValueError(
                f"{budget} needs passes without padding, and {self.why_padded}. Leave token_budget unset."
            )
        if self.reads_more_than_text:
            raise ValueError(
                f"{budget} can only regroup text, and the model takes other inputs too. Leave token_budget unset."
            )
        if self.aux_loss_enabled:
            raise ValueError(
                f"{budget} does not work with a load-balancing loss, which is a mean over the tokens of each of TRL's "
                "micro-batches. Set router_aux_loss_coef=0.0, or leave token_budget unset."
            )
        if self.accelerator.distributed_type == DistributedType.DEEPSPEED or self.args.optim in _STEPS_IN_BACKWARD:
            raise ValueError(
                f"{budget} runs backward more than once in the last micro-batch of an optimizer step. DeepSpeed and "
                f"the optimizers {' and '.join(_STEPS_IN_BACKWARD)} would step each time. Train with DDP and another "
                "optimizer, or leave token_budget unset."
            )
        if type(self).compute_loss is not BudgetedTrainer.compute_loss:
            raise ValueError(
                f"{budget} runs backward inside compute_loss, so {type(self).__name__}.compute_loss would see only "
                "the last micro-batch. Override micro_batch_loss instead, or leave token_budget unset."
            )

    def get_batch_samples(self, *arguments: Any, **keywords: Any) -> Any:
        """Return TRL's batches for an optimizer step, and discard micro-batches left over from a step that raised."""
        self._waiting.clear()
        return super().get_batch_samples(*arguments, **keywords)

    def compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any], *arguments: Any, **keywords: Any) -> Tensor:
        """Compute TRL's loss. With a budget, collect the micro-batches of an optimizer step and regroup them.

        Earlier calls return 0, and the last call of the step runs all micro-batches.
        """
        if self.args.token_budget is None or not self.model.training:
            return super().compute_loss(model, inputs, *arguments, **keywords)
        self._waiting.append((rollout_number(self), inputs))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.accelerator.device, requires_grad=True)
        refuse_means_over_micro_batches(self.args.token_budget, self)  # a callback may have changed the loss
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
        """Skip the gradient all-reduce before the last micro-batch, unless the user wants it each time."""
        always = self.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        return contextlib.nullcontext() if always else self.accelerator.no_sync(model)

    def _divided_by(self, divisor: float) -> contextlib.AbstractContextManager[None]:
        """Set the number by which TRL divides the loss of a micro-batch, for losses that are means over sequences."""
        if self.loss_type in _TOKEN_SUMS:
            return contextlib.nullcontext()
        return overridden(self, {"current_gradient_accumulation_steps": divisor})

    def _regrouped(
        self, model: torch.nn.Module, waiting: Sequence[tuple[int, Mapping[str, Any]]]
    ) -> Iterator[tuple[dict[str, Any], float]]:
        """Yield the micro-batches of the budget, each with its size as a share of TRL's micro-batch."""
        for _, rollout in itertools.groupby(waiting, key=lambda waits: waits[0]):  # each rollout has its own width
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
    """Join one input of the micro-batches of a rollout. An input that has no rows is the same in all."""
    first = values[0]
    if isinstance(first, Tensor) and first.dim():
        return torch.cat(list(values))
    return list(itertools.chain(*values)) if isinstance(first, list) else first


def _taken(values: Any, rows: Tensor) -> Any:
    if isinstance(values, Tensor) and values.dim():
        return values[rows]
    return [values[row] for row in rows.tolist()] if isinstance(values, list) else values
