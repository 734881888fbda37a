"""Checkpoints that appear only when they are complete, and an exact resume from any step.

This file knows how transformers writes and reads a checkpoint, and TRL's buffered rollouts.

A checkpoint holds what transformers and TRL write, `rollouts_N.pt` of each process N (this file), and what features
add in `save_state`: tensors as safetensors, state for `torch.load` as `.pt`, and plain records as JSON. Each feature
names its own files, so that a run without it has none of them. The manifest is written last.
"""

import json
import math
import os
import re
import shutil
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sized
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from accelerate.utils import broadcast_object_list, gather_object
from torch.utils.data import Sampler
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import has_length, rotate_checkpoints, sort_checkpoints

from trl_steady.core.feature import Trainer
from trl_steady.core.processes import first_reason
from trl_steady.core.state_file import read_state, write_state
from trl_steady.core.user_warning import warn_user
from trl_steady.trl_bridge.manifest import (
    ROLLOUTS_PREFIX,
    DataOrder,
    read_manifest,
    why_incomplete,
    write_manifest,
)
from trl_steady.trl_bridge.overrides import overrides
from trl_steady.trl_bridge.patching import patched
from trl_steady.trl_bridge.trl_state import as_trl_trainer, generation_interval, is_before_generation
from trl_steady.trl_bridge.window import changed_settings, window_settings

UNFINISHED = "_unfinished"
"""Folder of checkpoints that are being written. The upload to the Hub skips names that begin with "_"."""
_CHECKPOINT = re.compile(r"checkpoint-\d+$")  # not copies, such as checkpoint-9-old


