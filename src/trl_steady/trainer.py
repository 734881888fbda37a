"""`trl.GRPOTrainer` with our losses: which micro-batches are rewritten, and how. No formulas."""

import functools
import warnings
from dataclasses import replace
from typing import Any

import torch
import trl
from torch import Tensor

from trl_steady.config import GRPOConfig
from trl_steady.functional import importance, kl, reduction
from trl_steady.host import HostTrainer, MicroBatch, default_output_dir

__all__ = ["GRPOTrainer"]


class GRPOTrainer(HostTrainer):
    """`trl.GRPOTrainer`, same constructor, that also trains `loss_type="gspo"` and `"gspo_token"`.

    With a `loss_type` of TRL's it is TRL's trainer, bit for bit.

    Args:
        model: As TRL's.
        reward_funcs: As TRL's.
        args: A `trl_steady.GRPOConfig`.
        *positional: TRL's other arguments, in TRL's order.
        **keywords: TRL's other arguments, by name.

    Raises:
        ValueError: `args` is not ours, nothing is trainable, or bitsandbytes has packed the weights for inference.

    Warns:
        UserWarning: an off-policy mask cannot act, because every update is on-policy.
    """

    args: GRPOConfig

    @functools.wraps(trl.GRPOTrainer.__init__, assigned=())  # for inspect.signature and what reads it
    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        *positional: Any,
        **keywords: Any,
    ) -> None:
        if args is None:
            args = GRPOConfig(default_output_dir(model))
        if not isinstance(args, GRPOConfig):
            raise ValueError(
                f"args is a {type(args).__module__}.{type(args).__qualname__}, which has none of trl_steady's "
                "options. Import GRPOConfig from trl_steady too: from trl_steady import GRPOConfig, GRPOTrainer."
            )
        super().__init__(model, reward_funcs, args, *positional, **keywords)
        if not any(parameter.requires_grad for parameter in self.model.parameters()):
            raise ValueError(
                "the model has no trainable parameter, so that training would change nothing. If it is a PEFT adapter "
                "loaded from disk, load it with PeftModel.from_pretrained(..., is_trainable=True)."
            )
        keep_gradients_on_cpu(self.model)
        has_engine = self.use_vllm or self.rollout_func is not None  # whose log-probs may differ from the policy's
        if args.off_policy_mask_threshold is not None and args.is_on_policy and not has_engine:
            warnings.warn(
                f"off_policy_mask_threshold={args.off_policy_mask_threshold} cannot act: every update is on-policy, "
                f"so that policy and sampler are the same. {args.way_off_policy}",
                UserWarning,
                stacklevel=2,
            )

    def micro_batch_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
        """Score, rewrite, TRL's own loss, and the KL that TRL cannot express."""
        if not self.args.has_sequence_ratio_loss:
            return super().micro_batch_loss(model, inputs)
        batch = self.score(model, inputs)
        _check_advantages(batch, self.args.loss_type)
        batch = batch.without_garbage()
        # TRL would weigh its corrected KL by the sequence ratio (huggingface/trl#6586); uncorrected, TRL's is right
        own_kl = batch.ref_logps is not None and self.beta != 0.0 and self.args.use_bias_correction_kl
        level, rewrite = _REWRITES[self.args.loss_type]
        loss = self.host_loss(
            model,
            inputs,
            rewrite(batch),
            loss_type="grpo",  # the reduction of both objectives: mean over sequences of the mean over tokens
            importance_sampling_level=level,
            with_kl=not own_kl,
        )
        if own_kl:
            loss = loss + self.beta * self._corrected_kl(batch)
        log_s = importance.sequence_log_ratio(batch.logps.detach(), batch.old_logps, batch.mask)
        self.record_sequence_spread("ratio/sequence", log_s.exp(), batch.mask)
        return loss

    def _corrected_kl(self, batch: MicroBatch) -> Tensor:
        """Reduced as TRL reduces its KL under `loss_type="grpo"`."""
        assert batch.ref_logps is not None
        per_token = kl.importance_corrected(kl.k3(batch.logps, batch.ref_logps), batch.logps - batch.old_logps)
        self.record_token_mean("kl", per_token, batch.mask)
        return reduction.sequence_mean(per_token, batch.mask).mean() / self.accumulation_steps

    @staticmethod
    def get_off_policy_mask(
        advantages: Tensor,
        per_token_logps: Tensor,
        sampling_per_token_logps: Tensor,
        mask: Tensor,
        off_policy_threshold: float,
    ) -> Tensor:
        """TRL's off-policy mask, with one decision a sequence: the sign is that of its mean advantage.

        DeepSeek-V3.2 (arXiv 2512.02556, section 3.1) masks sequences. Given (B, T) advantages, TRL's own decides token
        by token.

        Returns:
            (B, 1), 1 = keep.
        """
        if advantages.shape == mask.shape:
            advantages = reduction.sequence_mean(advantages, mask.bool())
        return trl.GRPOTrainer.get_off_policy_mask(
            advantages, per_token_logps, sampling_per_token_logps, mask, off_policy_threshold
        )


