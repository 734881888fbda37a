"""Rollouts without a pass of the old policy, whose log-probs are those of the training pass, as a part."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Protocol

import torch

from trl_steady.functional import importance, masks
from trl_steady.host import models
from trl_steady.host.loss import MicroBatch, Terms
from trl_steady.host.metrics import Masked
from trl_steady.host.names import overrides
from trl_steady.host.part import Part, Rollout, Trainer
from trl_steady.host.rollouts import skipping_old_pass

# TRL's names of what it logs for an engine
_LOGGED = (
    {each: f"sampling/sampling_logp_difference/{each}" for each in ("mean", "max")},
    {each: f"sampling/importance_sampling_ratio/{each}" for each in ("min", "mean", "max")},
)


class _Trainer(Trainer, Protocol):
    """GRPO's trainer."""

    vllm_importance_sampling_mode: str
    vllm_importance_sampling_clip_min: float | None
    vllm_importance_sampling_clip_max: float | None


class OldPassPart(Part):
    """Skips TRL's pass of the old policy in a rollout that feeds one update, with `skip_old_pass`.

    The old log-probs are then the training pass's own, detached. The weights of TRL's engine correction, which TRL
    computes in the rollout, are computed from them in each micro-batch. Evaluations stay as in TRL.
    """

    trainer: _Trainer
    is_skipped = False
    why_not: str | None = None
    """Reason why an on-policy trainer runs the pass, if the config shows none; None if there is no such reason."""

    def built(self) -> None:
        """Find out if the pass can be skipped. Raise if `skip_old_pass=True` and it cannot."""
        trainer, args = self.trainer, self.trainer.args
        self._of_rollout: list[tuple[Masked, Masked]] = []
        is_asked = args.trim_padding if args.skip_old_pass is None else args.skip_old_pass
        if not is_asked or not args.has_old_pass or args.why_old_pass:
            return
        if randomness := models.randomness_of(trainer.model):
            self.why_not = f"{randomness} makes two passes differ"
            if args.skip_old_pass:
                self.refuse("skip_old_pass=True", self.why_not, "Set the rate to 0, or leave it unset.")
        elif args.skip_old_pass is None:
            found = dict.fromkeys([*overrides(trainer, "rollout"), *overrides(trainer, "log_probs")])
            self.why_not = f"{' and '.join(found)} may need it" if found else None
        self.is_skipped = self.why_not is None

    @contextlib.contextmanager
    def rolling(self, rollout: Rollout) -> Iterator[None]:
        """Skip the pass in training."""
        self._log_rollout()
        is_skipped = self.is_skipped and self.trainer.model.training
        with skipping_old_pass(self.trainer) if is_skipped else contextlib.nullcontext():
            yield

    def rewrites(self, inputs: Mapping[str, object]) -> bool:
        """Return True for RLOO's inputs, which lack old log-probs."""
        return self.is_skipped and "old_logps" in inputs

    def rewrite(self, batch: MicroBatch) -> Terms:
        """Return RLOO's loss with the old log-probs of the micro-batch."""
        return Terms(batch, "rloo", "sequence", "sequence_mean", with_kl=True)

    def corrected(self, batch: MicroBatch) -> MicroBatch:
        """Return GRPO's micro-batch with the weights of TRL's engine correction, which its rollout lacks."""
        if not self.is_skipped or batch.sampler_weights is not None or batch.sampler_logps is None:
            return batch
        trainer, mode = self.trainer, self.trainer.vllm_importance_sampling_mode
        mismatch = masks.log_ratio(batch.old_logps, batch.sampler_logps)
        bounds = {"low": trainer.vllm_importance_sampling_clip_min, "high": trainer.vllm_importance_sampling_clip_max}
        weights = importance.engine_weights(mismatch, batch.mask, mode=mode, **bounds)
        is_counted = torch.ones_like(weights, dtype=torch.bool) if mode.startswith("sequence") else batch.mask
        difference = mismatch.abs(), batch.mask & ~batch.sampler_logps.isnan()
        self._of_rollout.append((difference, (weights, is_counted)))
        return replace(batch, sampler_weights=weights)

    def stepping(self) -> None:
        """Forget a rollout whose step raised."""
        self._of_rollout.clear()

    def after_last_backward(self) -> None:
        """Log what TRL logs of a rollout."""
        self._log_rollout()

    def _log_rollout(self) -> None:
        for names, of_micro_batches in zip(_LOGGED, zip(*self._of_rollout, strict=True), strict=False):
            values, mask = (
                torch.cat([each.flatten() for each in parts]) for parts in zip(*of_micro_batches, strict=True)
            )
            self.trainer.metrics.over_processes(names, values, mask)
        self._of_rollout.clear()
