"""Checkpoints that appear only when they are complete, and an exact resume from any step.

This file knows how transformers writes and reads a checkpoint, and TRL's buffered rollouts.

A checkpoint holds what transformers and TRL write, `rollouts_N.pt` of each process N (this file), and what features
add in `save_state`: tensors as safetensors, state for `torch.load` as `.pt`, and plain records as JSON. Each feature
names its own files, so that a run without it has none of them.
"""

import functools
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Generator, Sized
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, cast
from zipfile import is_zipfile

from accelerate.utils import broadcast_object_list
from peft import PeftModel
from safetensors import SafetensorError, safe_open
from torch.utils.data import Sampler
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import rotate_checkpoints, sort_checkpoints

from trl_steady.core.feature import Trainer, warn_user
from trl_steady.core.state_file import read_state, write_state
from trl_steady.trl_bridge.patching import patched
from trl_steady.trl_bridge.trl_state import as_trl_trainer, generation_interval, is_before_generation
from trl_steady.trl_bridge.window import changed_settings, window_settings

UNFINISHED = "_unfinished"
"""Folder of checkpoints that are being written. The upload to the Hub skips names that begin with "_"."""
_SIZES = "sizes.json"  # of the files that a resume reads


class Checkpoints:
    """Writes complete checkpoints, with the rollouts in use, that survive a killed save, and resumes from them."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer: Trainer = trainer
        self._trl = as_trl_trainer(trainer)  # the same, with TRL's private attributes
        self.sampler: Sampler[int] | None = None
        """TRL's sampler of the training data; None for a stream."""
        self.last: Path | None = None
        """Written last, or else resumed from."""

    def newest(self) -> str | None:
        """Return the newest complete checkpoint of the run, or None. Warn of a newer one, such as half of a copy."""
        incomplete = ""
        folders = reversed(sort_checkpoints(self._trainer.args.output_dir))  # also copies, such as checkpoint-9-old
        for checkpoint in map(Path, filter(re.compile(r"checkpoint-\d+$").search, folders)):
            if (cut_off := _cut_off(checkpoint)) is None:
                if incomplete:
                    warn_user(f"{incomplete}), {checkpoint.name} is not.")
                return str(checkpoint)
            incomplete = incomplete or (
                f"{checkpoint.name} is incomplete ({cut_off} is missing or cut off; "
                f"resume_from_checkpoint={str(checkpoint)!r} takes it all the same"
            )
        return None

    def save(self, run: str, save_by_trl: Callable[[], None]) -> None:
        """Write a checkpoint to an unfinished folder and move it into place when it is complete.

        If the process is killed meanwhile, earlier checkpoints stay intact.

        Args:
            run: The folder of the run.
            save_by_trl: Writes the checkpoint as TRL does.
        """
        args, state, accelerator = self._trainer.args, self._trainer.state, self._trainer.accelerator
        checkpoint = Path(run, f"checkpoint-{state.global_step}")
        unfinished = Path(run, UNFINISHED, checkpoint.name)
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
            best = os.path.join(run, f"checkpoint-{state.best_global_step}")
            if os.path.exists(best) or Path(best) == checkpoint:
                state.best_model_checkpoint = best
            if args.should_save:
                state.save_to_json(str(unfinished / TRAINER_STATE_NAME))
        self._move_into_place(unfinished, checkpoint)
        self.last = checkpoint
        if args.push_to_hub:
            self._trl._push_from_checkpoint(str(checkpoint))
        if args.should_save:
            rotate_checkpoints(run, args.save_total_limit, state.best_model_checkpoint, use_mtime=True)

    def _move_into_place(self, unfinished: Path, checkpoint: Path) -> None:
        """Rename a complete checkpoint, when all processes have written their files."""
        accelerator = self._trainer.accelerator
        # on a shared disk the main process does it; the second turn is for machines with disks of their own
        for moves_it in (accelerator.is_main_process, accelerator.is_local_main_process):
            accelerator.wait_for_everyone()
            if moves_it and unfinished.exists():
                if checkpoint.exists():  # from a run that was later resumed at an earlier checkpoint
                    os.replace(checkpoint, unfinished.parent / "replaced")
                (unfinished / _SIZES).write_text(json.dumps({**_sizes(unfinished), TRAINER_STATE_NAME: 1}))
                os.replace(unfinished, checkpoint)
                shutil.rmtree(unfinished.parent, ignore_errors=True)
        accelerator.wait_for_everyone()

    def _save_state(self, checkpoint: Path) -> None:
        """Add this process's rollouts in use, position and metrics, and what the features save."""
        trainer = self._trainer
        checkpoint.mkdir(parents=True, exist_ok=True)
        trainer.metrics.settle()
        window = {
            "settings": window_settings(trainer),
            "position": self._trl._step,
            "rollouts": None if is_before_generation(trainer) else self._trl._buffered_inputs,
            "metrics": dict(self._trl._metrics["train"]),
            "pool": trainer.metrics.state(),
            "tables": self._tables(),
        }
        write_state(window, checkpoint / self._window_file())
        for feature in trainer.features:
            feature.save_state(checkpoint)

    def load(self, checkpoint: Path) -> None:
        """Restore what `save` has added to TRL's checkpoint, after the policy, before optimizer and scheduler.

        Raises:
            ValueError: The run cannot continue exactly.
        """
        trainer, self.last = self._trainer, checkpoint
        for feature in trainer.features:
            feature.load_state(checkpoint)
        self._skip_epochs(checkpoint)
        pool = self._load_window(checkpoint)
        # a process that did not exist in the run that wrote it must gather the same totals as the others
        trainer.metrics.restore(broadcast_object_list([pool])[0])

    def _skip_epochs(self, checkpoint: Path) -> None:
        """Draw the orders of the epochs that have passed, which TRL's sampler draws from one generator."""
        state = self._trainer.state
        # for a stream, transformers takes max_steps as one epoch: the end of the first pass is 1.0 or below
        is_in_later_pass = self.sampler is None and (state.epoch or 0) > 1
        if is_in_later_pass and state.global_step < state.max_steps:
            raise ValueError(
                f"{checkpoint} was taken after the stream of training data had started again, where transformers "
                "cannot restore the position. Resume from a checkpoint of the first pass, or use a dataset that has a "
                "length."
            )
        for _ in range(int(state.epoch or 0)):
            next(iter(self.sampler or ()), None)

    def _load_window(self, checkpoint: Path) -> dict[tuple[str, str], list[float]]:
        """Restore the rollouts in use, and return the totals of metrics."""
        trainer = self._trainer
        interval, file = generation_interval(trainer), checkpoint / self._window_file()
        if not file.is_file():
            if self._micro_batches_of_epoch() % interval:
                raise ValueError(
                    f"{checkpoint} was taken inside a generation window and has no {file.name}: it was written by "
                    "TRL, by fewer processes, or with save_only_model=True. Resume from a checkpoint at the end of a "
                    f"window (every {interval} micro-batches)."
                )
            return {}
        window = read_state(file, trainer.accelerator.device.type)
        before, now = window["settings"], window_settings(trainer)
        changed = changed_settings(before, now)
        if changed and window["rollouts"] is not None:
            lines = [f"\n  {name}={before[name]!r}; this run has {name}={now[name]!r}" for name in changed]
            raise ValueError(
                f"{checkpoint} was taken inside a generation window that began with{''.join(lines)}\nResume with the "
                "same values, or from a checkpoint at the end of a window."
            )
        self._trl._step = 0 if changed else window["position"]
        self._trl._buffered_inputs = window["rollouts"]
        self._trl._metrics["train"].update(window["metrics"])
        for name, values in json.loads(window["tables"]).items():
            if isinstance(values, list):
                self._trl._logs[name].extend(values)
            else:
                for column, cells in values.items():
                    self._trl._logs[name][column].extend(cells)
        return window["pool"]

    def _micro_batches_of_epoch(self) -> int:
        """Return the number of micro-batches since the epoch began. The last step of an epoch may have fewer."""
        steps, args = self._trainer.state.global_step, self._trainer.args
        if self.sampler is not None:
            samples = args.per_device_train_batch_size * args.steps_per_generation * args.world_size
            micro_batches = len(cast(Sized, self.sampler)) // samples
            steps %= math.ceil(micro_batches / args.gradient_accumulation_steps)
        return steps * args.gradient_accumulation_steps

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
        return f"rollouts_{self._trainer.accelerator.process_index}.pt"


