"""PPO's critic as a part: values and targets of a rollout, and the loss and the updates of the critic."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from accelerate.utils import broadcast
from peft import PeftModel
from torch import Tensor

from trl_steady.core.tensor_file import TensorFile
from trl_steady.core.types import Rollout, loss_mask
from trl_steady.features.critic.construction import critic_of
from trl_steady.features.critic.model import Critic
from trl_steady.features.critic.optimizer import ScalarHeadOptimizer
from trl_steady.features.critic.targets import targets
from trl_steady.features.critic.trainer import PPO
from trl_steady.features.legacy import Part
from trl_steady.functional import values
from trl_steady.losses.table import LOSSES
from trl_steady.trl_bridge.checkpoint import save_without
from trl_steady.trl_bridge.loss import token_weights
from trl_steady.trl_bridge.models import VALUE_ADAPTER, keep_parameters
from trl_steady.trl_bridge.rollout import with_reference_log_probs, with_reference_model

# name of an option's effect -> options to show, the first of which switches it on
OPTIMIZER = TensorFile("critic_optimizer.safetensors", "state of the critic's optimizer")


class ScorerPart(Part):
    """A part with a model that has a scalar head, which is saved beside the policy and in checkpoints."""

    FILE: ClassVar[TensorFile]
    FOLDER: ClassVar[str]
    """Folder beside a saved policy, and the name of the adapter if the model shares the policy's base."""
    model: Critic | None = None

    @property
    def batch_size(self) -> int:
        """Texts that go through the model together in a rollout."""
        args, is_training = self.trainer.args, self.trainer.model.training
        return args.per_device_train_batch_size if is_training else args.per_device_eval_batch_size

    def adopt(self, model: Critic) -> None:
        """Take a model, the same on all processes, that neither the policy's optimizer nor DDP trains."""
        self.model = model
        for parameter in model.parameters:
            parameter.requires_grad_(False)
            if not self.trainer.is_fsdp_enabled:
                parameter.data = cast(Tensor, broadcast(parameter.data))

    @contextlib.contextmanager
    def saving(self, folder: Path | None) -> Iterator[None]:
        """Save the policy without the model, and the model beside it."""
        model, is_sharded = self.model, self.trainer.is_fsdp_enabled
        policy = None if model is None else model.backbone
        is_shared = isinstance(policy, PeftModel)
        with save_without(policy, self.FOLDER) if is_shared else contextlib.nullcontext({}) as gathered:
            yield
        if model is not None and folder is not None and self.trainer.args.should_save:
            # one process cannot gather shards
            model.save_pretrained(folder / self.FOLDER, model.part_of(gathered) if is_sharded else None)

    def save(self, checkpoint: Path) -> None:
        """Save the model."""
        writes = self.trainer.args.should_save
        if self.model is not None and (writes or self.trainer.is_fsdp_enabled):  # all processes gather shards
            state = self.model.state()
            if writes:
                self.FILE.save(checkpoint, state)

    def load(self, checkpoint: Path) -> None:
        """Load the model. Raises ValueError if the checkpoint has none, or another one."""
        if self.model is not None:
            self.model.load(self.FILE.load(checkpoint)[0], str(checkpoint / self.FILE.name))

    def ending(self, best: Path | None) -> None:
        """Load the model that belongs to the best policy."""
        if self.model is None or best is None:
            return
        if (best / self.FILE.name).is_file():
            self.model.load(self.FILE.load(best)[0], str(best))
            return
        kept = self.FILE.content
        warnings.warn(
            f"load_best_model_at_end=True has loaded the policy of {best}, which has no {kept}. The trainer keeps the "
            f"{kept} of the last step. Set save_only_model=False to save it too.",
            UserWarning,
            stacklevel=2,
        )


