"""TRL's `GRPOTrainer` with its private seam under names of ours.

The only file that names private attributes of TRL. `CONTRACT` lists all that TRL's `_compute_loss` reads, each with
how it is honoured under our losses; a test holds it against the installed TRL and says by name what moved.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any, cast

import torch
import trl
from packaging.version import Version
from torch import Tensor
from trl.trainer.utils import get_config_model_id

__all__ = ["CONTRACT", "Contract", "HostTrainer", "MicroBatch"]

_TRL = Version(version("trl"))

if Version("1.16") > _TRL or _TRL.major >= 2:  # 2.0.dev0 counts as 2
    raise ImportError(f"trl-steady supports trl>=1.16,<2, found {_TRL}. Install a TRL in that range.")
if not trl.GRPOTrainer.__module__.startswith("trl."):
    raise ImportError(
        f"trl.GRPOTrainer has been replaced by {trl.GRPOTrainer.__module__}, whose loss does not pass through TRL's "
        "_compute_loss. trl-steady works with TRL's own trainer: import it without the package that patches TRL."
    )


@dataclass(frozen=True)
class MicroBatch:
    """One scored training micro-batch. `B` sequences, `T` completion tokens.

    TRL's names are translated here once: `old_per_token_logps` -> `old_logps`, `sampling_per_token_logps` ->
    `sampler_logps`, `ref_per_token_logps` -> `ref_logps`, `importance_sampling_ratio` -> `sampler_weights`.
    """

    mask: Tensor
    """(B, T) bool, True = loss token (completion mask and tool mask)."""
    logps: Tensor
    """(B, T) under the policy, with gradient."""
    entropies: Tensor
    """(B, T), full vocabulary."""
    aux_loss: Tensor | None
    """Scalar load-balancing loss of a mixture of experts."""
    advantages: Tensor
    """(B,), (B, 1) or (B, T)."""
    old_logps: Tensor
    """(B, T) under the policy at rollout; `logps` detached where TRL has none because every update is on-policy."""
    sampler_logps: Tensor | None = None
    """(B, T) from the inference engine."""
    ref_logps: Tensor | None = None
    """(B, T) under the reference, when `beta` is not 0."""
    sampler_weights: Tensor | None = None
    """(B, 1) or (B, T) old / sampler weights of TRL's engine correction."""

    def without_garbage(self) -> "MicroBatch":
        """The same with 0 for every per-token value that takes no part in the loss, NaN included.

        TRL multiplies by the mask, which a NaN survives.
        """
        clean = {
            name: value.where(self.mask, 0)
            for name, value in vars(self).items()
            if isinstance(value, Tensor) and name != "mask" and value.shape == self.mask.shape
        }
        return replace(self, **clean)


# What TRL's _compute_loss reads from `inputs`, and our name for what we rewrite.
_REWRITTEN_INPUTS = {
    "advantages": "advantages",
    "old_per_token_logps": "old_logps",
    "sampling_per_token_logps": "sampler_logps",
    "ref_per_token_logps": "ref_logps",
    "importance_sampling_ratio": "sampler_weights",
}