def _sizes(checkpoint: Path) -> dict[str, int]:
    """Return the bytes of each file with tensors, and of the state, which TRL writes last, without this list."""
    kinds = (".safetensors", ".bin", ".pt", ".pth", ".distcp", TRAINER_STATE_NAME)
    files = [path for path in checkpoint.rglob("*") if path.name.endswith(kinds)]
    return {path.relative_to(checkpoint).as_posix(): path.stat().st_size for path in files}


def _cut_off(checkpoint: Path) -> str | None:
    """Return the first file that is missing or cut off, or None."""
    try:
        sizes = json.loads((checkpoint / _SIZES).read_text())
    except FileNotFoundError:  # written by TRL
        sizes = {TRAINER_STATE_NAME: 1}
    except ValueError:
        return _SIZES
    return next((name for name, size in sizes.items() if not _is_whole(checkpoint / name, size)), None)


def _is_whole(path: Path, size: int) -> bool:
    """Return True if a file has its size, or less, but is whole: somebody has written it anew, in bf16 perhaps."""
    try:
        if path.stat().st_size >= size or is_zipfile(path):
            return True
        with safe_open(path, "pt"):
            return True
    except (OSError, SafetensorError):
        return False


def save_only(model: PeftModel, adapter: str) -> AbstractContextManager[None]:
    """Let the model save one adapter, and no others."""
    return patched(model, {"save_pretrained": functools.partial(model.save_pretrained, selected_adapters=[adapter])})


@contextmanager
def save_without(model: PeftModel, adapter: str) -> Generator[dict[str, Any]]:
    """Keep an adapter out of what the model saves. Gives the state that the model is told to save, if it is told."""
    save_all, gathered = model.save_pretrained, {}

    def save(*arguments: Any, **options: Any) -> None:
        gathered.update(options.get("state_dict") or {})
        selected = options.pop("selected_adapters", None) or [*model.peft_config]
        save_all(*arguments, selected_adapters=[name for name in selected if name != adapter], **options)

    with patched(model, {"save_pretrained": save}):
        yield gathered
