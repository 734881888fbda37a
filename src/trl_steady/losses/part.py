"""The loss of GRPO as a part: terms of TRL's loss on rewritten log-probs, and terms that TRL does not have."""

import functools
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
import trl
from torch import Tensor

from trl_steady.functional import importance, masks
from trl_steady.host.loss import MicroBatch, Terms
from trl_steady.host.part import Part, Rollout, Trainer
from trl_steady.losses import objective
from trl_steady.losses.old_pass import OldPassPart
from trl_steady.losses.table import LOSSES

# TRL's own mask decides token by token. Read at import, before `trl-steady run` replaces TRL's trainer.
_BY_TOKEN = trl.GRPOTrainer.get_off_policy_mask
_IN_ROLLOUT = "in rollout"  # masks that a rollout has decided, and counted


class _Trainer(objective.ClippedTrainer, Trainer, Protocol):
    """GRPO's trainer. A callback may change these attributes in mid-run."""

    off_policy_mask_threshold: float | None
    get_off_policy_mask: Callable[..., Tensor]
    top_entropy_quantile: float
    get_high_entropy_mask: Callable[[Tensor, Tensor, float], Tensor]
    vllm_importance_sampling_correction: bool


class LossPart(Part):
    """Computes losses, KLs and masks that TRL does not have, and compares the trainer with the sampler."""

    window_options = (("kl_estimator", "beta"), ("kl_ratio_denominator", "beta"))
    trainer: _Trainer

    def built(self) -> None:
        """Refuse options that compare the trainer with an engine, if transformers samples."""
        if not self.trainer.use_vllm and self.trainer.rollout_func is None:
            objective.refuse_sampler_options(self.trainer.args)

    def columns(self, rollout: Rollout) -> Mapping[str, Tensor]:
        """Decide by the masks against the sampler, so that `skip_zero_weight` leaves out what they drop."""
        old_logps = rollout.samples.get("old_per_token_logps")
        if not self.trainer.args.skip_zero_weight or old_logps is None:
            return {}
        batch = MicroBatch.of(rollout.samples, (old_logps, old_logps, None)).without_garbage()
        masked = objective.sampler_masks(batch, self.trainer.args)
        self.trainer.metrics.pooled(means=objective.dropped(masked, batch.mask))
        return {"kept": functools.reduce(torch.mul, masked.values())} if masked else {}

    def rewrites(self, inputs: Mapping[str, object]) -> bool:
        """Return True if an option needs a rewrite, or if there are log-probs of a sampler to compare."""
        args = self.trainer.args
        has_mask = self.trainer.off_policy_mask_threshold is not None or bool(args.sampler_options)
        return args.loss.is_ours or self._adds_kl or has_mask or "sampling_per_token_logps" in inputs

    @property
    def _adds_kl(self) -> bool:
        return self.trainer.beta != 0.0 and not self.trainer.args.has_trls_kl(self.trainer.importance_sampling_level)

    def rewrite(self, batch: MicroBatch) -> Terms:
        """Return the loss as TRL's on rewritten log-probs, plus a KL or a policy term that TRL does not have."""
        trainer, args, method = self.trainer, self.trainer.args, self.trainer.args.loss
        if batch.sampler_logps is None:
            objective.refuse_sampler_options(args)
        batch = trainer.part(OldPassPart).corrected(batch)
        # TRL's loss would multiply the ratio of a sequence by the advantage of each token
        if method.advantages == "sequence" and batch.advantages.dim() == 2 and batch.advantages.size(1) != 1:
            raise ValueError(
                f"advantages have shape (B, T) = {tuple(batch.advantages.shape)}, but loss_type={args.loss_type!r} "
                "takes one per sequence. Set loss_type='gspo_token', or give advantages of shape (B,)."
            )
        clean = batch.without_garbage()
        loss_type, level = trainer.loss_type, trainer.importance_sampling_level
        rewritten = batch  # TRL's losses may read values under the mask
        if method.is_ours:
            loss_type, rewritten = method.host, clean
        if method.rewrite is not None:
            level, rewritten = "token", method.rewrite(clean)
        statistic, masked = self._masks(clean)
        keep = functools.reduce(torch.mul, masked.values()) if masked else None
        added: list[tuple[float, Tensor]] = []
        if method.policy_term is not None:
            high_entropy = None
            if (quantile := trainer.top_entropy_quantile) < 1:
                high_entropy = trainer.get_high_entropy_mask(clean.entropies, clean.mask, 1 - quantile)
            values = method.policy_term(clean, trainer, high_entropy)
            if trainer.use_vllm and trainer.vllm_importance_sampling_correction:  # the weights of TRL's correction
                assert clean.sampler_weights is not None
                values = values * clean.sampler_weights
            added.append((1.0, values if keep is None else values * keep))
            # TRL's policy term becomes 0, for which it must be finite
            keep = torch.zeros_like(clean.mask[:, :1])
            rewritten = objective.finite_ratios(clean)
        # from a copy, so that autograd adds up the KL's gradients before it adds those of the policy term
        estimates = {} if trainer.beta == 0.0 else objective.kl_estimates(batch.without_garbage(), args)
        self._measure(clean, statistic, masked, estimates)
        if self._adds_kl:
            trainer.metrics.token_mean("kl", estimates[args.kl_estimator], clean.mask)
            added.append((trainer.beta, estimates[args.kl_estimator]))
        return Terms(
            batch=rewritten,
            loss_type=loss_type,
            importance_sampling_level=level,
            reduction=LOSSES[loss_type].reduction,
            with_kl=not self._adds_kl,
            keep=keep,
            attributes=method.in_trls_terms(trainer) if method.in_trls_terms else {},
            added=added,
        )

    def _masks(self, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the statistic of the off-policy mask, and all masks that are on: name -> bool, True = keep."""
        threshold = self.trainer.off_policy_mask_threshold
        sampler_logps = batch.old_logps if batch.sampler_logps is None else batch.sampler_logps
        keep = {} if batch.kept is None else {_IN_ROLLOUT: batch.kept}
        keep = keep or objective.sampler_masks(batch, self.trainer.args)
        if threshold is not None:
            decide = self.trainer.get_off_policy_mask  # a subclass may have its own, or wrap ours
            is_ours = decide.__module__.startswith("trl_steady.") and not hasattr(decide, "__wrapped__")
            if self.trainer.args.off_policy_mask_level == "token" and is_ours:
                decide = _BY_TOKEN
            keep["off_policy"] = decide(
                advantages=batch.advantages.unsqueeze(1) if batch.advantages.dim() == 1 else batch.advantages,
                per_token_logps=batch.logps,
                sampling_per_token_logps=sampler_logps,
                mask=batch.mask,
                off_policy_threshold=threshold,
            ).bool()
        return masks.off_policy_statistic(batch.logps, sampler_logps, batch.mask), keep

    def _measure(
        self, batch: MicroBatch, statistic: Tensor, keep: dict[str, Tensor], estimates: dict[str, Tensor]
    ) -> None:
        """Log statistics that the later masks and clips would hide."""
        log_s = importance.sequence_log_ratio(batch.logps.detach(), batch.old_logps, batch.mask)
        self.trainer.metrics.spread("ratio/sequence", log_s.exp(), batch.mask)
        means = {f"kl/{name}": (values, batch.mask) for name, values in estimates.items()}
        means |= objective.dropped({name: kept for name, kept in keep.items() if name != _IN_ROLLOUT}, batch.mask)
        quantiles = {"off_policy": (statistic, batch.mask.any(-1, keepdim=True))}
        sizes = {}
        if batch.sampler_logps is not None:
            log_ratio, of_sampler = objective.mismatch(batch)
            means |= of_sampler
            quantiles["mismatch/log_ratio"] = log_ratio
            sizes["mismatch/effective_sample_size"] = log_ratio
        self.trainer.metrics.pooled(means=means, quantiles=quantiles, sample_sizes=sizes)