class HostTrainer(trl.GRPOTrainer):
    """The seam: score a micro-batch once, rewrite it, let TRL compute its own loss on it."""

    model: torch.nn.Module  # set by TRL's constructor, whose annotation allows for None

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
        return self.micro_batch_loss(model, inputs)

    def micro_batch_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
        """The loss of one micro-batch of TRL's `inputs`: here TRL's own, untouched."""
        return super()._compute_loss(model, inputs)

    def score(self, model: torch.nn.Module, inputs: Mapping[str, Any]) -> MicroBatch:
        """One forward of the policy on a micro-batch, by TRL's own method."""
        completion_ids, completion_mask = inputs["completion_ids"], inputs["completion_mask"]
        per_sample = {
            name: inputs[name] for name, how in CONTRACT.inputs.items() if how == _FORWARDED and name in inputs
        }
        logps, entropies, aux_loss = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], completion_ids], dim=1),
            torch.cat([inputs["prompt_mask"], completion_mask], dim=1),
            completion_ids.size(1),
            compute_entropy=True,
            compute_aux_loss=self.aux_loss_enabled,
            **per_sample,
        )
        assert entropies is not None
        mask = completion_mask * inputs["tool_mask"] if "tool_mask" in inputs else completion_mask
        old_logps = inputs.get("old_per_token_logps")
        return MicroBatch(
            mask=mask.bool(),
            logps=logps,
            entropies=entropies,
            aux_loss=aux_loss,
            advantages=inputs["advantages"],
            old_logps=logps.detach() if old_logps is None else old_logps,
            sampler_logps=inputs.get("sampling_per_token_logps"),
            ref_logps=inputs.get("ref_per_token_logps"),
            sampler_weights=inputs.get("importance_sampling_ratio"),
        )

    def host_loss(
        self,
        model: torch.nn.Module,
        inputs: Mapping[str, Any],
        batch: MicroBatch,
        *,
        loss_type: str,
        importance_sampling_level: str,
        with_kl: bool,
    ) -> Tensor:
        """TRL's `_compute_loss`, unchanged, on a rewritten micro-batch and without a second forward.

        Args:
            model: what TRL passed.
            inputs: what TRL passed; keys that `batch` does not name reach TRL as they are.
            batch: what TRL sees in their place.
            loss_type: one of TRL's own.
            importance_sampling_level: `"token"` or `"sequence"`.
            with_kl: whether TRL adds (and logs) its own KL term, when `beta` is not 0.

        Returns:
            Scalar, already divided by the gradient accumulation steps in training, as TRL does.
        """
        rewritten = dict(inputs)
        for name, ours in _REWRITTEN_INPUTS.items():
            value = getattr(batch, ours)
            if value is not None:
                rewritten[name] = value
        scores = (batch.logps, batch.entropies, batch.aux_loss)
        overrides: dict[str, Any] = {
            "loss_type": loss_type,
            "importance_sampling_level": importance_sampling_level,
            "beta": self.beta if with_kl else 0.0,
            # on the instance, so that a subclass's own scoring method is not applied to its own result
            "_get_per_token_logps_and_entropies": lambda *_args, **_kwargs: scores,
        }
        with _overridden(self, overrides):
            return super()._compute_loss(model, rewritten)

    @property
    def accumulation_steps(self) -> float:
        """By how much TRL divides a micro-batch's loss: the accumulation window in training, 1 in evaluation."""
        return self.current_gradient_accumulation_steps if self.model.training else 1.0

    def record_token_mean(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Log the mean of `values` (B, T) over the loss tokens of all processes."""
        totals = torch.stack([values.detach().where(mask, 0).sum(), mask.sum().to(values.dtype)])
        total, count = self.accelerator.reduce(totals, reduction="sum")
        self._record(name, (total / count.clamp(min=1)).item())

    def record_sequence_spread(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Log min, mean and max of `values` (B, 1) over the sequences of all processes that have loss tokens."""
        per_sequence = values.detach().squeeze(-1).where(mask.any(-1), torch.nan)
        gathered = cast(Tensor, self.accelerator.gather(per_sequence))
        known = gathered[~gathered.isnan()]
        for statistic in ("min", "mean", "max"):
            self._record(f"{name}_{statistic}", getattr(known, statistic)().item() if known.numel() else float("nan"))

    def _record(self, name: str, value: float) -> None:
        self._metrics["train" if self.model.training else "eval"][name].append(value)


def default_output_dir(model: Any) -> str:
    """TRL's output folder for a trainer built without `args`."""
    return f"{(model if isinstance(model, str) else get_config_model_id(model.config)).split('/')[-1]}-GRPO"


@contextmanager
def _overridden(trainer: trl.GRPOTrainer, values: Mapping[str, Any]) -> Iterator[None]:
    """Attributes of the trainer, replaced for one call."""
    attributes = vars(trainer)
    before = dict(attributes)
    attributes.update(values)
    try:
        yield
    finally:
        for name in values:
            if name in before:
                attributes[name] = before[name]
            else:
                del attributes[name]


@dataclass(frozen=True)
class Contract:
    """What TRL's `_compute_loss` reads, by kind: name -> how our losses honour or refuse it."""

    attributes: Mapping[str, str]
    """`self.NAME`"""
    arguments: Mapping[str, str]
    """`self.args.NAME`"""
    inputs: Mapping[str, str]
    """`inputs["NAME"]`"""
    parameters: Mapping[str, tuple[str, ...]]
    """Methods we wrap -> their parameters"""


_BY_TRL = "honoured: TRL's own code runs"
_FORWARDED = "honoured: forwarded to TRL's scoring method by name"
_NOT_READ = "refused when set: TRL reads it under another loss_type only"

CONTRACT = Contract(
    attributes={
        "_get_per_token_logps_and_entropies": "wrapped: scores once, then hands the scores to TRL",
        "_entropy_bonus_enabled": _BY_TRL,
        "_entropy_window_stats": _BY_TRL,
        "_last_world_entropy": _BY_TRL,
        "_metrics": "honoured: TRL logs into it, and so do we",
        "accelerator": _BY_TRL,
        "args": "honoured: see the arguments",
        "aux_loss_enabled": "honoured: decides whether we score with the aux loss",
        "beta": "honoured: 0 for TRL while our KL stands in for TRL's",
        "current_gradient_accumulation_steps": "honoured: our KL is divided by it as TRL's loss is",
        "entropy_coef": _BY_TRL,
        "epsilon_high": _BY_TRL,
        "epsilon_low": _BY_TRL,
        "get_gamma_weights": "not reached: loss_type='vespo' only",
        "get_high_entropy_mask": _BY_TRL,
        "get_off_policy_mask": "wrapped: one decision a sequence, also with (B, T) advantages",
        "importance_sampling_level": "honoured: 'sequence' for gspo; 'token' for TRL's code under gspo_token",
        "loss_type": "honoured: 'grpo' for TRL's code under gspo and gspo_token",
        "max_completion_length": "not reached: loss_type='dr_grpo' only",
        "model": _BY_TRL,
        "off_policy_mask_threshold": _BY_TRL,
        "router_aux_loss_coef": _BY_TRL,
        "top_entropy_quantile": _BY_TRL,
        "use_adaptive_entropy": _BY_TRL,
        "use_vllm": _BY_TRL,
        "vllm_importance_sampling_correction": _BY_TRL,
    },
    arguments={
        "delta": _BY_TRL,
        "entropy_coef_delta": _BY_TRL,
        "entropy_coef_max": _BY_TRL,
        "entropy_coef_min": _BY_TRL,
        "entropy_target": _BY_TRL,
        "sapo_temperature_neg": _NOT_READ,
        "sapo_temperature_pos": _NOT_READ,
        "steps_per_generation": "honoured: TRL's buffering; its normaliser is not reached under loss_type='grpo'",
        "use_bias_correction_kl": "honoured: with the token ratio, where TRL would take the sequence's",
        "vespo_k_neg": _NOT_READ,
        "vespo_k_pos": _NOT_READ,
        "vespo_lambda_neg": _NOT_READ,
        "vespo_lambda_pos": _NOT_READ,
    },
    inputs={
        "advantages": "rewritten: (B, T) for gspo_token; (B, T) is refused by gspo",
        "completion_ids": _BY_TRL,
        "completion_mask": _BY_TRL,
        "image_grid_thw": _FORWARDED,
        "image_position_ids": _FORWARDED,
        "image_sizes": _FORWARDED,
        "importance_sampling_ratio": "rewritten: cleaned where the mask is 0",
        "mm_token_type_ids": _FORWARDED,
        "num_images": _FORWARDED,
        "num_items_in_batch": "not reached: normaliser of loss_type='dapo', 'cispo' and 'vespo'",
        "num_tiles": _FORWARDED,
        "old_per_token_logps": "rewritten: gspo_token's surrogate",
        "pixel_attention_mask": _FORWARDED,
        "pixel_values": _FORWARDED,
        "prompt_ids": _BY_TRL,
        "prompt_mask": _BY_TRL,
        "ref_per_token_logps": "rewritten: same origin as the surrogate",
        "sampling_per_token_logps": "rewritten: same origin as the surrogate, for the off-policy mask",
        "spatial_shapes": _FORWARDED,
        "token_type_ids": _FORWARDED,
        "tool_mask": _BY_TRL,
    },
    parameters={
        "_compute_loss": ("self", "model", "inputs"),
        "_get_per_token_logps_and_entropies": (
            "self",
            "model",
            "input_ids",
            "attention_mask",
            "logits_to_keep",
            "batch_size",
            "compute_entropy",
            "compute_aux_loss",
            "pixel_values",
            "image_grid_thw",
            "num_images",
            "pixel_attention_mask",
            "spatial_shapes",
            "num_tiles",
            "image_sizes",
            "token_type_ids",
            "mm_token_type_ids",
            "image_position_ids",
        ),
        "get_off_policy_mask": (
            "advantages",
            "per_token_logps",
            "sampling_per_token_logps",
            "mask",
            "off_policy_threshold",
        ),
    },
)
