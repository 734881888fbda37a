"""PPO's critic: values and targets of a rollout, the critic's loss and its updates."""

import contextlib
import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor

from trl_steady.config.ppo import PPOConfig
from trl_steady.core.tensor_file import TensorFile
from trl_steady.core.types import Construction, LossPass, Rollout, loss_mask
from trl_steady.features.adapters.precision import refuse_unscalable
from trl_steady.features.critic.construction import build_critic
from trl_steady.features.critic.targets import critic_targets
from trl_steady.features.scalar_head.feature import ScalarHeadFeature
from trl_steady.features.scalar_head.model import ScalarHeadModel
from trl_steady.features.scalar_head.optimizer import ScalarHeadOptimizer
from trl_steady.functional import values
from trl_steady.losses import LOSSES
from trl_steady.trl_bridge.loss import run_own_backward, trl_token_weights
from trl_steady.trl_bridge.models import VALUE_ADAPTER, keep_dtypes_and_trainability
from trl_steady.trl_bridge.rollout import with_reference_log_probs
from trl_steady.trl_bridge.trl_state import without_scaler

OPTIMIZER_FILE = TensorFile("critic_optimizer.safetensors", "state of the critic's optimizer")


class Critic(ScalarHeadFeature):
    """Gives a rollout the advantages of a critic, and trains the critic beside the policy."""

    FILE = TensorFile("critic.safetensors", "critic")
    FOLDER = VALUE_ADAPTER
    counts_all_sequences = True
    args: PPOConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    kl_coef: float
    """The coefficient of the KL in the reward, which adapts with `kl_target`."""

    @property
    def critic(self) -> ScalarHeadModel:
        """The critic."""
        assert self.model is not None
        return self.model

    # construction

    def around_init(self, construction: Construction, call_next: Callable[[Construction], None]) -> None:
        """Let TRL's constructor make the reference of the KL in the reward, also if the loss has no KL."""
        if self.args.kl_coef and not self.args.beta:
            construction.seen_by_trl["beta"] = 1.0
        call_next(construction)

    def on_init_end(self) -> None:
        """Make the critic, and refuse setups in which it would not be trained as asked."""
        self.kl_coef = self.args.kl_coef
        self._unscaled = ExitStack()  # a step of the warm-up
        self._refuse_setups()
        critic = build_critic(self.trainer, self.args)
        accelerator = self.trainer.accelerator
        if accelerator.scaler is not None and not self.trainer.is_fsdp_enabled:  # accelerate casts it for FSDP
            refuse_unscalable(critic.named_parameters(), accelerator.device)
        if self.trainer.is_fsdp_enabled:
            critic.join_policy()
        self.adopt(critic)

    def _refuse_setups(self) -> None:
        trainer, args = self.trainer, self.args
        is_adapter = isinstance(trainer.accelerator.unwrap_model(trainer.model), PeftModel)
        works = "DDP (accelerate launch --multi_gpu), FSDP2 with adapters (peft_config)"
        if trainer.is_deepspeed_enabled:
            if trainer.accelerator.mixed_precision == "fp16":  # nobody has run it
                raise _untrainable("fp16 and DeepSpeed, which casts its adapter to fp16", f"bf16, or {works}")
            if args.value_warmup_steps:  # DeepSpeed updates the policy in every step
                raise _untrainable(
                    f"value_warmup_steps={args.value_warmup_steps} and DeepSpeed", f"{works}, or no warm-up"
                )
            if getattr(args.deepspeed_plugin, "zero_stage", None) == 3:
                raise _untrainable("ZeRO-3", f"{works}, or ZeRO-2")
        if trainer.is_fsdp_enabled:
            plugin = trainer.accelerator.state.fsdp_plugin
            if not is_adapter:
                raise _untrainable("FSDP without adapters", f"{works}, or ZeRO-2")
            if getattr(plugin, "fsdp_version", 1) == 1:
                raise _untrainable("FSDP version 1", f"{works}, or ZeRO-2")
            # it would recompute the critic's layers with the policy's adapter
            if getattr(plugin, "activation_checkpointing", False):
                raise _untrainable("activation_checkpointing in fsdp_config", "gradient_checkpointing=True")
        if is_adapter and args.rounds_adapters:
            setting = "use_transformers_continuous_batching=True and bf16=True, with which TRL rounds all adapters"
            raise _untrainable(setting, "bf16=False, or another generation")
        # layers of the critic or of ptx_dataset would be recomputed with the policy's routes
        if args.router_replay and args.gradient_checkpointing and (is_adapter or args.ptx_coef):
            setting = f"router_replay={args.router_replay!r} and gradient_checkpointing=True"
            raise _untrainable(setting, "one of the two")

    @functools.cached_property
    def optimizer(self) -> ScalarHeadOptimizer:
        """The critic's optimizer, which is made when the model is prepared for a training."""
        args = self.args
        return ScalarHeadOptimizer(
            self.critic, self.trainer, args.weight_decay, (args.adam_beta1, args.adam_beta2), args.adam_epsilon
        )

    # a rollout

    def around_rollout(self, rollout: Rollout, call_next: Callable[[Rollout], dict[str, Any]]) -> dict[str, Any]:
        """Let TRL compute the log-probs that the KL in the reward needs. Switching adapters changes no trained one."""
        log_probs: AbstractContextManager[None] = contextlib.nullcontext()
        if self.args.kl_coef:
            log_probs = with_reference_log_probs(self.trainer)
        with keep_dtypes_and_trainability(self.trainer.model), log_probs:
            return call_next(rollout)

    def on_rollout_end(self, rollout: Rollout) -> None:
        """Add values, returns and advantages (B, T) of the action tokens; NaN returns where there is no reward."""
        args = self.args
        old_values, after = self._rollout_values(rollout)
        columns, kl_moments = critic_targets(self.trainer, args, rollout, old_values, after, self.kl_coef)
        rollout.samples.update(columns)
        if args.kl_target is not None and self.trainer.model.training:
            count, total, _ = kl_moments.tolist()
            self.kl_coef = values.adapted_kl_coef(
                self.kl_coef,
                total / max(count, 1),
                target=args.kl_target,
                horizon=args.kl_horizon,
                completions=int(count),
            )

    def _rollout_values(self, rollout: Rollout) -> tuple[Tensor, Tensor | None]:
        """Return the values (B, T) of a rollout's tokens and, with `bootstrap_truncated`, those (B,) after them."""
        samples = rollout.samples
        with torch.no_grad():
            if not self.args.bootstrap_truncated:
                return self.trainer.values(self.critic, samples, rollout, self.batch_size), None
            lengths = samples["completion_mask"].sum(1, keepdim=True)
            longer = {**samples, **_append_token(samples, lengths)}
            all_values = self.trainer.values(self.critic, longer, rollout, self.batch_size)
            return all_values[:, :-1], all_values.gather(1, lengths).squeeze(1)

    # a micro-batch

    def around_loss(self, loss: LossPass, call_next: Callable[[LossPass], Tensor]) -> Tensor:
        """Return the policy's loss plus the critic's, which share no parameter. In warm-up the policy's is 0.

        The critic's backward pass runs first, so that memory holds one of the two graphs at a time.
        """
        compute = functools.partial(self._loss, loss.inputs)
        if self.trainer.awaits_backward:
            critic_loss = run_own_backward(self.trainer, loss, compute, self.optimizer.scaler)
            self.optimizer.add_loss(critic_loss)
        else:  # of an evaluation, before which there may be no optimizer
            critic_loss = compute()
        policy_loss = call_next(loss)
        if self.is_warming_up:
            policy_loss = 0.0 * policy_loss
        return critic_loss + policy_loss

    @property
    def is_warming_up(self) -> bool:
        """True in optimizer steps in which only the critic learns."""
        return self.trainer.model.training and self.trainer.state.global_step < self.args.value_warmup_steps

    def _loss(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return the critic's loss of a micro-batch."""
        trainer = self.trainer
        clip = self.args.cliprange_value
        new_values = trainer.values(self.critic, inputs)
        all_tokens = loss_mask(inputs)
        mask = all_tokens & ~inputs["returns"].isnan()
        token_losses = values.value_loss(
            new_values, inputs["values"], inputs["returns"].where(mask, 0), cliprange=clip
        )
        weights = trl_token_weights(trainer, all_tokens, inputs, LOSSES[trainer.loss_type].trl_loss, new_values.dtype)
        means = {"value/loss": (token_losses.detach(), mask)}
        if clip is not None:
            means["value/clip_ratio"] = ((new_values - inputs["values"]).abs() > clip, mask)
        trainer.metrics.pooled(means=means)
        return (weights * token_losses.where(mask, 0)).sum()

    # steps

    def on_train_begin(self) -> None:
        """Let the critic learn, now that the policy's optimizer is made."""
        self._restore_float32()
        self.optimizer.enable(True)

    def _restore_float32(self) -> None:
        """Make the adapter float32 again: DeepSpeed has cast the policy and all its adapters."""
        if self.critic.adapter is not None and self.trainer.is_deepspeed_enabled:
            for parameter in self.critic.parameters:
                parameter.data = parameter.data.float()

    def on_step_begin(self) -> None:
        """Discard gradients of a step that raised."""
        self._unscaled.close()
        self.optimizer.adamw.zero_grad()
        if self.trainer.state.global_step == self.args.value_warmup_steps > 0:
            # torch takes an empty step to save the state of a sharded optimizer that has none
            self.trainer.optimizer.state.clear()

    def on_backward_end(self) -> None:
        """Update the critic. Its gradients are gone before transformers clips those of the policy."""
        norm = self.optimizer.step(self._learning_rate, "critic")
        if norm is not None:
            norm = norm.view(1)
            self.trainer.metrics.pooled(means={"value/grad_norm": (norm, torch.ones_like(norm, dtype=torch.bool))})
        if self.is_warming_up:
            self.trainer.model.zero_grad()
            if self.trainer.accelerator.scaler is not None:
                self._unscaled.enter_context(without_scaler(self.trainer))

    def on_step_end(self) -> None:
        """Let the policy's optimizer use its loss scaler again."""
        self._unscaled.close()

    @property
    def _learning_rate(self) -> float:
        """The critic's learning rate in this step, which follows the scheduler of the policy's."""
        group = self.trainer.optimizer.param_groups[0]
        if self.args.value_learning_rate is None:
            return group["lr"]
        initial = group.get("initial_lr", self.args.learning_rate)
        if not initial:
            return self.args.value_learning_rate
        return self.args.value_learning_rate * (group["lr"] / initial)

    def on_train_end(self, best: Path | None) -> None:
        """Stop learning, and load the critic that belongs to the best policy."""
        self.optimizer.enable(False)
        super().on_train_end(best)

    # checkpoints

    def save_state(self, checkpoint: Path) -> None:
        """Save the critic, the state of its optimizer and the coefficient of the KL."""
        super().save_state(checkpoint)
        state = self.optimizer.state_dict()
        if self.args.should_save:
            OPTIMIZER_FILE.save(checkpoint, state, kl_coef=self.kl_coef)

    def load_state(self, checkpoint: Path) -> None:
        """Load what `save_state` has added. Without `kl_target`, the coefficient of the KL is that of the options."""
        self._restore_float32()  # otherwise the loaded values would be rounded
        super().load_state(checkpoint)
        state, metadata = OPTIMIZER_FILE.load(checkpoint)
        self.optimizer.load_state_dict(state)
        if self.args.kl_target is not None:
            self.kl_coef = metadata["kl_coef"]


def _untrainable(setting: str, instead: str) -> ValueError:
    return ValueError(f"PPOTrainer cannot train its critic with {setting}. Use {instead}.")


def _append_token(samples: Mapping[str, Any], lengths: Tensor) -> dict[str, Tensor]:
    """Return completions (B, T + 1) with one more token after each, whose value is that after the completion."""
    names = ("completion_ids", "completion_mask", "token_type_ids", "mm_token_type_ids")
    longer = {name: torch.nn.functional.pad(samples[name], (0, 1)) for name in names if name in samples}
    longer["completion_mask"].scatter_(1, lengths, 1)
    return longer
