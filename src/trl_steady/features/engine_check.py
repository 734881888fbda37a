"""The engine check as a part: it compares a rollout's log-probs of the sampler with those of the policy."""

# pyright: reportUnknownMemberType=false
# annotations of torch and accelerate are partial

import contextlib
from collections.abc import Generator, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from trl_steady.core.feature import Active
from trl_steady.core.types import Rollout
from trl_steady.features.legacy import Part
from trl_steady.functional import kl
from trl_steady.trl_bridge.log_probs import policy_log_probs
from trl_steady.trl_bridge.vllm import keeping_log_probs

_MOST = 10.0
"""Most nats that a token counts: an outlier among hundreds, such as a flipped expert, is not another model."""


class EngineCheckPart(Part):
    """Refuses an engine that serves another model than the policy, with `engine_check`.

    An engine that gets an adapter alone has loaded the base itself. The part compares the first rollout that each call
    of `train` asks its engine for, also after a resume.
    """

    _is_due = False

    def built(self) -> None:
        """Find out if there is an engine to compare. Warn if a setting of sampling rules that out."""
        trainer, args = self.trainer, self.trainer.args
        self._acts = args.engine_check is not None and (trainer.use_vllm or trainer.rollout_func is not None)
        if self._acts and args.uncorrected:
            self._acts = False
            self._skip(f"the log-probs of the policy are without {' and '.join(args.uncorrected)}")

    def describe(self) -> Iterable[Active]:
        """Return that an engine is checked."""
        args = self.trainer.args
        if args.use_vllm and args.engine_check and not args.uncorrected:
            yield Active("engine check: the first rollout is compared with the policy", ("engine_check",))

    def beginning(self) -> None:
        """Compare the next rollout of the training."""
        self._is_due = self._acts

    @contextlib.contextmanager
    def rolling(self, rollout: Rollout) -> "Generator[None]":
        """Keep the log-probs of the engine, for which RLOO's trainer does not ask."""
        self._compares = self._is_due and self.trainer.model.training
        keeps = self._compares and self.trainer.use_vllm
        with keeping_log_probs(self.trainer.vllm_generation) if keeps else contextlib.nullcontext([]) as self._answers:
            yield

    def columns(self, rollout: Rollout) -> Mapping[str, Any]:
        """Compare the rollout if that is due, and refuse another model. There is no column."""
        if not self._compares or rollout.from_checkpoint:
            return {}
        trainer, limit = self.trainer, self.trainer.args.engine_check
        logps = rollout.samples.get("old_per_token_logps")
        logps = policy_log_probs(trainer, rollout) if logps is None else logps
        sums = disagreement(logps, self._sampler_logps(rollout, logps), rollout.is_sampled)
        reduced = cast(Tensor, trainer.accelerator.reduce(sums, "sum"))
        total, scored, sampled = cast(list[float], reduced.tolist())
        self._is_due = not sampled  # all answers were cut off and masked
        if sampled and not scored:
            self._skip("the rollout has no log-probs of the sampler")
        elif sampled and not total / scored <= limit:  # NaN too
            raise ValueError(
                f"engine_check={limit}: engine and policy differ by a mean k3 of {total / scored:.3g} nats per token. "
                "The engine has another base or no adapter, or a rollout_func returns other log-probs. Start the "
                "engine with the policy's base, set vllm_adapter_sync=False, or raise engine_check if you expect it."
            )
        return {}

    def _sampler_logps(self, rollout: Rollout, like: Tensor) -> Tensor:
        column: Tensor | None = rollout.samples.get("sampling_per_token_logps")
        found = torch.full(like.shape, torch.nan) if column is None else column
        if column is None and len(self._answers) == 1:  # more: turns of a subclass
            for row, answer in zip(found, self._answers[0][2], strict=True):
                row[: len(answer)] = torch.tensor([torch.nan if logps[0] is None else logps[0] for logps in answer])
        return found.to(like.device)

    def _skip(self, why: str) -> None:
        if self.trainer.accelerator.is_main_process:
            option = f"engine_check={self.trainer.args.engine_check}"
            self.warn(f"{option} cannot act: {why}. Change that, or set engine_check=None.")


def disagreement(logps: Tensor, sampler_logps: Tensor, is_sampled: Tensor) -> Tensor:
    """Return sums (3,) of one process, which add up over processes: of k3 in nats, of its tokens, of sampled tokens.

    All tensors are (B, T). The sampler's log-probs are NaN for tokens that it could not score.
    """
    scored = is_sampled & ~sampler_logps.isnan()
    k3 = kl.k3(sampler_logps.where(scored, 0), logps.where(scored, 0)).clamp(max=_MOST)  # else as in `mismatch/kl`
    return torch.stack([k3.sum(), scored.sum(), is_sampled.sum()])