class Checkpoints:
    """Writes complete checkpoints, with the rollouts in use, that survive a killed save, and resumes from them."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer: Trainer = trainer
        self._trl = as_trl_trainer(trainer)  # the same, with TRL's private attributes
        self.data_order: DataOrder = "unknown"
        """Where the data stand after a resume. The data loader says it."""
        self.sampler: Sampler[int] | None = None
        """TRL's sampler of the training data, if that gives the order."""
        self.last: Path | None = None
        """Written last, or else resumed from."""
        self.last_step: int | None = None
        """The optimizer step of `last`."""
        self.evaluation_is_due = False
        """True if an evaluation follows the current step, and the step is saved before it."""
        self._run = ""  # its id, once it is known
        self._has_told_of_order = False

    def on_init_end(self) -> None:
        """Say early if a resume will not know the order of the training data."""
        own = overrides(self._trainer, "order", without_super=True)
        if own and self._trainer.args.save_strategy != "no":
            self._tell_of_order(own[0])

    def newest(self) -> str | None:
        """Return the newest complete checkpoint of the run, or None. Warn of a newer one, such as half of a copy."""
        incomplete = ""
        for folder in self._newest_first():
            checkpoint = Path(folder)
            why = why_incomplete(checkpoint)
            if why is None:
                if incomplete:
                    warn_user(f"{incomplete}. {checkpoint.name} is complete, and is taken.")
                return folder
            if not incomplete:
                incomplete = f"{checkpoint.name} is incomplete: {why}"
        return None

    def _newest_first(self) -> list[str]:
        folders = reversed(sort_checkpoints(self._trainer.args.output_dir))
        return [folder for folder in folders if _CHECKPOINT.search(folder)]

    def to_resume(self, asked: str | bool | None) -> str | bool | None:
        """Return the checkpoint from which to resume, the newest complete one for True. Every process must call this.

        Raises:
            ValueError: It is incomplete. transformers would go on without what is missing.
        """
        if not asked:
            return asked
        if asked is True:
            newest: str | None = None
            if self._trainer.accelerator.is_main_process:
                newest = self.newest()
                if newest is None:  # an incomplete one, so that the error below names it
                    newest = next(iter(self._newest_first()), None)
            (newest,) = broadcast_object_list([newest])
            if newest is None:
                return True  # transformers says that there is none
            asked = newest
        why = None
        if Path(asked).is_dir():
            why = why_incomplete(Path(asked))
        why = first_reason(why)
        if why is not None:
            raise ValueError(
                f"{asked} is incomplete: {why}. Resume from a complete checkpoint, or begin a new run with its "
                "weights as the model."
            )
        return asked

    # saving

    def save(self, run_folder: str, save_by_trl: Callable[[], None]) -> None:
        """Write a checkpoint to an unfinished folder and move it into place when it is complete.

        If the process is killed meanwhile, earlier checkpoints stay intact.

        Args:
            run_folder: The folder of the run.
            save_by_trl: Writes the checkpoint as TRL does.
        """
        args, state, accelerator = self._trainer.args, self._trainer.state, self._trainer.accelerator
        checkpoint = Path(run_folder, f"checkpoint-{state.global_step}")
        unfinished = Path(run_folder, UNFINISHED, checkpoint.name)
        if accelerator.is_local_main_process:
            shutil.rmtree(unfinished.parent, ignore_errors=True)  # left over from a run that was killed
        accelerator.wait_for_everyone()
        in_unfinished_folder = {
            # where transformers puts the checkpoint, looks for the best one, and rotates old ones
            "_get_output_dir": lambda trial: str(unfinished.parent),
            # transformers would upload a checkpoint without our files
            "_push_from_checkpoint": lambda checkpoint_folder: None,
        }
        with patched(self._trainer, in_unfinished_folder):
            save_by_trl()
        if not args.save_only_model:
            self._save_state(unfinished)
        # Here we repeat what transformers has done for the unfinished folder
        if state.best_global_step:
            best = os.path.join(run_folder, f"checkpoint-{state.best_global_step}")
            if os.path.exists(best) or Path(best) == checkpoint:
                state.best_model_checkpoint = best
            if args.should_save:
                state.save_to_json(str(unfinished / TRAINER_STATE_NAME))
        has_moved = self._move_into_place(unfinished, checkpoint)
        if not args.save_only_model:
            self.last = checkpoint
            self.last_step = state.global_step
        if args.push_to_hub:
            self._trl._push_from_checkpoint(str(checkpoint))
        if args.should_save or has_moved:  # on each disk
            rotate_checkpoints(run_folder, args.save_total_limit, state.best_model_checkpoint, use_mtime=True)

    def note_best(self) -> None:
        """Let the last checkpoint be the best one, if an evaluation that came after its save has found it so."""
        state = self._trainer.state
        if state.best_global_step == state.global_step == self.last_step:
            state.best_model_checkpoint = str(self.last)

    def _save_state(self, checkpoint: Path) -> None:
        """Add this process's rollouts in use, position and metrics, and what the features save."""
        trainer = self._trainer
        checkpoint.mkdir(parents=True, exist_ok=True)
        trainer.metrics.settle()
        window = {
            "run": self._run_id(),
            "settings": window_settings(trainer),
            "position": self._trl._step,  # micro-batches so far
            "rollouts": None if is_before_generation(trainer) else self._trl._buffered_inputs,
            "metrics": dict(self._trl._metrics["train"]),
            "pool": trainer.metrics.state(),
            "tables": self._tables(),
            "evaluation_is_due": self.evaluation_is_due,
            "epochs_are_whole": self._epochs_are_whole(),
        }
        write_state(window, checkpoint / self._window_file())
        for feature in trainer.features:
            feature.save_state(checkpoint)

    def _run_id(self) -> str:
        """Return the id of the run, which the first checkpoint gives it. All processes ask."""
        if not self._run:
            self._run = broadcast_object_list([uuid.uuid4().hex])[0]
        return self._run

    def _move_into_place(self, unfinished: Path, checkpoint: Path) -> bool:
        """Write the manifest and rename the folder, when all processes have written their files.

        Returns True on one process for each disk.
        """
        accelerator = self._trainer.accelerator
        run = self._run_id()
        is_mover = accelerator.process_index in self._movers(unfinished)
        if is_mover:
            with suppress(FileNotFoundError):  # one from a run that was later resumed at an earlier checkpoint
                os.replace(checkpoint, unfinished.parent / "replaced")
            write_manifest(unfinished, run, self.data_order)
            os.replace(unfinished, checkpoint)
            shutil.rmtree(unfinished.parent, ignore_errors=True)
        accelerator.wait_for_everyone()
        return is_mover

    def _movers(self, unfinished: Path) -> list[int]:
        """Return the processes that move their folder: one for each disk.

        The first process of each machine writes a file, and looks for those of the others. NFS may answer from a cache
        for 30 seconds, so that two machines share a disk if either of them sees the other's file.
        """
        accelerator = self._trainer.accelerator
        is_first = accelerator.is_local_main_process
        if is_first:
            unfinished.mkdir(parents=True, exist_ok=True)
            _mark(unfinished, accelerator.process_index).touch()
        firsts: list[int] = []
        for process, is_first_of_machine in enumerate(gather_object([is_first])):  # all processes have written by now
            if is_first_of_machine:
                firsts.append(process)
        seen: list[int] = []
        if is_first:
            seen = [process for process in firsts if _can_open(_mark(unfinished, process))]
        seen_by: list[list[int]] = gather_object([seen])
        movers: list[int] = []
        for process in firsts:
            shares = [process in seen_by[mover] or mover in seen_by[process] for mover in movers]
            if not any(shares):
                movers.append(process)
        if accelerator.process_index in movers:
            for process in firsts:
                _mark(unfinished, process).unlink(missing_ok=True)
        return movers

    def _tables(self) -> str:
        """Return the table of completions of the rollouts in use as JSON; an empty one if it contains images."""
        logs = self._trl._logs
        table: dict[str, object] = {name: list(logs[name]) for name in ("prompt", "completion", "advantages")}
        for name in ("rewards", "extra"):
            table[name] = {column: list(values) for column, values in logs[name].items()}
        try:
            return json.dumps(table, default=lambda value: value.tolist())  # NumPy's numbers, arrays and tensors
        except (TypeError, AttributeError):
            return "{}"

    def _window_file(self) -> str:
        return f"{ROLLOUTS_PREFIX}{self._trainer.accelerator.process_index}.pt"

    # resuming

    def load(self, checkpoint: Path) -> None:
        """Restore what `save` has added to TRL's checkpoint, after the policy, before optimizer and scheduler.

        Raises:
            ValueError: The run cannot continue exactly.
        """
        trainer = self._trainer
        self.last = checkpoint
        self.last_step = trainer.state.global_step
        self._run = read_manifest(checkpoint).run  # "" if trl-steady has not written the checkpoint
        for feature in trainer.features:
            feature.load_state(checkpoint)
        self._skip_epochs(checkpoint)
        trainer.metrics.forget()  # of a training that this trainer has begun before
        self._trl._metrics["train"].clear()
        pool = self._load_window(checkpoint)
        # a process that did not exist in the run that wrote it must gather the same totals as the others
        of_main: list[Any] = broadcast_object_list([pool, self.evaluation_is_due])
        trainer.metrics.restore(of_main[0])
        self.evaluation_is_due = of_main[1]
        trainer.accelerator.print(f"resumed from {checkpoint.name} (step {self.last_step})", flush=True)

    def _skip_epochs(self, checkpoint: Path) -> None:
        """Bring the order of the data to where the run was. transformers then skips the batches of this epoch."""
        state = self._trainer.state
        epoch = state.epoch or 0
        if self.data_order == "sampler":
            assert self.sampler is not None
            for _ in range(int(epoch)):  # TRL's sampler draws the orders of all epochs from one generator
                next(iter(self.sampler), None)
        # for a stream, transformers takes max_steps as one epoch: the end of the first pass is 1.0 or below
        elif self.data_order == "stream" and epoch > 1 and state.global_step < state.max_steps:
            raise ValueError(
                f"{checkpoint} was taken after the stream of training data had started again, where transformers "
                "cannot restore the position. Resume from a checkpoint of the first pass, or use a dataset that has a "
                "length."
            )
        elif self.data_order == "unknown" and epoch >= 1:
            self._tell_of_order(type(self._trainer).__name__)

    def _tell_of_order(self, owner: str) -> None:
        if not self._has_told_of_order:
            warn_user(
                f"{owner} decides the order of the training data. A resume skips the batches of its epoch, as TRL's "
                "does, and draws no order of an earlier epoch again. If the order changes from epoch to epoch, let it "
                "depend on the number of the epoch."
            )
        self._has_told_of_order = True

    def _load_window(self, checkpoint: Path) -> dict[tuple[str, str], list[float]]:
        """Restore the rollouts in use, and return the totals of metrics.

        TRL's `_prepare_inputs` then takes its next micro-batch, by `_step`, from `_buffered_inputs`, or generates.
        """
        trainer = self._trainer
        interval = generation_interval(trainer)  # micro-batches from one rollout to the next
        file = checkpoint / self._window_file()
        if not file.is_file():
            if self._micro_batches_of_epoch() % interval:
                raise ValueError(
                    f"{checkpoint} was taken inside a generation window and has no {file.name}: it was written by "
                    f"TRL, or by fewer processes. Resume from a checkpoint at the end of a window (every {interval} "
                    "micro-batches)."
                )
            return {}
        window = read_state(file, trainer.accelerator.device.type)
        if self._run and window["run"] != self._run:
            raise ValueError(f"{file} is of another run than the rest of the checkpoint. Copy the checkpoint again.")
        is_over = trainer.state.global_step >= trainer.state.max_steps
        is_whole = window.get("epochs_are_whole", True)  # trl-steady 0.1 does not say
        if not is_whole and not is_over and not trainer.args.ignore_data_skip:
            raise ValueError(
                f"{checkpoint} was taken after a callback had ended an epoch early, or a resume with "
                "ignore_data_skip=True had begun one again, and transformers finds the place in the data from the "
                "length of whole epochs. Begin a new run with this checkpoint as its model, or set "
                "ignore_data_skip=True, which begins the epoch again."
            )
        before = window["settings"]
        now = window_settings(trainer)
        changed = changed_settings(before, now)
        if changed and window["rollouts"] is not None:
            lines = [f"\n  {name}={before[name]!r}; this run has {name}={now[name]!r}" for name in changed]
            raise ValueError(
                f"{checkpoint} was taken inside a generation window that began with{''.join(lines)}\nResume with the "
                "same values, or from a checkpoint at the end of a window."
            )
        self._trl._step = 0 if changed else window["position"]  # settings may change between two windows
        self._trl._buffered_inputs = window["rollouts"]
        self._trl._metrics["train"].update(window["metrics"])
        self._load_tables(json.loads(window["tables"]))
        self.evaluation_is_due = window.get("evaluation_is_due", False)  # trl-steady 0.1 saves none
        return window["pool"]

    def _load_tables(self, tables: dict[str, list[object] | dict[str, list[object]]]) -> None:
        """Restore the table of completions."""
        for name, values in tables.items():
            if isinstance(values, list):
                _refill(self._trl._logs[name], values)
                continue
            for column, cells in values.items():
                _refill(self._trl._logs[name][column], cells)

    def _epochs_are_whole(self) -> bool:
        """Return False if a callback has ended an epoch early, from whose length transformers finds the position."""
        state, loader = self._trainer.state, self._trl.callback_handler.train_dataloader
        if self.data_order != "sampler" or not has_length(loader):
            return True
        micro_batches = len(loader)
        accumulation = self._trainer.args.gradient_accumulation_steps
        epochs, steps = divmod(state.global_step, math.ceil(micro_batches / accumulation))
        expected = epochs + steps * accumulation / micro_batches
        ends_now = self._trl.control.should_epoch_stop and steps > 0
        return abs((state.epoch or 0) - expected) < 0.5 / micro_batches and not ends_now

    def _micro_batches_of_epoch(self) -> int:
        """Return the number of micro-batches since the epoch began. The last step of an epoch may have fewer."""
        args = self._trainer.args
        steps = self._trainer.state.global_step
        if self.sampler is not None:
            samples = args.per_device_train_batch_size * args.steps_per_generation * args.world_size
            micro_batches = len(cast(Sized, self.sampler)) // samples
            steps %= math.ceil(micro_batches / args.gradient_accumulation_steps)
        return steps * args.gradient_accumulation_steps


def _refill(kept: deque[object], values: Iterable[object]) -> None:
    kept.clear()
    kept.extend(values)


def _mark(unfinished: Path, process: int) -> Path:
    """Return the file by which the first process of a machine shows the others that they share its disk."""
    return unfinished / f"_machine_{process}"


def _can_open(path: Path) -> bool:
    """Return True if a file is there. Opening it asks the server of a shared disk, where `exists` may ask a cache."""
    try:
        path.open().close()
    except FileNotFoundError:
        return False
    return True