def _as_gspo(batch: MicroBatch) -> MicroBatch:
    """TRL's sequence level is GSPO as it stands."""
    return batch


def _as_gspo_token(batch: MicroBatch) -> MicroBatch:
    """GSPO-token for a token-level loss: every log-prob relative to the policy's own, the old ones the surrogate's.

    TRL's loss depends on differences of log-probs only, so the common origin changes nothing else; the sampler's slot
    carries the old log-probs where there is no engine, or the off-policy mask would read the surrogate.
    """
    origin = batch.logps.detach()
    sampler_logps = batch.old_logps if batch.sampler_logps is None else batch.sampler_logps
    logps, old_logps = importance.gspo_token_surrogate(batch.logps, batch.old_logps, batch.mask)
    return replace(
        batch,
        logps=logps,
        old_logps=old_logps,
        sampler_logps=sampler_logps - origin,
        ref_logps=None if batch.ref_logps is None else batch.ref_logps - origin,
    )


# loss_type -> the level at which TRL's code then works, and the rewriting
_REWRITES = {"gspo": ("sequence", _as_gspo), "gspo_token": ("token", _as_gspo_token)}


def _check_advantages(batch: MicroBatch, loss_type: str) -> None:
    """Refuse advantages of a shape the loss cannot use, or that would broadcast along the wrong axis."""
    shape, (sequences, tokens) = tuple(batch.advantages.shape), batch.mask.shape
    if shape in ((sequences,), (sequences, 1)):
        return
    if shape != (sequences, tokens):
        raise ValueError(
            f"advantages have shape {shape}; loss_type={loss_type!r} takes (B,) = ({sequences},)"
            + (f" or (B, T) = ({sequences}, {tokens})." if loss_type == "gspo_token" else ".")
        )
    if loss_type == "gspo":
        raise ValueError(
            f"advantages have shape (B, T) = {shape}, but loss_type='gspo' has one ratio and one advantage per "
            "sequence. Set loss_type='gspo_token', or give advantages of shape (B,)."
        )


def keep_gradients_on_cpu(model: torch.nn.Module) -> None:
    """Keep bitsandbytes from repacking the 4-bit weights of a model that trains on CPU.

    bitsandbytes (seen in 0.50.2) repacks them in the first eval-mode forward on a CPU with AVX512-BF16; a training
    forward through packed weights then passes no gradient to its input, without a word.

    Raises:
        ValueError: they are packed already. Unpacking would not bring the weights back: the scales have been rounded
            to bf16, and without double quantisation they return in another order.
    """
    module: Any
    for name, module in model.named_modules():
        if getattr(module, "support_avx512bf16_for_cpu", False) and module.weight.device.type == "cpu":
            if getattr(module.weight.quant_state, "packing_format_for_cpu", False):
                raise ValueError(
                    f"bitsandbytes has repacked the 4-bit weights of {name} for inference, because the model was used "
                    "in eval mode on CPU; no gradient would pass through them. Load the model again and build the "
                    "trainer before the first eval-mode forward; evaluations after that do no harm."
                )
            module.support_avx512bf16_for_cpu = False
