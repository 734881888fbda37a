"""PPO's critic as a part: values and targets of a rollout, and the loss and the updates of the critic."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import broadcast
from peft import PeftModel
from torch import Tensor

from trl_steady.adapters.base import Base
from trl_steady.critic.construction import critic_of
from trl_steady.critic.learner import Learner
from trl_steady.critic.model import Critic
from trl_steady.critic.targets import targets
from trl_steady.critic.trainer import PPO
from trl_steady.functional import values
from trl_steady.host import loss, models
from trl_steady.host.checkpoints import saved_without
from trl_steady.host.files import TensorFile
from trl_steady.host.models import parameters_kept
from trl_steady.host.part import Part, Rollout
from trl_steady.host.rollouts import building_reference, scoring_reference
from trl_steady.losses.table import LOSSES

CRITIC = TensorFile("critic.safetensors", "critic")
OPTIMIZER = TensorFile("critic_optimizer.safetensors", "state of the critic's optimizer")


class CriticPart(Part):
    """Gives a rollout the advantages of a critic, and trains the critic beside the policy."""

    window_options = (
        *((name, None) for name in ("gamma", "lam", "value_lam", "lam_length_alpha", "kl_coef")),
        *((name, None) for name in ("whiten_advantages", "whiten_rewards")),
        *((name, None) for name in ("bootstrap_truncated", "missing_eos_penalty")),
    )
    trainer: PPO
    critic: Critic
    kl_coef: float
    """The coefficient of the KL in the reward, which adapts with `kl_target`."""

    _learner: Learner | None = None
    """Updates the critic; None before a training begins."""

    def __init__(self, trainer: PPO) -> None:
        super().__init__(trainer)
        self._of_step: list[tuple[Mapping[str, Tensor], Tensor]] = []  # samples and weights, for further updates

    # construction

    def building(self, model: object, args: Any) -> contextlib.AbstractContextManager[None]:
        """Let TRL's constructor make the reference of the KL in the reward."""
        return building_reference(self.trainer, args) if args.kl_coef else contextlib.nullcontext()

    def built(self) -> None:
        """Make the critic, and refuse setups in which it would not be trained as asked."""
        trainer, args = self.trainer, self.trainer.args
        self.kl_coef = args.kl_coef
        self._refuse_engine()
        self.critic = critic_of(trainer)
        self._is_shared = self.critic.adapter is not None
        if args.gradient_checkpointing and args.router_replay and (self._is_shared or args.ptx_coef):
            raise ValueError(
                f"router_replay={args.router_replay!r} does not work with gradient_checkpointing=True here: layers "
                "of the critic or of ptx_dataset would be recomputed on the policy's routes. Switch one of them off."
            )
        if trainer.is_fsdp_enabled:
            self._join_fsdp()
        for parameter in self.critic.parameters:
            # until a training has begun, so that neither the policy's optimizer nor DDP takes it
            parameter.requires_grad_(False)
            if not trainer.is_fsdp_enabled:
                parameter.data = cast(Tensor, broadcast(parameter.data))

    def _refuse_engine(self) -> None:
        """Refuse the ways of sharding that cannot train the critic too."""
        trainer, engine = self.trainer, None
        if trainer.is_deepspeed_enabled:
            engine = "ZeRO-3" if trainer.args.deepspeed_plugin.zero_stage == 3 else None
            if warmup := trainer.args.value_warmup_steps:
                raise ValueError(
                    f"value_warmup_steps={warmup} does not work with DeepSpeed, which updates the policy in every "
                    "step. Set it to 0, or use DDP, or FSDP2 with adapters."
                )
        elif trainer.is_fsdp_enabled:
            is_adapted = isinstance(trainer.accelerator.unwrap_model(trainer.model), PeftModel)
            engine, plugin = None if is_adapted else "FSDP without adapters", trainer.accelerator.state.fsdp_plugin
            if getattr(plugin, "fsdp_version", 1) == 1:
                engine = "FSDP version 1"
            if getattr(plugin, "activation_checkpointing", False):
                raise ValueError(
                    "activation_checkpointing in fsdp_config would recompute the critic's layers with the adapter of "
                    "the policy. Set gradient_checkpointing=True instead."
                )
        if engine is not None:
            raise ValueError(
                f"PPOTrainer does not work with {engine}, which would shard the policy without its critic. Use DDP "
                "(accelerate launch --multi_gpu), ZeRO-2, or FSDP2 with adapters (peft_config)."
            )

    def _join_fsdp(self) -> None:
        """Let FSDP2 shard the critic with the policy, each layer in one group."""
        if trained := Base(self.critic.backbone).trained:  # pyright: ignore[reportArgumentType]
            raise ValueError(
                f"FSDP2 would give {len(trained)} parameters of the base that train, for example {min(trained)}, the "
                "critic's gradient too. Set bias='none' in peft_config, or use DDP."
            )
        self.critic.join()

    @property
    def learner(self) -> Learner:
        """The learner, which is made when the model is prepared for a training."""
        if self._learner is None:
            args = self.trainer.args
            options = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
            accelerator, limit = self.trainer.accelerator, args.max_grad_norm
            self._learner = Learner(self.critic, accelerator, limit, args.weight_decay, **options)
        return self._learner

    # a rollout

    @contextlib.contextmanager
    def rolling(self, rollout: Rollout) -> Iterator[None]:
        """Let TRL score what the KL in the reward needs. Switching adapters does not change what is trained."""
        kept = parameters_kept(self.trainer.model) if self._is_shared else contextlib.nullcontext()
        has_kl = self.trainer.args.kl_coef != 0
        with kept, scoring_reference(self.trainer) if has_kl else contextlib.nullcontext():
            yield

    def columns(self, rollout: Rollout) -> Mapping[str, Any]:
        """Return values, returns and advantages (B, T) of the action tokens; NaN returns where there is no reward."""
        old_values, after = self._score(rollout)
        found = targets(self.trainer, rollout, old_values, after, kl_coef=self.kl_coef)
        args = self.trainer.args
        if args.kl_target is not None and self.trainer.model.training:
            total, answers = found.kl_per_answer.tolist()
            options = {"target": args.kl_target, "horizon": args.kl_horizon, "answers": int(answers)}
            self.kl_coef = values.adapted_kl_coef(self.kl_coef, total / max(answers, 1), **options)
        return found.columns

    def _score(self, rollout: Rollout) -> tuple[Tensor, Tensor | None]:
        """Return the values (B, T) of a rollout's tokens and, with `bootstrap_truncated`, those (B,) after them."""
        trainer, samples = self.trainer, rollout.samples
        size = trainer.args.per_device_train_batch_size
        size = size if trainer.model.training else trainer.args.per_device_eval_batch_size
        with torch.no_grad():
            if not trainer.args.bootstrap_truncated:
                return trainer.values(self.critic, samples, rollout, size), None
            ends = samples["completion_mask"].sum(1, keepdim=True)
            longer = {**samples, **_with_one_more(samples, ends)}
            found = trainer.values(self.critic, longer, rollout, size)
            return found[:, :-1], found.gather(1, ends).squeeze(1)

    # a micro-batch

    def computing(
        self, model: torch.nn.Module, compute: Callable[[Mapping[str, Any]], Tensor], inputs: Mapping[str, Any]
    ) -> Tensor:
        """Return the policy's loss plus the critic's, which share no parameter. In warm-up the policy's is 0."""
        trainer = self.trainer
        # before the policy's pass, whose routes are replayed until backward ends
        of_critic, weights = self._loss(inputs)
        if trainer.model.training and trainer.args.value_updates > 1:
            self._of_step.append((inputs, weights))
        of_policy = compute(inputs)
        return of_critic + (0.0 * of_policy if self.is_warming_up else of_policy)

    @property
    def is_warming_up(self) -> bool:
        """True in optimizer steps in which only the critic learns."""
        return self.trainer.model.training and self.trainer.state.global_step < self.trainer.args.value_warmup_steps

    def _loss(self, inputs: Mapping[str, Any], weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the critic's loss of a micro-batch, and the weights (B, T) of its tokens."""
        trainer, args = self.trainer, self.trainer.args
        mask = loss.loss_mask(inputs)
        found = trainer.values(self.critic, inputs)
        mask = mask & ~inputs["returns"].isnan()
        if weights is None:
            reduction = LOSSES[trainer.loss_type].reduction
            weights = loss.token_weights(trainer, loss.loss_mask(inputs), inputs, reduction, found.dtype)
            self._measure(found.detach(), inputs, mask)
        each = values.value_loss(
            found, inputs["values"], inputs["returns"].where(mask, 0), cliprange=args.cliprange_value
        )
        return (weights * each.where(mask, 0)).sum(), weights

    def _measure(self, found: Tensor, inputs: Mapping[str, Any], mask: Tensor) -> None:
        clip, old, returns = self.trainer.args.cliprange_value, inputs["values"], inputs["returns"].where(mask, 0)
        means = {"value/loss": (values.value_loss(found, old, returns, cliprange=clip), mask)}
        if clip is not None:
            means["value/clip_ratio"] = ((found - old).abs() > clip, mask)
        self.trainer.metrics.pooled(means=means)

    # steps

    def beginning(self) -> None:
        """Let the critic learn, now that the policy's optimizer is made."""
        if self._is_shared and self.trainer.is_deepspeed_enabled:
            # DeepSpeed has cast the policy and all its adapters
            for parameter in self.critic.parameters:
                parameter.data = parameter.data.float()
        self.learner.switch(True)

    def stepping(self) -> None:
        """Forget the samples and gradients of a step that raised."""
        self._of_step = []
        self.learner.optimizer.zero_grad()
        warmup, optimizer = self.trainer.args.value_warmup_steps, self.trainer.optimizer
        if self.trainer.state.global_step == warmup > 0 and optimizer is not None:
            # torch takes an empty step to save the state of a sharded optimizer that has none
            optimizer.state.clear()

    def after_last_backward(self) -> None:
        """Update the critic. Its gradients are gone before transformers clips those of the policy."""
        of_step, self._of_step = self._of_step, []
        self._update()
        for _ in range(self.trainer.args.value_updates - 1):
            for inputs, weights in of_step:
                with self.trainer.until_backward_ends():
                    self._loss(inputs, weights)[0].backward()
            self._update()
        if self.is_warming_up:
            self.trainer.model.zero_grad()

    def _update(self) -> None:
        norm = self.learner.step(self._learning_rate)
        if norm is not None:
            is_counted = torch.ones(1, dtype=torch.bool, device=norm.device)
            self.trainer.metrics.pooled(means={"value/grad_norm": (norm.view(1), is_counted)})

    @property
    def _learning_rate(self) -> float:
        """The critic's learning rate in this step, which follows the scheduler of the policy's."""
        args, optimizer = self.trainer.args, self.trainer.optimizer
        assert optimizer is not None
        group = optimizer.param_groups[0]
        first = group.get("initial_lr", args.learning_rate)
        if args.value_learning_rate is None:
            return group["lr"]
        return args.value_learning_rate * (group["lr"] / first if first else 1.0)

    def ending(self, best: Path | None) -> None:
        """Stop learning, and load the critic that belongs to the best policy."""
        self.learner.switch(False)
        if best is not None and (state := CRITIC.load_best(best)) is not None:
            self.critic.load(state, str(best))

    # checkpoints

    @contextlib.contextmanager
    def saving(self, folder: Path | None) -> Iterator[None]:
        """Save the policy without the critic, and the critic beside it in `value`."""
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        alone = saved_without(model, models.VALUE_ADAPTER) if self._is_shared else contextlib.nullcontext({})
        with alone as gathered:
            yield
        if folder is not None and self.trainer.args.should_save:
            # one process cannot gather shards
            state = self.critic.part_of(gathered) if self.trainer.is_fsdp_enabled else None
            self.critic.save_pretrained(folder / models.VALUE_ADAPTER, state)

    def save(self, checkpoint: Path) -> None:
        """Save the critic, the state of its optimizer and the coefficient of the KL."""
        state, of_optimizer = self.critic.state(), self.learner.state_dict()
        if self.trainer.args.should_save:
            CRITIC.save(checkpoint, state, kl_coef=self.kl_coef)
            OPTIMIZER.save(checkpoint, of_optimizer)

    def loading(self, checkpoint: Path) -> contextlib.AbstractContextManager[None]:
        """Refuse a checkpoint without this critic, before anything is loaded."""
        self.critic.check(CRITIC.shapes(checkpoint), str(checkpoint / CRITIC.name))
        OPTIMIZER.shapes(checkpoint)
        return contextlib.nullcontext()

    def load(self, checkpoint: Path) -> None:
        """Load what `save` has added. Without `kl_target`, the coefficient of the KL is that of the options.

        Raises:
            ValueError: The checkpoint has no critic, or another one.
        """
        state, metadata = CRITIC.load(checkpoint)
        self.critic.load(state, str(checkpoint / CRITIC.name))
        self.learner.load_state_dict(OPTIMIZER.load(checkpoint)[0])
        if self.trainer.args.kl_target is not None:
            self.kl_coef = metadata["kl_coef"]


def _with_one_more(samples: Mapping[str, Any], ends: Tensor) -> dict[str, Tensor]:
    """Return completions with one more token after each (B, T + 1), before which the value of the end is found."""
    names = ("completion_ids", "completion_mask", "token_type_ids", "mm_token_type_ids")
    longer = {name: torch.nn.functional.pad(samples[name], (0, 1)) for name in names if name in samples}
    longer["completion_mask"].scatter_(1, ends, 1)
    return longer
