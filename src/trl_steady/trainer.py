"""`trl.GRPOTrainer` with our losses and our reference: what is rewritten, moved and saved, and how. No formulas."""

import contextlib
import functools
import warnings
from pathlib import Path
from typing import Any

import torch
import trl
from peft import PeftModel
from torch import Tensor

from trl_steady import objective
from trl_steady.active import FirstStepCheck, summary
from trl_steady.adapters import merged_weights
from trl_steady.callbacks import REFERENCE_FILE, ReferenceRefreshCallback, Refresh
from trl_steady.config import GRPOConfig
from trl_steady.functional import importance, masks
from trl_steady.host import MicroBatch, default_output_dir, overridden
from trl_steady.host.inputs import refuse_inputs, refuse_reward_functions
from trl_steady.precision import cast_undone, keep_gradients_on_cpu, keep_in_float32, warn_if_steps_round_away
from trl_steady.reference.adapter import base_kept, parameters_kept, refuse_unmovable
from trl_steady.reference.tensors import POLICY, REFERENCE
from trl_steady.stepwise import StepwiseTrainer

__all__ = ["GRPOTrainer"]


class GRPOTrainer(StepwiseTrainer):
    """`trl.GRPOTrainer`, same constructor, with our losses, a moving reference, and checkpoints that resume exactly.

    With nothing of ours asked for and `trim_padding=False` it trains as TRL's trainer does, bit for bit, with the
    exceptions that `docs/compatibility.md` lists.

    Args:
        model: As TRL's.
        reward_funcs: As TRL's; for a completion they may also return `StepRewards`.
        args: A `trl_steady.GRPOConfig`.
        *positional: TRL's other arguments, in TRL's order.
        **keywords: TRL's other arguments, by name.

    Raises:
        ValueError: `args` is not ours, nothing is trainable, bitsandbytes has packed the weights for inference, the
            adapter cannot follow as a reference, vLLM would have to share a quantised base, an option needs the
            log-probs of an engine and there is none, the model cannot do what `token_budget` or `share_prompts`
            ask for, or it or what generates cannot replay routes; a dataset, the tokenizer or a reward function
            does not fit the others. Before the first optimizer step: a subclass overrides a method in which an option
            acts, without calling `super()`.

    Warns:
        UserWarning: an off-policy mask cannot act, as every update is on-policy or the clip has silenced the same
            sequences; `trim_padding` has to leave padding in; most of a bf16 adapter cannot take steps of the learning
            rate's size; the model is a checkpoint whose reference had moved.
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
        refuse_reward_functions(reward_funcs)
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
        refuse_inputs(self, self.text_tokenizer)
        if args.adapter_dtype is not None:
            keep_in_float32(self.model, loaded, args.deepspeed_plugin)
        if not any(parameter.requires_grad for parameter in self.model.parameters()):
            raise ValueError(
                "the model has no trainable parameter, so that training would change nothing. Set "
                "requires_grad=True on some, or load a PEFT adapter with PeftModel.from_pretrained(..., "
                "is_trainable=True)."
            )
        keep_gradients_on_cpu(self.model)
        warn_if_steps_round_away(self.model, args.learning_rate)
        has_engine = self.use_vllm or self.rollout_func is not None  # whose log-probs may differ from the policy's
        if not has_engine:
            if args.sampler_options:
                option = args.sampler_options[0]
                raise ValueError(
                    f"{option}={getattr(args, option)!r} compares the trainer with the engine that samples, and here "
                    f"transformers generates with the policy itself. Set use_vllm=True, or leave {option} unset."
                )
            for message in args.idle_without_engine:
                warnings.warn(message, UserWarning, stacklevel=2)
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
        self._first_step = FirstStepCheck(self)
        self.add_callback(self._first_step)
        self.accelerator.print(summary(self), flush=True)  # a logger would hide it: transformers' shows warnings only

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
                "merged. Serve the unquantised model with `vllm serve` and set vllm_mode='server', or "
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

    def generate(self, prompt_ids: list[list[int]], *arguments: Any, **keywords: Any) -> tuple[list[list[int]], Any]:
        """Generate as TRL does. With `adapter_dtype` or a moving reference, TRL's cast of the model is undone."""
        is_ours = self.args.adapter_dtype is not None or self._reference is not None
        if not (is_ours and self.args.use_transformers_continuous_batching):
            return super().generate(prompt_ids, *arguments, **keywords)
        with cast_undone(self.model):  # so that old log-probs are those of the policy that is trained
            return super().generate(prompt_ids, *arguments, **keywords)

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

    def compute_loss_context_manager(self) -> contextlib.ExitStack:
        """Return TRL's context, which also checks what the optimizer step has reached before its last backward."""
        context = super().compute_loss_context_manager()

        def check(kind: type[BaseException] | None, *_: object) -> None:
            if kind is None and self.model.training and self.accelerator.sync_gradients:
                self._first_step.check()

        context.push(check)
        return context

    def micro_batch_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
        """Score, rewrite, TRL's own loss, and the KL that TRL cannot express.

        TRL alone, where nothing of ours is asked for and no sampler's log-probs are there to be compared.
        """
        self.reached.note("micro_batch_loss")
        args = self.args
        # the trainer's own attributes where TRL reads them, since a callback may have set them
        loss_type, level, threshold = self.loss_type, self.importance_sampling_level, self.off_policy_mask_threshold
        own_kl = self.beta != 0.0 and not args.has_trls_kl(level)
        ours = args.has_sequence_ratio_loss or own_kl or threshold is not None or args.sampler_options
        if not ours and "sampling_per_token_logps" not in inputs:
            return super().micro_batch_loss(model, inputs)
        scored = self.score(model, inputs)
        objective.check(scored, args)
        batch = scored.without_garbage()
        sampler_logps = batch.old_logps if batch.sampler_logps is None else batch.sampler_logps
        statistic = masks.off_policy_statistic(batch.logps, sampler_logps, batch.mask)
        keep = objective.sampler_masks(batch, args)
        if threshold is not None:
            decide = self.get_off_policy_mask
            if args.off_policy_mask_level == "token" and decide is GRPOTrainer.get_off_policy_mask:
                decide = super().get_off_policy_mask  # which decides token by token
            keep["off_policy"] = decide(
                advantages=batch.advantages.unsqueeze(1) if batch.advantages.dim() == 1 else batch.advantages,
                per_token_logps=batch.logps,
                sampling_per_token_logps=sampler_logps,
                mask=batch.mask,
                off_policy_threshold=threshold,
            ).bool()
        rewritten = scored  # for a loss of TRL's, which may read what is under the mask
        if args.has_sequence_ratio_loss:  # with GRPO's reduction, the mean over sequences of the mean over tokens
            loss_type, rewritten = "grpo", batch
        if args.loss_type == "gspo_token":
            level, rewritten = "token", objective.as_gspo_token(batch)
        loss = self.host_loss(
            model,
            inputs,
            rewritten,
            loss_type=loss_type,
            importance_sampling_level=level,
            with_kl=not own_kl,
            keep=functools.reduce(torch.mul, keep.values()) if keep else None,
        )
        estimates = {} if self.beta == 0.0 else objective.kl_estimates(batch, args)
        if own_kl:
            per_token = estimates[args.kl_estimator]
            weights = self.loss_weights(batch.mask, inputs, loss_type=loss_type, dtype=per_token.dtype)
            loss = loss + self.beta * (weights * per_token).sum()
            self.record_token_mean("kl", per_token, batch.mask)
        log_s = importance.sequence_log_ratio(batch.logps.detach(), batch.old_logps, batch.mask)
        self.record_sequence_spread("ratio/sequence", log_s.exp(), batch.mask)
        self._measure(batch, statistic, keep, estimates)
        return loss

    def _measure(
        self, batch: MicroBatch, statistic: Tensor, keep: dict[str, Tensor], estimates: dict[str, Tensor]
    ) -> None:
        """Log what the masks and clips that follow would hide."""
        means = {f"kl/{name}": values[batch.mask] for name, values in estimates.items()}
        means |= objective.dropped(keep, batch.mask)
        quantiles = {"off_policy": statistic[batch.mask.any(-1, keepdim=True)]}
        sizes = {}
        if batch.sampler_logps is not None:
            log_ratio, of_sampler = objective.mismatch(batch)
            means |= of_sampler
            quantiles["mismatch/log_ratio"] = log_ratio
            sizes["mismatch/effective_sample_size"] = log_ratio
        self.record_pooled(means=means, quantiles=quantiles, sample_sizes=sizes)

    @staticmethod
    def get_off_policy_mask(
        advantages: Tensor,
        per_token_logps: Tensor,
        sampling_per_token_logps: Tensor,
        mask: Tensor,
        off_policy_threshold: float,
    ) -> Tensor:
        """Return TRL's off-policy mask, with one decision a sequence: the sign is that of its mean advantage.

        DeepSeek-V3.2 (arXiv 2512.02556, section 3.1) masks sequences. Given (B, T) advantages, TRL's own decides token
        by token.

        Returns:
            (B, 1) in the mask's dtype, as TRL's: 1 = keep, 0 = drop.
        """
        statistic = masks.off_policy_statistic(per_token_logps, sampling_per_token_logps, mask.bool())
        keep = masks.off_policy_mask(advantages, statistic, mask.bool(), threshold=off_policy_threshold)
        return keep.to(mask.dtype)
