"""PPO's critic as a part: values and targets of a rollout, and the loss and the updates of the critic."""

import contextlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import broadcast
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback

from trl_steady.adapters.base import Base
from trl_steady.critic.construction import critic_of
from trl_steady.critic.model import Critic
from trl_steady.critic.targets import targets
from trl_steady.functional import values
from trl_steady.host import loss, models, shards
from trl_steady.host.adapters import parameters_kept
from trl_steady.host.part import Part, Rollout
from trl_steady.host.rollouts import building_reference, scoring_reference
from trl_steady.host.saving import saved_without
from trl_steady.losses.table import LOSSES

__all__ = ["CRITIC_FILE", "CriticPart"]

CRITIC_FILE = "critic.safetensors"
"""File of a checkpoint that holds the critic's tensors, and the coefficient of the KL as metadata."""


class CriticPart(Part):
    """Gives a rollout the advantages of a critic, and trains the critic beside the policy."""

    window_options = (
        *((name, None) for name in ("gamma", "lam", "value_lam", "lam_length_alpha", "kl_coef")),
        *((name, None) for name in ("whiten_advantages", "whiten_rewards")),
        *((name, None) for name in ("bootstrap_truncated", "missing_eos_penalty")),
    )
    critic: Critic
    kl_coef: float
    """The coefficient of the KL in the reward, which adapts with `kl_target`."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self._of_step: list[tuple[Mapping[str, Any], Tensor]] = []  # samples and weights, for further updates
        self._gradients: list[tuple[Tensor, Tensor]] = []

    # construction

    @contextlib.contextmanager
    def building(self, model: Any, args: Any) -> Iterator[None]:
        """Let TRL's constructor make the reference of the KL in the reward."""
        with building_reference(args) if args.kl_coef else contextlib.nullcontext():
            yield

    def built(self) -> None:
        """Make the critic, and refuse setups in which it would not be trained as asked."""
        trainer, args = self.trainer, self.trainer.args
        trainer.beta, self.kl_coef = args.beta, args.kl_coef
        self._refuse_engine()
        self._is_sharded = trainer.is_fsdp_enabled
        if trainer.optimizer is not None:
            raise ValueError(
                "optimizers=(...) has an optimizer without the critic's parameters, which the constructor has just "
                "made. Set optim and learning_rate, or pass optimizer_cls_and_kwargs."
            )
        self.critic = critic_of(trainer)
        self._is_shared = self.critic.adapter is not None
        if args.gradient_checkpointing and args.router_replay and (self._is_shared or args.ptx_coef):
            raise ValueError(
                f"router_replay={args.router_replay!r} does not work with gradient_checkpointing=True here: layers "
                "of the critic or of ptx_dataset would be recomputed on the policy's routes. Switch one of them off."
            )
        if args.gradient_checkpointing and self._is_shared:
            how = args.gradient_checkpointing_kwargs or {}
            if how.get("use_reentrant"):
                raise ValueError(
                    "use_reentrant=True in gradient_checkpointing_kwargs does not work with a critic on the policy's "
                    "base, whose layers must be recomputed with its own adapter. Set use_reentrant=False."
                )
        if self._is_sharded:
            self._join_fsdp()
        else:
            self._keep_from_ddp()  # torchrun may wrap a model in DDP for one process too
        trainer.add_callback(_Updates(self))

    def _refuse_engine(self) -> None:
        """Refuse the ways of sharding that cannot shard the critic too."""
        trainer = self.trainer
        if trainer.is_deepspeed_enabled:
            raise ValueError(
                "PPOTrainer does not work with DeepSpeed, which takes one step for policy and critic and clips the "
                "gradients of both by one norm. Use DDP (accelerate launch --multi_gpu), or FSDP2 with adapters."
            )
        if not trainer.is_fsdp_enabled:
            return
        plugin = trainer.accelerator.state.fsdp_plugin
        if getattr(plugin, "fsdp_version", 1) == 1:
            raise ValueError("FSDP version 1 flattens the critic's parameters away. Set fsdp_version: 2.")
        if not isinstance(trainer.accelerator.unwrap_model(trainer.model), PeftModel):
            raise ValueError(
                "PPOTrainer does not work with FSDP without adapters: accelerate shards one model, which leaves the "
                "critic whole on each process. Train adapters (peft_config), or use DDP."
            )
        if getattr(plugin, "activation_checkpointing", False):
            raise ValueError(
                "activation_checkpointing in fsdp_config would recompute the critic's layers with the adapter of the "
                "policy. Set gradient_checkpointing=True instead."
            )

    def _join_fsdp(self) -> None:
        """Let FSDP2 shard the critic with the policy, each layer in one group.

        Raises:
            ValueError: Adapters of policy and critic have different dtypes, which FSDP2 does not take.
        """
        accelerator, policy = self.trainer.accelerator, self.critic.backbone
        if trained := Base(policy).trained:  # pyright: ignore[reportArgumentType]
            raise ValueError(
                f"FSDP2 would give {len(trained)} parameters of the base that train, for example {min(trained)}, the "
                "critic's gradient too. Set bias='none' in peft_config, or use DDP."
            )
        self.critic.join()
        dtypes = {parameter.dtype for parameter in policy.parameters() if parameter.requires_grad}
        # accelerate casts all that is trained to float32
        is_cast = accelerator.mixed_precision != "no" and not getattr(policy, "is_quantized", False)
        if len(dtypes) > 1 and not is_cast and self.trainer.args.adapter_dtype is None:
            raise ValueError(
                f"FSDP2 needs one dtype for all that is trained, and the policy's adapter and the critic have "
                f"{', '.join(sorted(map(str, dtypes)))}. Set adapter_dtype='float32', or use DDP."
            )

    def _keep_from_ddp(self) -> None:
        """Begin with the same critic on all processes, and keep it out of DDP, whose forward does not use it.

        DDP takes an adapter that its forward does not use as ready, and fails when a gradient comes all the same.
        """
        policy, critics = self.trainer.model, list(self.critic.named_parameters())  # DDP has not wrapped it yet
        for _, parameter in critics:
            parameter.data = cast(Tensor, broadcast(parameter.data))
        own = {id(parameter) for _, parameter in critics}
        names = [name for name, parameter in policy.named_parameters() if id(parameter) in own]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(policy, names)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The critic's parameters."""
        return [parameter for _, parameter in self.critic.named_parameters() if parameter.requires_grad]

    def grouping(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the critic groups of its own, with its learning rate."""
        args, own = self.trainer.args, {id(parameter): parameter for parameter in self.parameters}
        groups = [set(map(id, group["params"])) for group in optimizer.param_groups]
        if sum(len(group) for group in groups if group <= own.keys()) == len(own):  # a second call of `train`
            return
        rate = args.learning_rate if args.value_learning_rate is None else args.value_learning_rate
        taken: list[dict[str, Any]] = []
        for group in optimizer.param_groups:
            parameters = [parameter for parameter in group["params"] if id(parameter) in own]
            if parameters:
                group["params"] = [parameter for parameter in group["params"] if id(parameter) not in own]
                taken.append({**group, "params": parameters})
                for parameter in parameters:
                    del own[id(parameter)]
        if own:  # outside the policy
            first = {name: value for name, value in optimizer.param_groups[0].items() if name != "initial_lr"}
            decays = [parameter for parameter in own.values() if parameter.dim() > 1]
            others = [parameter for parameter in own.values() if parameter.dim() <= 1]
            taken.append({**first, "params": decays, "weight_decay": args.weight_decay})
            taken.append({**first, "params": others, "weight_decay": 0.0})
        for group in taken:
            if group["params"]:
                optimizer.add_param_group({**group, "lr": rate})
        if self._is_sharded:  # torch 2.13 restores an empty group only if it is the last
            optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]

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
            how = {"target": args.kl_target, "horizon": args.kl_horizon, "answers": int(answers)}
            self.kl_coef = values.adapted_kl_coef(self.kl_coef, total / max(answers, 1), **how)
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
        own, weights = self._loss(inputs)
        if trainer.model.training and trainer.args.value_updates > 1:
            self._of_step.append((inputs, weights))
        of_policy = compute(inputs)
        return own + (0.0 * of_policy if self.is_warming_up else of_policy)

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
            entry = LOSSES[trainer.loss_type]
            reduction = LOSSES[entry.host].reduction if entry.host else entry.reduction
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

    def after_last_backward(self) -> None:
        """Finish the gradients of an optimizer step, and keep the critic's out of the norm of the policy's."""
        if self.is_warming_up:
            own = {id(parameter) for parameter in self.parameters}
            for parameter in self.trainer.model.parameters():
                if id(parameter) not in own:
                    parameter.grad = None
        self._finish()
        self._gradients = [(own, own.grad) for own in self.parameters if own.grad is not None]
        for parameter, _ in self._gradients:
            parameter.grad = None

    def _finish(self) -> None:
        """Average the gradients over processes and clip them."""
        args, accelerator = self.trainer.args, self.trainer.accelerator
        if accelerator.num_processes > 1 and not self._is_sharded:  # FSDP2 has averaged them
            for own in self.parameters:
                if own.grad is None:  # of an expert that this process's tokens have not reached
                    own.grad = torch.zeros_like(own)
                torch.distributed.all_reduce(own.grad.div_(accelerator.num_processes))
        grads = [own.grad for own in self.parameters if own.grad is not None]
        if args.max_grad_norm > 0 and grads:
            norm = shards.whole(torch.nn.utils.get_total_norm(grads))
            torch.nn.utils.clip_grads_with_norm_(self.parameters, args.max_grad_norm, norm)
            self.trainer.metrics.pooled(
                means={"value/grad_norm": (norm.view(1), torch.ones_like(norm).bool().view(1))}
            )

    def restore_gradients(self) -> None:
        """Hand the critic's gradients to the optimizer, once the policy's are clipped."""
        if self._is_sharded:
            self._complete_optimizer()
        for parameter, grad in self._gradients:
            parameter.grad = grad
        self._gradients = []

    def _complete_optimizer(self) -> None:
        """Give the policy a state in the optimizer while it warms up, without which torch cannot load a sharded one.

        The policy's first step begins with a new state.
        """
        trainer, own, state = self.trainer, self.parameters, self.trainer.optimizer.state
        if self.is_warming_up:
            kept = {parameter: state.pop(parameter) for parameter in own if parameter in state}
            if not state:
                # its step is with gradients of 0 and a learning rate of 0
                get_optimizer_state_dict(trainer.model, trainer.optimizer)
                for parameter in own:
                    state.pop(parameter, None)
            state.update(kept)
        elif trainer.state.global_step == trainer.args.value_warmup_steps > 0:
            for parameter in state.keys() - {*own}:
                del state[parameter]

    def update_again(self) -> None:
        """Take the further updates of the critic in this optimizer step, on the same samples."""
        of_step, self._of_step = self._of_step, []
        for _ in range(self.trainer.args.value_updates - 1):
            self.trainer.optimizer.zero_grad()
            for inputs, weights in of_step:
                with self.trainer.until_backward_ends():
                    again, _ = self._loss(inputs, weights)
                    again.backward()
            self._finish()
            self.trainer.optimizer.step()

    def forget_step(self) -> None:
        """Forget the samples and gradients of a step, also of one that raised."""
        self._of_step, self._gradients = [], []
        for parameter in self.parameters:  # transformers clears gradients in the policy's model only
            parameter.grad = None

    # checkpoints

    @contextlib.contextmanager
    def saving(self, folder: Path | None) -> Iterator[None]:
        """Save the policy without the critic, and the critic beside it in `value`."""
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        alone = saved_without(model, models.VALUE_ADAPTER) if self._is_shared else contextlib.nullcontext({})
        with alone as gathered:
            yield
        if folder is not None and self.trainer.args.should_save:
            state = self.critic.part_of(gathered) if self._is_sharded else None  # which one process cannot gather
            self.critic.save_pretrained(folder / models.VALUE_ADAPTER, state)

    def save(self, checkpoint: Path) -> None:
        """Save the critic and the coefficient of the KL."""
        state = self.critic.state()
        if self.trainer.args.should_save:
            metadata = {"trl_steady": json.dumps({"kl_coef": self.kl_coef})}
            save_file(state, checkpoint / CRITIC_FILE, metadata=metadata)

    def loading(self, checkpoint: Path) -> contextlib.AbstractContextManager[None]:
        """Refuse a checkpoint without this critic, before torch compares the groups of its optimizer."""
        self._check(checkpoint)
        return contextlib.nullcontext()

    def _check(self, checkpoint: Path) -> Path:
        file = checkpoint / CRITIC_FILE
        if not file.is_file():
            raise ValueError(
                f"{checkpoint} holds no {CRITIC_FILE}: it was not written by PPOTrainer, or with "
                "save_only_model=True, and a resume would begin with a new critic. Begin a new run from its model."
            )
        with safe_open(file, framework="pt") as opened:
            names = list(opened.keys())
            self.critic.check({name: opened.get_slice(name).get_shape() for name in names}, str(file))
        return file

    def load(self, checkpoint: Path) -> None:
        """Load the critic and, with `kl_target`, the coefficient of the KL.

        Raises:
            ValueError: The checkpoint has no critic, or another one.
        """
        file = self._check(checkpoint)
        self.critic.load(load_file(file), str(file))
        if self.trainer.args.kl_target is not None:
            with safe_open(file, framework="pt") as opened:
                self.kl_coef = json.loads(opened.metadata()["trl_steady"])["kl_coef"]

    def load_best(self, checkpoint: Path) -> None:
        """Load the critic that belongs to the best policy, which transformers has loaded after the last step."""
        file = checkpoint / CRITIC_FILE
        if file.is_file():
            self.critic.load(load_file(file), str(file))
            return
        warnings.warn(
            f"load_best_model_at_end=True has loaded the policy of {checkpoint}, which has no critic. The trainer "
            "keeps the critic of the last step. Set save_only_model=False to save the critic too.",
            UserWarning,
            stacklevel=2,
        )


class _Updates(TrainerCallback):
    def __init__(self, part: CriticPart) -> None:
        self._part = part

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._part.forget_step()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._part.restore_gradients()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._part.update_again()
        self._part.forget_step()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            self._part.load_best(Path(state.best_model_checkpoint))


def _with_one_more(samples: Mapping[str, Any], ends: Tensor) -> dict[str, Tensor]:
    """Return completions with one more token after each (B, T + 1), before which the value of the end is found."""
    names = ("completion_ids", "completion_mask", "token_type_ids", "mm_token_type_ids")
    longer = {name: torch.nn.functional.pad(samples[name], (0, 1)) for name in names if name in samples}
    longer["completion_mask"].scatter_(1, ends, 1)
    return longer
