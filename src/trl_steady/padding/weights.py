"""Leave sequences without a gradient out of the policy's pass, as a part."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from trl_steady.host import models
from trl_steady.host.loss import divided_by, loss_mask
from trl_steady.host.part import Part, Rollout, Trainer
from trl_steady.padding.packing import without_waiting

_NEEDED = "has_gradient"
_WORTH_A_LINE = 0.1  # share of the tokens


class WeightsPart(Part):
    """Computes no sequence whose weights in the loss are all 0, with `skip_zero_weight`.

    Without the option, it says at the end of a run how many tokens had no gradient.
    """

    def built(self) -> None:
        """Refuse models with which other sequences count, or with which sequences cannot be left out."""
        self._tokens = torch.zeros(2, dtype=torch.float64)  # without a gradient, and all
        if self.trainer.args.skip_zero_weight:
            self.refuse("skip_zero_weight=True", self._why_not())

    def _why_not(self) -> str | None:
        if self.trainer.aux_loss_enabled:
            return "router_aux_loss_coef is not 0.0, and the load-balancing loss counts the tokens of all sequences"
        config = models.bare(self.trainer, self.trainer.model).config
        return None if config.get_text_config() is config else "the model takes other inputs than text"

    def advantages(self, rollout: Rollout) -> None:
        """Note which sequences have a gradient. All parts before this one have set the advantages."""
        if not self.trainer.model.training:
            return
        has_gradient, samples = self._has_gradient(rollout.samples), rollout.samples
        if self.trainer.args.skip_zero_weight:
            samples[_NEEDED] = has_gradient.tolist()
        else:
            self._tokens += _counts(samples, ~has_gradient).to(self._tokens.device)

    def _has_gradient(self, samples: Mapping[str, Any]) -> Tensor:
        """Return (B,) bool: whether a token of the sequence has a weight in the loss that is not 0."""
        weights = samples["advantages"].view(len(samples["advantages"]), -1) != 0
        if self.trainer.args.METHOD == "RLOO":  # whose loss has a term for an answer without tokens
            return weights.any(-1)
        weights = weights & loss_mask(samples)
        if "importance_sampling_ratio" in samples and self.trainer.loss_type != "vespo":  # which bounds it
            weights = weights & (samples["importance_sampling_ratio"] != 0)
        return (weights & samples["kept"] if "kept" in samples else weights).any(-1)

    def computing(
        self, model: torch.nn.Module, compute: Callable[[Mapping[str, Any]], Tensor], inputs: Mapping[str, Any]
    ) -> Tensor:
        """Compute the loss of the sequences that have a gradient, as a share of that of all."""
        trainer = self.trainer
        if _NEEDED not in inputs or not trainer.model.training or skips_in_whole_step(trainer):
            return compute(inputs)
        # gradients are synchronised where the last micro-batch has a pass; DeepSpeed wants one in each
        needs_pass = trainer.accelerator.sync_gradients or trainer.is_deepspeed_enabled
        left = with_gradient(trainer, inputs, least=int(needs_pass))
        if not len(left["completion_ids"]):
            return torch.zeros((), device=trainer.accelerator.device, requires_grad=True)
        share: float | Tensor = len(left["completion_ids"]) / len(inputs["completion_ids"])
        if trainer.loss_reduction == "micro_batch_tokens":
            kept, total = (loss_mask(each).sum().clamp(min=1) for each in (left, inputs))
            share = kept / total.to(inputs["advantages"].dtype)
        with divided_by(trainer, 1.0 if trainer.loss_reduction == "step_tokens" else share) as scaled:
            return scaled(compute(left))

    def ending(self, best: Path | None) -> None:
        """Say how many tokens of the main process had no gradient, if the option would have left them out."""
        without, total = self._tokens.tolist()
        args, is_main = self.trainer.args, self.trainer.accelerator.is_main_process
        if is_main and without > _WORTH_A_LINE * total and not args.over_all_sequences and not self._why_not():
            self.trainer.accelerator.print(
                f"trl-steady: {without / total:.0%} of the tokens had no gradient. skip_zero_weight=True would not "
                "have computed them."
            )


def skips_in_whole_step(trainer: Trainer) -> bool:
    """Return True if sequences are left out before `token_budget` regroups a step: no part counts all of them."""
    counted = any(part.counts_all_sequences for part in trainer.parts)
    return trainer.args.skip_zero_weight and trainer.args.token_budget is not None and not counted


def with_gradient(trainer: Trainer, inputs: Mapping[str, Any], *, least: int) -> dict[str, Any]:
    """Return the sequences of `inputs` that have a gradient, at least `least`, and log the share of the others.

    Their number is the same on all processes, because TRL gathers values of sequences.
    """
    is_needed: list[bool] = inputs.get(_NEEDED) or [True] * len(inputs["completion_ids"])
    needed, others = ([row for row, needs in enumerate(is_needed) if needs is wanted] for wanted in (True, False))
    count: int = max(least, *gather_object([len(needed)]))
    rows = sorted(needed + others[: count - len(needed)])
    is_skipped = torch.ones(len(is_needed), dtype=torch.bool)
    is_skipped[rows] = False
    is_skipped = without_waiting(is_skipped, inputs["completion_ids"].device)
    trainer.metrics.pooled(
        means={"skipped/sequences": (is_skipped, torch.ones_like(is_skipped))},
        sums={"skipped/tokens": _counts(inputs, is_skipped)},
    )
    return taken(inputs, rows)


def taken(inputs: Mapping[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """Return some sequences of a micro-batch. An input that has no rows is the same for all."""
    indices = without_waiting(torch.tensor(rows, dtype=torch.long), inputs["completion_ids"].device)

    def of_rows(values: Any) -> Any:
        if isinstance(values, Tensor) and values.dim():
            return values[indices]
        return [values[row] for row in rows] if isinstance(values, list) else values

    return {name: of_rows(values) for name, values in inputs.items()}


def _counts(samples: Mapping[str, Any], is_counted: Tensor) -> Tensor:
    """Return (2,) the tokens of the sequences that are counted, and those of all."""
    tokens = (samples["prompt_mask"].sum(-1) + samples["completion_mask"].sum(-1)).float()
    return torch.stack([(tokens * is_counted).sum(), tokens.sum()])
