"""The trainer: it rewrites inputs of TRL's loss, and moves and saves the reference. It has no formulas."""

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
from trl_steady.card import add_methods
from trl_steady.config import GRPOConfig
from trl_steady.deprecations import ignore_trls
from trl_steady.functional import importance, masks
from trl_steady.host import MicroBatch, default_output_dir, overridden
from trl_steady.host.inputs import refuse_inputs, refuse_reward_functions
from trl_steady.methods import METHODS
from trl_steady.precision import cast_undone, keep_gradients_on_cpu, keep_in_float32, warn_if_steps_round_away
from trl_steady.reference.adapter import base_kept, parameters_kept, refuse_unmovable
from trl_steady.reference.tensors import POLICY, REFERENCE
from trl_steady.results import ResultsCallback
from trl_steady.stepwise import StepwiseTrainer

__all__ = ["GRPOTrainer"]

ignore_trls()


class GRPOTrainer(StepwiseTrainer):
    """`trl.GRPOTrainer` with more losses, a moving reference and checkpoints that resume exactly.

    The constructor is the same. With no option of trl-steady set and `trim_padding=False`, this trainer trains bit for
    bit as TRL's does. The exceptions are listed in `docs/compatibility.md`.

    Args:
        model: As in TRL.
        reward_funcs: As in TRL. For a completion, a function may also return `StepRewards`.
        args: A `trl_steady.GRPOConfig`.
        *positional: TRL's other arguments, in TRL's order.
        **keywords: TRL's other arguments, by name.

    Raises:
        ValueError: `args` is not a `trl_steady.GRPOConfig`.
        ValueError: No parameter is trainable, or bitsandbytes has packed the weights for inference.
        ValueError: The adapter cannot follow the policy as a reference, or vLLM would have to share a quantised base.
        ValueError: An option needs the log-probs of an engine, and there is no engine.
        ValueError: The model does not support `token_budget` or `share_prompts`.
        ValueError: The model, or the way rollouts are generated, does not support `router_replay` or
            `keep_sampling_mask`.
        ValueError: A dataset, the tokenizer or a reward function does not fit the others.
        ValueError: Before the first optimizer step, a subclass overrides a method in which an option acts, without
            calling `super()`.

    Warns:
        UserWarning: An off-policy mask has no effect, because every update is on-policy or the clip has silenced the
            same sequences.
        UserWarning: `trim_padding` has to keep padding.
        UserWarning: Steps of the learning rate's size round away on most entries of a bf16 adapter.
        UserWarning: The model is a checkpoint whose reference had moved.
    """

    args: GRPOConfig
    _reference: ReferenceRefreshCallback | None = None

    @functools.wraps(trl.GRPOTrainer.__init__, assigned=())  # for inspect.signature and tools that use it
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
                    f"the model has an adapter named {REFERENCE!r}, a name reserved for the reference. Delete it with "
                    f"model.delete_adapter({REFERENCE!r}), or load it under another name."
                )
            config = model.peft_config[POLICY]  # TRL's constructor adds another adapter from it
        # TRL's constructor refuses sync_ref_model with PEFT, and adds its own callback without PEFT
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
        has_engine = self.use_vllm or self.rollout_func is not None  # its log-probs may differ from the policy's
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
                f"{path} is a checkpoint with a reference that has moved ({REFERENCE_FILE}). Loaded as the model, it "
                "begins a new run whose reference is this policy. To continue that run, build the trainer as it "
                "was built and call train(resume_from_checkpoint=...).",
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
        self.add_callback(ResultsCallback(self.accelerator.print))
        if self.accelerator.is_main_process:  # print alone would do so on each machine
            self.accelerator.print(summary(self), flush=True)  # transformers' logger shows warnings only

    @property
    def reference_refreshes(self) -> list[Refresh]:
        """The refreshes of the reference so far, including those before a resume."""
        return self._reference.refreshes if self._reference else []

    def _leave_base_alone(self, model: PeftModel) -> None:
        """Keep a push to vLLM from changing a quantised base, and from sending the modules of the reference."""
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
        """Run TRL's rollout without changing which parameters are trainable.

        TRL switches to the reference's adapter and back, which would change that.
        """
        if self._reference is None:
            return super().rollout(inputs)
        with parameters_kept(self.model):
            return super().rollout(inputs)

    def generate(self, prompt_ids: list[list[int]], *arguments: Any, **keywords: Any) -> tuple[list[list[int]], Any]:
        """Generate as TRL does. With `adapter_dtype` or a moving reference, TRL's cast of the model is undone."""
        is_ours = self.args.adapter_dtype is not None or self._reference is not None
        if not (is_ours and self.args.use_transformers_continuous_batching):
            return super().generate(prompt_ids, *arguments, **keywords)
        with cast_undone(self.model):  # old log-probs must be those of the trained policy
            return super().generate(prompt_ids, *arguments, **keywords)

    def save_policy(self, folder: str | None, state_dict: Any) -> None:
        """Save a plain PEFT or transformers model, without the reference."""
        model = self.accelerator.unwrap_model(self.model)
        if self._reference is None or not isinstance(model, PeftModel):
            return super().save_policy(folder, state_dict)
        alone = functools.partial(model.save_pretrained, selected_adapters=[POLICY])
        with overridden(model, {"save_pretrained": alone}):
            super().save_policy(folder, state_dict)

    def create_model_card(self, *arguments: Any, **keywords: Any) -> None:
        """Write TRL's model card, and add the methods that were on and their citations."""
        super().create_model_card(*arguments, **keywords)
        if self.is_world_process_zero():
            seen = {"rewards"} if self.has_step_rewards else set()
            on = [method for method in METHODS if method.is_on(self.args) or method.kind in seen]
            add_methods(Path(self.args.output_dir or "", "README.md"), on, self.args)

    def add_to_checkpoint(self, checkpoint: Path) -> None:
        """Save the reference and its counters in the checkpoint, beside the rest."""
        super().add_to_checkpoint(checkpoint)
        if self._reference:
            self._reference.save(checkpoint)

    def load_model_from(self, checkpoint: Path, model: torch.nn.Module | None) -> None:
        """Load the policy in the dtype it was trained in. PEFT would load a bf16 adapter as float32."""
        if self._reference:  # before PEFT fails on another shape
            self._reference.check(checkpoint)
        with parameters_kept(self.model):
            super().load_model_from(checkpoint, model)

    def take_from_checkpoint(self, checkpoint: Path) -> None:
        """Load the reference and its counters from the checkpoint, beside the rest.

        Raises:
            ValueError: the checkpoint holds a moving reference, and `sync_ref_model` is off.
        """
        super().take_from_checkpoint(checkpoint)
        if self._reference:
            self._reference.load(checkpoint)
        elif (checkpoint / REFERENCE_FILE).is_file():
            raise ValueError(
                f"{checkpoint} holds a moving reference ({REFERENCE_FILE}), and with sync_ref_model=False a resume "
                "would start over with the initial one. Set sync_ref_model=True as in the run that wrote it."
            )

    def compute_loss_context_manager(self) -> contextlib.ExitStack:
        """Return TRL's context, which also checks which methods a step has reached before its last backward."""
        context = super().compute_loss_context_manager()

        def check(kind: type[BaseException] | None, *_: object) -> None:
            if kind is None and self.model.training and self.accelerator.sync_gradients:
                self._first_step.check()

        context.push(check)
        return context

    def micro_batch_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
        """Compute the loss of a micro-batch: rewrite its scores, run TRL's loss, and add a KL that TRL does not have.

        This is TRL's own loss if no option needs a rewrite and there are no log-probs of a sampler to compare.
        """
        self.reached.note("micro_batch_loss")
        args = self.args
        # TRL reads these from the trainer, where a callback may have set them
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
                decide = super().get_off_policy_mask  # TRL's own decides token by token
            keep["off_policy"] = decide(
                advantages=batch.advantages.unsqueeze(1) if batch.advantages.dim() == 1 else batch.advantages,
                per_token_logps=batch.logps,
                sampling_per_token_logps=sampler_logps,
                mask=batch.mask,
                off_policy_threshold=threshold,
            ).bool()
        rewritten = scored  # TRL's losses may read values under the mask
        if args.has_sequence_ratio_loss:  # GRPO's reduction: the mean over sequences of the mean over tokens
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
        """Log statistics that the later masks and clips would hide."""
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
        """Return TRL's off-policy mask, with one decision for each sequence, by the sign of its mean advantage.

        DeepSeek-V3.2 (arXiv 2512.02556, section 3.1) masks sequences. TRL's own method decides token by token if the
        advantages are (B, T).

        Returns:
            (B, 1) in the dtype of `mask`, as in TRL: 1 = keep, 0 = drop.
        """
        statistic = masks.off_policy_statistic(per_token_logps, sampling_per_token_logps, mask.bool())
        keep = masks.off_policy_mask(advantages, statistic, mask.bool(), threshold=off_policy_threshold)
        return keep.to(mask.dtype)
