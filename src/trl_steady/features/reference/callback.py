"""Refresh the KL reference while TRL trains, log each refresh, and save the reference in checkpoints."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from trl_steady.core.tensor_file import TensorFile
from trl_steady.features.reference.adapter import add_reference_adapter
from trl_steady.features.reference.tensors import Pair, gather, paired, refresh, restore
from trl_steady.trl_bridge import refuse_unsupported, trl_state
from trl_steady.trl_bridge.models import random_setting
from trl_steady.trl_bridge.trainer import FeatureTrainerMixin

FILE = TensorFile("reference.safetensors", "reference")


class Refresh(NamedTuple):
    """One refresh of the reference."""

    step: int
    """Optimizer steps taken before the refresh."""
    kl: float | None
    """KL of the last update before the refresh, in nats per token as TRL logs it, or None if it was not measured."""
    rule: str
    """The rule that fired first: `"steps"` or `"kl"`."""


class ReferenceRefreshCallback(TrainerCallback):
    """Refresh the KL reference of `trl.GRPOTrainer` or `trl.RLOOTrainer` from the policy, with or without PEFT.

    Use it with TRL's own trainers: `trainer.add_callback(ReferenceRefreshCallback(trainer, steps=400))`.
    trl-steady's trainers create their own callback if `sync_ref_model=True`.

    After a rule has fired, the callback refreshes the reference before the next optimizer step that begins with a
    generation, so that no rollout mixes two references. With `alpha=1` this is Algorithm 1 of DeepSeekMath (arXiv
    2402.03300). With PEFT the reference is an adapter `ref` on the policy's own model. The callback creates it, equal
    to the current policy.

    Every step logs `ref/refreshes`, the number of refreshes so far. The step after a refresh also logs
    `ref/refresh_step`, `ref/refresh_kl` and `ref/refresh_by_kl` (1 or 0).

    With TRL's trainer, a resume from `output_dir/checkpoint-N` restores the reference. Checkpoints that a kill has cut
    short, or that are inside a generation window, behave as in TRL. trl-steady's trainers have neither limit.

    Args:
        trainer: A trainer that has not started training, with `beta` not 0 and `sync_ref_model=False`.
        steps: Optimizer steps between refreshes, counted from the start as in TRL, or None.
        alpha: Share of the policy in the new reference, above 0 and at most 1. For an adapter it mixes the factors,
            not their product.
        kl: Also refresh when the KL of an update exceeds this many nats per token, or None.
        reset_optimizer: Clear the optimizer's state at each refresh (ProRL, arXiv 2505.24864). The learning-rate
            schedule goes on. PPO's critic has an optimizer of its own.

    Raises:
        ValueError: The trainer has no reference, or its reference cannot be refreshed. The message says what to do.
    """

    def __init__(
        self,
        trainer: trl_state.TRLTrainer,
        *,
        steps: int | None = 512,
        alpha: float = 1.0,
        kl: float | None = None,
        reset_optimizer: bool = False,
    ) -> None:
        refuse_unsupported((*type(trainer).__mro__, type(self)))
        self.steps = steps
        self.alpha = alpha
        self.kl_limit = kl
        self.reset_optimizer = reset_optimizer
        self.trainer: Any = trainer
        is_noisy = kl is not None and isinstance(trainer, FeatureTrainerMixin) and random_setting(trainer.model)
        self.metric = "ref/kl" if is_noisy else "kl"
        """Name of the metric that `kl` limits. Our trainers measure another one if dropout makes TRL's noisy."""
        self.refreshes: list[Refresh] = []
        self.before_refresh: list[Callable[[int], None]] = []
        """Called before each refresh with the number of optimizer steps taken, on every process."""
        # the rule that asks for a refresh, and the KL of the last update
        self._due: str | None = None
        self._kl: float | None = None
        self._values_before = 0  # of the metric, in earlier steps since the last log
        _refuse(self)
        model: torch.nn.Module = self.trainer.model
        if isinstance(model, PeftModel):
            add_reference_adapter(model)
        pairs = self.pairs()  # raises now if they do not match
        if isinstance(model, PeftModel) and trainer.is_fsdp_enabled and trainer.accelerator.mixed_precision != "no":
            for pair in pairs:  # accelerate will cast the policy's, which are trainable
                pair.reference.data = pair.reference.data.float()

    def pairs(self) -> list[Pair]:
        """Return the current pairs of policy and reference tensors. Wrapping and sharding the model replaces them."""
        unwrap = partial(self.trainer.accelerator.unwrap_model, keep_torch_compile=False)
        policy = unwrap(self.trainer.model)
        if self.trainer.ref_model is None:
            return paired(policy)
        return paired(policy, unwrap(self.trainer.ref_model))

    def on_step_begin(self, args: object, state: TrainerState, control: object, **_: object) -> None:
        """Refresh the reference if a rule has fired and the next step begins with a generation."""
        if self._due and trl_state.is_before_generation(self.trainer):
            for prepare in self.before_refresh:
                prepare(state.global_step)
            refresh(self.pairs(), self.alpha)
            if self.reset_optimizer:
                self.trainer.optimizer.state.clear()
            trl_state.set_metric(self.trainer, "ref/refresh_step", state.global_step)
            trl_state.set_metric(self.trainer, "ref/refresh_by_kl", float(self._due == "kl"))
            if self._kl is not None:
                trl_state.set_metric(self.trainer, "ref/refresh_kl", self._kl)
            self.refreshes.append(Refresh(state.global_step, self._kl, self._due))
            self._due = None
        self._values_before = trl_state.metric_count(self.trainer, self.metric)

    def on_step_end(self, args: object, state: TrainerState, control: object, **_: object) -> None:
        """Check the rules, and mark a refresh as due if one has fired."""
        is_on_time = self.steps is not None and state.global_step % self.steps == 0
        must_know = self._due or is_on_time or self.kl_limit is not None
        # otherwise a KL of our own, whose reading makes processes wait for one another, is not read
        if must_know or trl_state.metrics_are_settled(self.trainer):
            values = trl_state.metric_values(self.trainer, self.metric)[self._values_before :]
            if values:
                self._kl = sum(values) / len(values)
                if self._due is None and self.kl_limit is not None and self._kl > self.kl_limit:
                    self._due = "kl"
        if self._due is None and is_on_time:
            self._due = "steps"
        trl_state.set_metric(self.trainer, "ref/refreshes", len(self.refreshes))

    def save(self, folder: Path) -> None:
        """Write the reference and the counters to one file. Every process must call it."""
        writes = self.trainer.args.should_save
        tensors = gather(self.pairs(), keep=writes)
        if writes:
            FILE.save(folder, tensors, refreshes=self.refreshes, due=self._due, kl=self._kl)

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote, or raise a ValueError. Every process must call it."""
        tensors, counters = FILE.load(folder)
        restore(self.pairs(), tensors)
        self.refreshes = list(map(Refresh._make, counters["refreshes"]))
        self._due = counters["due"]
        self._kl = counters["kl"]

    def on_save(self, args: TrainingArguments, state: TrainerState, control: object, **_: object) -> None:
        """Add the reference to TRL's checkpoint."""
        if not isinstance(self.trainer, FeatureTrainerMixin):  # that one saves it before the checkpoint is in place
            self.save(_checkpoint(args, state))

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: object, **_: object) -> None:
        """Restore the reference when TRL resumes."""
        if state.global_step > 0 and not isinstance(self.trainer, FeatureTrainerMixin):
            self.load(_checkpoint(args, state))


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir or "") / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"


