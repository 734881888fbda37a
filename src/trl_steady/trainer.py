"""`trl.GRPOTrainer` with our losses and our reference: what is rewritten, moved and saved, and how. No formulas."""

import functools
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import trl
from peft import PeftModel
from torch import Tensor

from trl_steady.adapters import merged_weights
from trl_steady.callbacks import REFERENCE_FILE, ReferenceRefreshCallback, Refresh
from trl_steady.config import GRPOConfig
from trl_steady.functional import importance, kl, reduction
from trl_steady.host import HostTrainer, MicroBatch, default_output_dir, overridden
from trl_steady.precision import keep_gradients_on_cpu, keep_in_float32, warn_if_steps_round_away
from trl_steady.reference.adapter import base_kept, parameters_kept, refuse_unmovable
from trl_steady.reference.tensors import POLICY, REFERENCE

__all__ = ["GRPOTrainer"]


class GRPOTrainer(HostTrainer):
    """`trl.GRPOTrainer`, same constructor, with our losses, a moving reference, and checkpoints that resume exactly.

    With a `loss_type` of TRL's and `sync_ref_model=False` it trains as TRL's trainer does, bit for bit.

    Args:
        model: As TRL's.
        reward_funcs: As TRL's.
        args: A `trl_steady.GRPOConfig`.
        *positional: TRL's other arguments, in TRL's order.
        **keywords: TRL's other arguments, by name.

    Raises:
        ValueError: `args` is not ours, nothing is trainable, bitsandbytes has packed the weights for inference, the
            adapter cannot follow as a reference, or vLLM would have to share a quantised base.

    Warns:
        UserWarning: an off-policy mask cannot act, as every update is on-policy; most of a bf16 adapter cannot
            take steps of the learning rate's size; the model is a checkpoint whose reference had moved.
    """

    args: GRPOConfig
    _reference: ReferenceRefreshCallback | None = None

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
        loaded: dict[str, Tensor] = {}
        if args.adapter_dtype is not None and isinstance(model, PeftModel):
            loaded = {name: p.data for name, p in model.named_parameters() if p.requires_grad}
        config = None
        if args.sync_ref_model and isinstance(model, PeftModel):
            refuse_unmovable(model)
            if REFERENCE in model.peft_config:
                raise ValueError(
                    f"the model has an adapter named {REFERENCE!r}, the name of the reference's. Delete it with "
                    f"model.delete_adapter({REFERENCE!r}), or load it under another name."
                )
            config = model.peft_config[POLICY]  # of which TRL's constructor adds another
        # TRL's constructor refuses sync_ref_model with PEFT, and without PEFT adds a callback of its own
        with overridden(args, {"sync_ref_model": False}), base_kept(config):
            super().__init__(model, reward_funcs, args, *positional, **keywords)
        if args.adapter_dtype is not None:
            keep_in_float32(self.model, loaded, args.deepspeed_plugin)
        if not any(parameter.requires_grad for parameter in self.model.parameters()):
            raise ValueError(
                "the model has no trainable parameter, so that training would change nothing. If it is a PEFT adapter "
                "loaded from disk, load it with PeftModel.from_pretrained(..., is_trainable=True)."
            )
        keep_gradients_on_cpu(self.model)
        warn_if_steps_round_away(self.model, args.learning_rate)
        has_engine = self.use_vllm or self.rollout_func is not None  # whose log-probs may differ from the policy's
        if args.off_policy_mask_threshold is not None and args.is_on_policy and not has_engine:
            warnings.warn(
                f"off_policy_mask_threshold={args.off_policy_mask_threshold} cannot act: every update is on-policy, "
                f"so that policy and sampler are the same. {args.way_off_policy}",
                UserWarning,
                stacklevel=2,
            )
        path = Path(model if isinstance(model, str | Path) else getattr(model, "name_or_path", ""))
        if (path / REFERENCE_FILE).is_file():
            warnings.warn(
                f"{path} is a checkpoint with a reference that has moved ({REFERENCE_FILE}); loaded as the model, it "
                "begins a new run whose reference is this policy. To go on with that run, build the trainer as it was "
                "built and call train(resume_from_checkpoint=...).",
                UserWarning,
                stacklevel=2,
            )
        if args.sync_ref_model:
            self._reference = ReferenceRefreshCallback(
                self,
                steps=args.ref_model_sync_steps,
                alpha=args.ref_model_mixup_alpha,
                kl=args.ref_model_sync_kl,
                reset_optimizer=args.ref_model_sync_reset_optimizer,
            )
            self.add_callback(self._reference)
        if self.use_vllm and isinstance(self.model, PeftModel):
            self._leave_base_alone(self.model)

    @property
    def reference_refreshes(self) -> list[Refresh]:
        """The moves of the reference so far, those before a resume included."""
        return self._reference.refreshes if self._reference else []

    def _leave_base_alone(self, model: PeftModel) -> None:
        """Keep a push to vLLM from changing a quantised base, or from sending the reference's modules along."""
        quantised = getattr(model.get_base_model(), "is_quantized", False)
        if quantised and self.vllm_mode == "colocate":
            raise ValueError(
                "vllm_mode='colocate' quantises the engine like the base, and cannot take weights with the adapter "
                "merged. Serve the unquantised model with `trl vllm-serve` and set vllm_mode='server', or "
                "use_vllm=False."
            )
        if quantised:
            self.push_to_engine(lambda own: merged_weights(model))
        elif self._reference:
            self.push_to_engine(lambda own: (pair for pair in own() if REFERENCE not in pair[0].split(".")))

    def rollout(self, inputs: Any) -> dict[str, Any]:
        """TRL's, which switches to the reference's adapter and back; what is trainable stays so."""
        if self._reference is None:
            return super().rollout(inputs)
        with parameters_kept(self.model):
            return super().rollout(inputs)

    def save_policy(self, folder: str | None, state_dict: Any) -> None:
        """A plain PEFT or transformers model: the reference is no part of it."""
        model = self.accelerator.unwrap_model(self.model)
        if self._reference is None or not isinstance(model, PeftModel):
            return super().save_policy(folder, state_dict)
        alone = functools.partial(model.save_pretrained, selected_adapters=[POLICY])
        with overridden(model, {"save_pretrained": alone}):
            super().save_policy(folder, state_dict)

    def add_to_checkpoint(self, checkpoint: Path) -> None:
        """And the reference, with its counters."""
        super().add_to_checkpoint(checkpoint)
        if self._reference:
            self._reference.save(checkpoint)

    def load_model_from(self, checkpoint: Path, model: torch.nn.Module | None) -> None:
        """The policy in the dtype it was trained in; PEFT would load a bf16 adapter as float32."""
        if self._reference:  # sooner than PEFT would stumble over another shape
            self._reference.check(checkpoint)
        with parameters_kept(self.model):
            super().load_model_from(checkpoint, model)

    def take_from_checkpoint(self, checkpoint: Path) -> None:
        """And the reference, with its counters."""
        super().take_from_checkpoint(checkpoint)
        if self._reference:
            self._reference.load(checkpoint)
        elif (checkpoint / REFERENCE_FILE).is_file():
            raise ValueError(
                f"{checkpoint} holds a moving reference ({REFERENCE_FILE}), and with sync_ref_model=False a resume "
                "would start over with the initial one. Set sync_ref_model=True as in the run that wrote it."
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
