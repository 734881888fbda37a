"""End a run between two optimizer steps when its cluster takes the machine away: `enable_jit_checkpoint`.

A cluster sends SIGTERM to a process some time before it kills it. This file knows transformers' callback for that,
which would save in the middle of a step, and only on the process that got the signal.
"""

from typing import cast

import torch
from torch import Tensor
from transformers import TrainerControl
from transformers.trainer_jit_checkpoint import CheckpointManager
from transformers.trainer_jit_checkpoint import JITCheckpointCallback as _TransformersCallback
from transformers.trainer_utils import IntervalStrategy

from trl_steady.core.feature import Trainer
from trl_steady.trl_bridge.checkpoint import Checkpoints


class JITCheckpointCallback(_TransformersCallback):
    """transformers' callback without its saves. It keeps the handler of the signal, and gives it back at the end."""

    def on_step_begin(self, *_: object, **__: object) -> None:
        """Save nothing. transformers would save, and then compute a micro-batch whose result is lost."""

    def on_pre_optimizer_step(self, *_: object, **__: object) -> None:
        """Save nothing. transformers would save that the step's micro-batches are over, without their update."""

    def on_step_end(self, *_: object, **__: object) -> None:
        """Save nothing. The trainer saves after all callbacks."""

    def on_epoch_end(self, *_: object, **__: object) -> None:
        """Save nothing. The trainer saves after all callbacks."""


class Preemption:
    """Ends a run after the optimizer step in which any of its processes gets the signal."""

    def __init__(self, trainer: Trainer, checkpoints: Checkpoints) -> None:
        self._trainer = trainer
        self._checkpoints = checkpoints
        self._manager: CheckpointManager | None = None  # None without `enable_jit_checkpoint`
        self.is_stopping = False
        """True once the run ends early."""

    def take_over(self) -> None:
        """Replace transformers' callback, which exists with `enable_jit_checkpoint` only."""
        callbacks = self._trainer.callback_handler.callbacks
        for index, callback in enumerate(callbacks):
            if not isinstance(callback, _TransformersCallback) or callback.jit_manager is None:
                continue
            self._manager = callback.jit_manager
            self._manager.kill_wait = 0  # we need not wait for a kill: one during our save loses nothing
            own = JITCheckpointCallback()
            own.trainer = callback.trainer
            own.jit_manager = callback.jit_manager
            callbacks[index] = own

    def begin(self) -> None:
        """Begin a training. A signal that came before it ends it after one step."""
        self.is_stopping = False
        self._checkpoints.evaluation_is_due = False

    def after_step(self, control: TrainerControl) -> None:
        """End the run if it is asked to. Every process must call this after each step, and at the end of an epoch."""
        if self.is_stopping:  # the step is saved, and this is the end of an epoch that may have stopped early
            control.should_evaluate = False
            control.should_save = False
        elif self._is_asked():
            self._stop(control, evaluates=control.should_evaluate or self._evaluates_epoch_here())

    def must_save_late(self, control: TrainerControl) -> bool:
        """End the run if it is asked to after `after_step`, during an evaluation or a save.

        Every process must call this. Returns True if the step must still be saved.
        """
        if self.is_stopping or not self._is_asked():
            return False
        self._stop(control, evaluates=False)
        return control.should_save

    def _is_asked(self) -> bool:
        """Return True if any process has got the signal."""
        if self._manager is None:
            return False
        asked = self._manager.is_checkpoint_requested
        accelerator = self._trainer.accelerator
        if accelerator.num_processes == 1:
            return asked
        number = accelerator.reduce(torch.tensor(float(asked), device=accelerator.device), "sum")
        return bool(cast(Tensor, number))

    def _stop(self, control: TrainerControl, *, evaluates: bool) -> None:
        """Let transformers save this step and end. An evaluation, which may take long, is left to the resume."""
        assert self._manager is not None
        self._manager.is_checkpoint_requested = False
        state = self._trainer.state
        checkpoints = self._checkpoints
        if state.global_step >= state.max_steps and not evaluates:
            return  # the run is over anyway
        checkpoints.evaluation_is_due = evaluates
        self.is_stopping = True
        control.should_training_stop = True
        control.should_evaluate = False
        control.should_save = evaluates or checkpoints.last_step != state.global_step

    def _evaluates_epoch_here(self) -> bool:
        """Return True if this is the last step of an epoch, and an evaluation follows that step."""
        args, epoch = self._trainer.args, self._trainer.state.epoch or 0.0
        return args.eval_strategy == IntervalStrategy.EPOCH and epoch >= args.eval_delay and float(epoch).is_integer()