def _refuse(callback: ReferenceRefreshCallback) -> None:
    trainer = callback.trainer
    name, args = type(callback).__name__, trainer.args
    if not getattr(args, "has_reference", trainer.beta != 0.0):
        raise ValueError(f"{name} has no effect with beta=0.0, because there is no reference. Set beta above 0.")
    has_other = any(isinstance(other, ReferenceRefreshCallback) for other in trainer.callback_handler.callbacks)
    if isinstance(trainer, FeatureTrainerMixin) != args.sync_ref_model or has_other:
        raise ValueError(
            f"two callbacks would refresh the reference, or none: sync_ref_model={args.sync_ref_model} on "
            f"{type(trainer).__module__}. With trl-steady's trainers set sync_ref_model=True and add no {name}. With "
            "TRL's trainers set sync_ref_model=False and add one."
        )
    steps, alpha, kl = callback.steps, callback.alpha, callback.kl_limit
    is_wrong_steps = steps is not None and steps < 1
    is_wrong_kl = kl is not None and kl <= 0
    if is_wrong_steps or is_wrong_kl or not 0 < alpha <= 1:
        raise ValueError(
            f"steps={steps}, alpha={alpha} or kl={kl} cannot work. Set them above 0, and alpha at most 1."
        )
    if trainer.is_fsdp_enabled and getattr(trainer.accelerator.state.fsdp_plugin, "fsdp_version", 1) == 1:
        raise ValueError("FSDP version 1 flattens the reference's parameters away. Set fsdp_version: 2.")
    if callback.reset_optimizer and trainer.is_deepspeed_enabled:
        raise ValueError(
            "ref_model_sync_reset_optimizer=True does not work with DeepSpeed. Set it to False, or use FSDP2 or DDP."
        )
