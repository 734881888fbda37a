"""The loss of a micro-batch: its scores, TRL's own loss on rewritten scores, and micro-batches inside the last one.

This file knows what TRL's `_compute_loss` reads and how transformers divides a loss. It knows no part.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trl_steady.functional import reduction
from trl_steady.host.names import overridden

if TYPE_CHECKING:
    from trl_steady.host.part import Trainer


FORWARDED = (
    *("image_grid_thw", "image_position_ids", "image_sizes", "mm_token_type_ids", "num_images", "num_tiles"),
    *("pixel_attention_mask", "pixel_values", "spatial_shapes", "token_type_ids"),
)
"""Inputs that TRL's loss hands to its scoring method by name."""


@dataclass(frozen=True)
class MicroBatch:
    """One scored training micro-batch of `B` sequences with `T` completion tokens.

    The fields rename TRL's inputs: `old_per_token_logps` -> `old_logps`, `sampling_per_token_logps` ->
    `sampler_logps`, `ref_per_token_logps` -> `ref_logps`, `importance_sampling_ratio` -> `sampler_weights`.
    """

    mask: Tensor
    """(B, T) bool, True = loss token (completion mask and tool mask)."""
    logps: Tensor
    """(B, T) log-probs under the policy, with gradient."""
    entropies: Tensor
    """(B, T), over the full vocabulary."""
    aux_loss: Tensor | None
    """Scalar load-balancing loss of a mixture of experts."""
    advantages: Tensor
    """(B,), (B, 1) or (B, T)."""
    old_logps: Tensor
    """(B, T) log-probs under the policy at rollout; `logps` detached if TRL computed none for on-policy updates."""
    sampler_logps: Tensor | None = None
    """(B, T) log-probs from the inference engine."""
    ref_logps: Tensor | None = None
    """(B, T) log-probs under the reference, if `beta` is not 0."""
    sampler_weights: Tensor | None = None
    """(B, 1) or (B, T) weights, old policy / sampler, of TRL's engine correction."""
    kept: Tensor | None = None
    """(B, 1) bool, False = dropped in the rollout by the masks against the sampler; None if that was not decided."""

    @classmethod
    def of(cls, inputs: Mapping[str, Any], scores: tuple[Tensor, Tensor, Tensor | None]) -> "MicroBatch":
        """Return TRL's inputs of a micro-batch with the policy's log-probs, entropies and load-balancing loss."""
        old_logps = inputs.get("old_per_token_logps")
        return cls(
            loss_mask(inputs),
            *scores,
            advantages=inputs["advantages"],
            old_logps=scores[0].detach() if old_logps is None else old_logps,
            sampler_logps=inputs.get("sampling_per_token_logps"),
            ref_logps=inputs.get("ref_per_token_logps"),
            sampler_weights=inputs.get("importance_sampling_ratio"),
            kept=inputs.get("kept"),
        )

    def without_garbage(self) -> "MicroBatch":
        """Return a copy with 0 for all per-token values that are not in the loss, including NaN.

        TRL multiplies by the mask, which would keep a NaN.
        """
        clean = {
            name: value.where(self.mask, 0)
            for name, value in vars(self).items()
            if isinstance(value, Tensor) and name != "mask" and value.shape == self.mask.shape
        }
        return replace(self, **clean)


@dataclass(frozen=True)
class Terms:
    """The loss of a micro-batch: what TRL's loss computes, and what is added to it."""

    batch: MicroBatch
    """The values that TRL's loss reads."""
    loss_type: str
    """One of TRL's own."""
    importance_sampling_level: str
    """`"token"` or `"sequence"`."""
    reduction: str
    """How TRL's loss reduces tokens: a name that `token_weights` knows."""
    with_kl: bool
    """True if TRL adds (and logs) its own KL term when `beta` is not 0."""
    keep: Tensor | None = None
    """(B, 1) or (B, T), 1 = keep, 0 = leave out of TRL's policy term; None keeps all."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """Further attributes of the trainer that TRL's loss reads, with the values that it needs."""
    added: Sequence[tuple[float, Tensor]] = ()
    """Factors and (B, T) values of terms that TRL does not have. They are reduced like TRL's policy term."""