class CriticPart(ScorerPart):
    """Gives a rollout the advantages of a critic, and trains the critic beside the policy."""

    FILE = TensorFile("critic.safetensors", "critic")
    FOLDER = VALUE_ADAPTER
    window_options = (
        *((name, None) for name in ("gamma", "lam", "value_lam", "kl_coef", "whiten_advantages")),
        *((name, None) for name in ("whiten_rewards", "bootstrap_truncated", "missing_eos_penalty")),
    )
    counts_all_sequences = True
    trainer: PPO
    kl_coef: float
    """The coefficient of the KL in the reward, which adapts with `kl_target`."""

    @property
    def critic(self) -> Critic:
        """The critic."""
        assert self.model is not None
        return self.model

    # construction

    def building(self, model: object, args: Any) -> contextlib.AbstractContextManager[None]:
        """Let TRL's constructor make the reference of the KL in the reward."""
        return with_reference_model(self.trainer, args) if args.kl_coef else contextlib.nullcontext()

    def built(self) -> None:
        """Make the critic, and refuse setups in which it would not be trained as asked."""
        trainer, args = self.trainer, self.trainer.args
        self.kl_coef = args.kl_coef
        self._refuse()
        critic = critic_of(trainer)
        if trainer.is_fsdp_enabled:
            critic.join()
        self.adopt(critic)

    def _refuse(self) -> None:
        """Refuse setups that cannot train the critic too."""
        trainer, args = self.trainer, self.trainer.args
        is_zero, warmup = trainer.is_deepspeed_enabled, args.value_warmup_steps
        plugin = trainer.accelerator.state.fsdp_plugin if trainer.is_fsdp_enabled else None
        is_adapted = isinstance(trainer.accelerator.unwrap_model(trainer.model), PeftModel)
        replays = args.gradient_checkpointing and args.router_replay and (is_adapted or args.ptx_coef)
        ways = "DDP (accelerate launch --multi_gpu), FSDP2 with adapters (peft_config)"
        sharded = f"{ways}, or ZeRO-2"
        for is_wrong, setting, instead in (
            # DeepSpeed updates the policy in every step
            (is_zero and warmup, f"value_warmup_steps={warmup} and DeepSpeed", f"{ways}, or no warm-up"),
            (is_zero and args.deepspeed_plugin.zero_stage == 3, "ZeRO-3", sharded),
            (plugin and not is_adapted, "FSDP without adapters", sharded),
            (plugin and getattr(plugin, "fsdp_version", 1) == 1, "FSDP version 1", sharded),
            # both would recompute layers of the critic or of ptx_dataset as the policy's: with its adapter or routes
            (
                getattr(plugin, "activation_checkpointing", False),
                "activation_checkpointing in fsdp_config",
                "gradient_checkpointing=True",
            ),
            (replays, f"router_replay={args.router_replay!r} and gradient_checkpointing=True", "one of the two"),
        ):
            if is_wrong:
                raise ValueError(f"PPOTrainer cannot train its critic with {setting}. Use {instead}.")

    @functools.cached_property
    def learner(self) -> ScalarHeadOptimizer:
        """The learner, which is made when the model is prepared for a training."""
        args = self.trainer.args
        return ScalarHeadOptimizer(
            self.critic, self.trainer, args.weight_decay, (args.adam_beta1, args.adam_beta2), args.adam_epsilon
        )

    # a rollout

    @contextlib.contextmanager
    def rolling(self, rollout: Rollout) -> Iterator[None]:
        """Let TRL score what the KL in the reward needs. Switching adapters does not change what is trained."""
        scoring = with_reference_log_probs(self.trainer) if self.trainer.args.kl_coef else contextlib.nullcontext()
        with keep_parameters(self.trainer.model), scoring:
            yield

    def columns(self, rollout: Rollout) -> Mapping[str, Any]:
        """Return values, returns and advantages (B, T) of the action tokens; NaN returns where there is no reward."""
        args, kl_coef = self.trainer.args, self.kl_coef
        found, kl_of_answers = targets(self.trainer, rollout, *self._score(rollout), kl_coef=kl_coef)
        if args.kl_target is not None and self.trainer.model.training:
            total, answers = kl_of_answers.tolist()
            self.kl_coef = values.adapted_kl_coef(
                kl_coef,
                total / max(answers, 1),
                target=args.kl_target,
                horizon=args.kl_horizon,
                answers=int(answers),
            )
        return found

    def _score(self, rollout: Rollout) -> tuple[Tensor, Tensor | None]:
        """Return the values (B, T) of a rollout's tokens and, with `bootstrap_truncated`, those (B,) after them."""
        samples, size = rollout.samples, self.batch_size
        with torch.no_grad():
            if not self.trainer.args.bootstrap_truncated:
                return self.trainer.values(self.critic, samples, rollout, size), None
            ends = samples["completion_mask"].sum(1, keepdim=True)
            longer = {**samples, **_with_one_more(samples, ends)}
            found = self.trainer.values(self.critic, longer, rollout, size)
            return found[:, :-1], found.gather(1, ends).squeeze(1)

    # a micro-batch

    def computing(
        self, model: torch.nn.Module, compute: Callable[[Mapping[str, Any]], Tensor], inputs: Mapping[str, Any]
    ) -> Tensor:
        """Return the policy's loss plus the critic's, which share no parameter. In warm-up the policy's is 0."""
        # before the policy's pass, whose routes are replayed until backward ends
        of_critic = self._loss(inputs)
        of_policy = compute(inputs)
        return of_critic + (0.0 * of_policy if self.is_warming_up else of_policy)

    @property
    def is_warming_up(self) -> bool:
        """True in optimizer steps in which only the critic learns."""
        return self.trainer.model.training and self.trainer.state.global_step < self.trainer.args.value_warmup_steps

    def _loss(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return the critic's loss of a micro-batch."""
        trainer, clip = self.trainer, self.trainer.args.cliprange_value
        found, counted = trainer.values(self.critic, inputs), loss_mask(inputs)
        mask = counted & ~inputs["returns"].isnan()
        each = values.value_loss(found, inputs["values"], inputs["returns"].where(mask, 0), cliprange=clip)
        reduction = LOSSES[trainer.loss_type].reduction
        weights = token_weights(trainer, counted, inputs, reduction, found.dtype)
        means = {"value/loss": (each.detach(), mask)}
        if clip is not None:
            means["value/clip_ratio"] = ((found - inputs["values"]).abs() > clip, mask)
        trainer.metrics.pooled(means=means)
        return (weights * each.where(mask, 0)).sum()

    # steps

    def beginning(self) -> None:
        """Let the critic learn, now that the policy's optimizer is made."""
        self._undo_cast()
        self.learner.switch(True)

    def _undo_cast(self) -> None:
        """Make the adapter float32 again: DeepSpeed has cast the policy and all its adapters."""
        if self.critic.adapter is not None and self.trainer.is_deepspeed_enabled:
            for parameter in self.critic.parameters:
                parameter.data = parameter.data.float()

    def stepping(self) -> None:
        """Forget the gradients of a step that raised."""
        self.learner.optimizer.zero_grad()
        if self.trainer.state.global_step == self.trainer.args.value_warmup_steps > 0:
            # torch takes an empty step to save the state of a sharded optimizer that has none
            self.trainer.optimizer.state.clear()

    def after_last_backward(self) -> None:
        """Update the critic. Its gradients are gone before transformers clips those of the policy."""
        norm = self.learner.step(self._learning_rate)
        if norm is not None:
            norm = norm.view(1)
            self.trainer.metrics.pooled(means={"value/grad_norm": (norm, torch.ones_like(norm, dtype=torch.bool))})
        if self.is_warming_up:
            self.trainer.model.zero_grad()

    @property
    def _learning_rate(self) -> float:
        """The critic's learning rate in this step, which follows the scheduler of the policy's."""
        args, group = self.trainer.args, self.trainer.optimizer.param_groups[0]
        first = group.get("initial_lr", args.learning_rate)
        if args.value_learning_rate is None:
            return group["lr"]
        return args.value_learning_rate * (group["lr"] / first if first else 1.0)

    def ending(self, best: Path | None) -> None:
        """Stop learning, and load the critic that belongs to the best policy."""
        self.learner.switch(False)
        super().ending(best)

    # checkpoints

    def save(self, checkpoint: Path) -> None:
        """Save the critic, the state of its optimizer and the coefficient of the KL."""
        super().save(checkpoint)
        state = self.learner.state_dict()
        if self.trainer.args.should_save:
            OPTIMIZER.save(checkpoint, state, kl_coef=self.kl_coef)

    def load(self, checkpoint: Path) -> None:
        """Load what `save` has added. Without `kl_target`, the coefficient of the KL is that of the options."""
        self._undo_cast()  # before the values come, which would be rounded
        super().load(checkpoint)
        state, metadata = OPTIMIZER.load(checkpoint)
        self.learner.load_state_dict(state)
        if self.trainer.args.kl_target is not None:
            self.kl_coef = metadata["kl_coef"]


def _with_one_more(samples: Mapping[str, Any], ends: Tensor) -> dict[str, Tensor]:
    """Return completions with one more token after each (B, T + 1), before which the value of the end is found."""
    names = ("completion_ids", "completion_mask", "token_type_ids", "mm_token_type_ids")
    longer = {name: torch.nn.functional.pad(samples[name], (0, 1)) for name in names if name in samples}
    longer["completion_mask"].scatter_(1, ends, 1)
    return longer
