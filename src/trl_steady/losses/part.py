"""The loss of GRPO as a part: terms of TRL's loss on rewritten log-probs, and terms that TRL does not have."""

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import trl
from torch import Tensor

from trl_steady.functional import importance, masks
from trl_steady.host.loss import MicroBatch, Terms
from trl_steady.host.part import Part
from trl_steady.host.reached import is_known
from trl_steady.losses import objective
from trl_steady.losses.table import LOSSES

__all__ = ["LossPart"]


# TRL's own mask decides token by token. Read at import, before `trl-steady run` replaces TRL's trainer.
_BY_TOKEN = trl.GRPOTrainer.get_off_policy_mask


class LossPart(Part):
    """Computes losses, KLs and masks that TRL does not have, and compares the trainer with the sampler."""

    window_options = (("kl_estimator", "beta"), ("kl_ratio_denominator", "beta"))

    def built(self) -> None:
        """Refuse options that compare the trainer with an engine, whose log-probs may differ from the policy's."""
        args = self.trainer.args
        if self.trainer.use_vllm or self.trainer.rollout_func is not None:
            return
        if args.sampler_options:
            option = args.sampler_options[0]
            raise ValueError(
                f"{option}={getattr(args, option)!r} compares the trainer with the engine that samples, and here "
                f"transformers generates with the policy itself. Set use_vllm=True, or leave {option} unset."
            )
        for message in args.idle_without_engine:
            warnings.warn(message, UserWarning, stacklevel=2)

    def computing(
        self, model: torch.nn.Module, compute: Callable[[Mapping[str, Any]], Tensor], inputs: Mapping[str, Any]
    ) -> Tensor:
        """Refuse a loss that a callback has set and that a budget cannot regroup."""
        trainer = self.trainer
        if trainer.args.token_budget is not None and trainer.model.training and trainer.accelerator.sync_gradients:
            objective.refuse_means_over_micro_batches(trainer.args.token_budget, trainer)
        return compute(inputs)

    def rewrites(self, inputs: dict[str, Any]) -> bool:
        """Return True if an option needs a rewrite, or if there are log-probs of a sampler to compare."""
        args = self.trainer.args
        # TRL reads these from the trainer, where a callback may have set them
        has_mask = self.trainer.off_policy_mask_threshold is not None or bool(args.sampler_options)
        return args.loss.is_ours or self._has_own_kl or has_mask or "sampling_per_token_logps" in inputs

    @property
    def _has_own_kl(self) -> bool:
        return self.trainer.beta != 0.0 and not self.trainer.args.has_trls_kl(self.trainer.importance_sampling_level)

    def rewrite(self, batch: MicroBatch) -> Terms:
        """Return the loss as TRL's on rewritten log-probs, plus a KL or a policy term that TRL does not have."""
        trainer, args, own = self.trainer, self.trainer.args, self.trainer.args.loss
        objective.check(batch, args)
        clean = batch.without_garbage()
        loss_type, level = trainer.loss_type, trainer.importance_sampling_level
        rewritten = batch  # TRL's losses may read values under the mask
        if own.is_ours:
            loss_type, rewritten = own.host, clean
        if own.rewrite is not None:
            level, rewritten = "token", own.rewrite(clean)
        statistic, masked = self._masks(clean)
        keep = functools.reduce(torch.mul, masked.values()) if masked else None
        attributes: dict[str, Any] = {}
        policy_term: list[tuple[float, Tensor]] = []
        if own.policy_term is not None:
            policy_term.append((1.0, self._policy_term(own.policy_term, clean, keep, attributes)))
            keep = torch.zeros_like(clean.mask[:, :1])  # nothing is left of TRL's,
            rewritten = objective.finite_ratios(clean)  # if it is finite
            attributes |= own.in_trls_terms(trainer) if own.in_trls_terms else {}

        def own_terms() -> list[tuple[float, Tensor]]:
            estimates = {} if trainer.beta == 0.0 else objective.kl_estimates(clean, args)
            self._measure(clean, statistic, masked, estimates)
            if not self._has_own_kl:
                return policy_term
            self.trainer.metrics.token_mean("kl", estimates[args.kl_estimator], clean.mask)
            return [*policy_term, (trainer.beta, estimates[args.kl_estimator])]

        return Terms(
            batch=rewritten,
            loss_type=loss_type,
            importance_sampling_level=level,
            reduction=LOSSES[loss_type].reduction,
            with_kl=not self._has_own_kl,
            keep=keep,
            attributes=attributes,
            own=own_terms,
        )

    def _masks(self, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the statistic of the off-policy mask, and all masks that are on: name -> bool, True = keep."""
        threshold = self.trainer.off_policy_mask_threshold
        sampler_logps = batch.old_logps if batch.sampler_logps is None else batch.sampler_logps
        keep = objective.sampler_masks(batch, self.trainer.args)
        if threshold is not None:
            decide = self.trainer.get_off_policy_mask  # a subclass may have its own, or wrap ours
            is_ours = is_known(decide) and not hasattr(decide, "__wrapped__")
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

    def _policy_term(self, term: Any, batch: MicroBatch, keep: Tensor | None, attributes: dict[str, Any]) -> Tensor:
        """Return a policy term of our own with TRL's masks and weights of the policy term."""
        is_kept = None
        if self.trainer.top_entropy_quantile < 1.0:
            quantile = 1 - self.trainer.top_entropy_quantile
            is_kept = self.trainer.get_high_entropy_mask(batch.entropies, batch.mask, quantile)
            attributes["get_high_entropy_mask"] = lambda *_args, **_kwargs: is_kept  # processes communicate once
        values = term(batch, self.trainer, None if is_kept is None else is_kept.bool())
        if self.trainer.use_vllm and self.trainer.vllm_importance_sampling_correction:
            assert batch.sampler_weights is not None
            values = values * batch.sampler_weights
        return values if keep is None else values * keep

    def _measure(
        self, batch: MicroBatch, statistic: Tensor, keep: dict[str, Tensor], estimates: dict[str, Tensor]
    ) -> None:
        """Log statistics that the later masks and clips would hide."""
        log_s = importance.sequence_log_ratio(batch.logps.detach(), batch.old_logps, batch.mask)
        self.trainer.metrics.spread("ratio/sequence", log_s.exp(), batch.mask)
        means = {f"kl/{name}": (values, batch.mask) for name, values in estimates.items()}
        means |= objective.dropped(keep, batch.mask)
        quantiles = {"off_policy": (statistic, batch.mask.any(-1, keepdim=True))}
        sizes = {}
        if batch.sampler_logps is not None:
            log_ratio, of_sampler = objective.mismatch(batch)
            means |= of_sampler
            quantiles["mismatch/log_ratio"] = log_ratio
            sizes["mismatch/effective_sample_size"] = log_ratio
        self.trainer.metrics.pooled(means=means, quantiles=quantiles, sample_sizes=sizes)