def forwarded(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs that TRL's scoring method gets beside tokens, such as images."""
    return {name: inputs[name] for name in FORWARDED if name in inputs}


def loss_mask(inputs: Mapping[str, Any]) -> Tensor:
    """Return (B, T) bool, True = loss token (completion mask and tool mask)."""
    mask = inputs["completion_mask"]
    return (mask * inputs["tool_mask"] if "tool_mask" in inputs else mask).bool()


def scored(inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor, int]:
    """Return the arguments of TRL's scoring method for a micro-batch: ids and mask (B, L), and the number T."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    return ids, mask, inputs["completion_ids"].size(1)


def rewritten(inputs: Mapping[str, Any], batch: MicroBatch) -> dict[str, Any]:
    """Return TRL's inputs with the values of `batch`."""
    values = {
        "advantages": batch.advantages,
        "old_per_token_logps": batch.old_logps,
        "ref_per_token_logps": batch.ref_logps,
        "importance_sampling_ratio": batch.sampler_weights,
    }
    if "old_logps" in inputs:  # RLOO's, of whole completions
        values["old_logps"] = (batch.old_logps * inputs["completion_mask"]).sum(1)
    return {**inputs, **{name: value for name, value in values.items() if value is not None}}


def attributes(trainer: "Trainer", terms: Terms) -> dict[str, Any]:
    """Return the attributes of the trainer with which TRL's unchanged `_compute_loss` computes its share of `terms`.

    It then runs no forward, because it gets the scores of `terms`.
    """
    scores = (terms.batch.logps, terms.batch.entropies, terms.batch.aux_loss)
    return {
        "loss_type": terms.loss_type,
        "importance_sampling_level": terms.importance_sampling_level,
        "beta": trainer.beta if terms.with_kl else 0.0,
        # set on the instance: a subclass's scoring method must not be applied to its own result
        "_get_per_token_logps_and_entropies": lambda *_args, **_kwargs: scores,
        # TRL multiplies its policy term by this mask for any threshold
        "off_policy_mask_threshold": None if terms.keep is None else 0.0,
        "get_off_policy_mask": lambda **_kwargs: terms.keep,
        **terms.attributes,
    }


def token_weights(
    trainer: "Trainer", mask: Tensor, inputs: Mapping[str, Any], kind: str, dtype: torch.dtype
) -> Tensor:
    """Return the weights (B, T) of the loss tokens in TRL's loss of a micro-batch, whose `inputs` TRL passed.

    With the `kind` "sequence_mean" or "sequence_sum" the loss is the mean over sequences of the mean or sum of their
    tokens. With "micro_batch_tokens" or "step_tokens" it is the mean over the tokens of the micro-batch or of the
    generation batch. With "constant" it is the sum, divided by the longest possible length of all sequences.
    """
    is_training = trainer.model.training
    window = trainer.current_gradient_accumulation_steps if is_training else 1.0
    if kind == "sequence_mean":
        return reduction.sequence_mean_weights(mask, dtype=dtype) / window
    if kind == "sequence_sum":
        return reduction.sequence_sum_weights(mask, dtype=dtype) / window
    if kind == "micro_batch_tokens":
        return reduction.token_weights(mask, mask.sum(), dtype=dtype) / window
    if kind == "constant":
        assert trainer.max_completion_length is not None  # TRL's loss needs it too
        return reduction.token_weights(mask, len(mask) * trainer.max_completion_length, dtype=dtype) / window
    # "step_tokens": a window is one part of the generation batch
    tokens = inputs["num_items_in_batch"].clamp(min=1.0).to(dtype) / trainer.accelerator.num_processes
    return mask.to(dtype) / (tokens * (window / trainer.args.steps_per_generation if is_training else 1.0))


@contextmanager
def divided_by(trainer: "Trainer", share: float | Tensor) -> Iterator[Callable[[Tensor], Tensor]]:
    """Give a function for the loss, computed inside, of a micro-batch that is a `share` of TRL's in the window."""
    if not trainer.loss_is_scaled_for_ga:  # transformers will divide by the window
        yield lambda loss: loss * share
        return
    window = trainer.current_gradient_accumulation_steps
    with overridden(trainer, {"current_gradient_accumulation_steps": window / share}):
        yield lambda loss: loss


def backward_of(trainer: "Trainer", model: torch.nn.Module, compute: Callable[[], Tensor], share: float) -> Tensor:
    """Run a micro-batch before the last one with its backward pass, and return its loss without gradient."""
    always = trainer.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
    # gradients are reduced in the last micro-batch, unless the user wants it each time
    unsynchronised = nullcontext() if always else trainer.accelerator.no_sync(model)
    with trainer.until_backward_ends(), unsynchronised, divided_by(trainer, share) as scaled:
        loss = scaled(compute())
        window = 1 if trainer.loss_is_scaled_for_ga else trainer.current_gradient_accumulation_steps
        trainer.accelerator.backward(loss / window)
    return loss.detach()
