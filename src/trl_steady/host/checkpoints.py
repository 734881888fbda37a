"""TRL's trainer with checkpoints that appear only when complete, and with an exact resume from any step."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from torch.utils.data import Sampler
from transformers import trainer_utils
from transformers.trainer import TRAINER_STATE_NAME

from trl_steady.host.metrics import MeasuringTrainer
from trl_steady.host.names import generation_interval
from trl_steady.host.weights import not_loaded, refuse_another_model, saved_otherwise
from trl_steady.host.window import different, refuse_other_settings, window_settings

__all__ = ["CheckpointingTrainer"]


class CheckpointingTrainer(MeasuringTrainer):
    """`trl.GRPOTrainer` whose checkpoints survive a killed save and also contain the rollouts in use."""

    _writes_checkpoint = False
    _train_sampler: Sampler[Any] | None = None

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        loads_names = not (isinstance(self.model, PeftModel) or self.is_deepspeed_enabled or self.is_fsdp_enabled)
        if self.args.load_best_model_at_end and loads_names:
            lost = saved_otherwise(self.model)
            if lost:
                raise ValueError(
                    f"load_best_model_at_end=True cannot load a fully trained {type(self.model).__name__}: "
                    f"transformers saves {len(lost)} of its tensors under other names than it loads, for example "
                    f"{min(lost)}. Set load_best_model_at_end=False, keep "
                    f"metric_for_best_model={self.args.metric_for_best_model!r}, and after training load "
                    "trainer.state.best_model_checkpoint with from_pretrained. Or train an adapter."
                )

    def get_batch_samples(self, *arguments: Any, **keywords: Any) -> Any:
        """Return the micro-batches of an optimizer step, or none if the run was resumed after its last step.

        transformers would take one more step.
        """
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return [], None
        return super().get_batch_samples(*arguments, **keywords)

    def _get_train_sampler(self, dataset: Any = None) -> Sampler[Any]:
        self._train_sampler = super()._get_train_sampler(dataset)
        return self._train_sampler

    def _get_output_dir(self, trial: Any) -> str:
        folder = super()._get_output_dir(trial)
        # the upload to the Hub skips names that begin with "_"
        return os.path.join(folder, "_unfinished") if self._writes_checkpoint else folder

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Write a checkpoint to a temporary folder and move it into place when it is complete.

        If the process is killed meanwhile, earlier checkpoints stay intact.
        """
        run = super()._get_output_dir(trial)
        checkpoint = Path(run, f"checkpoint-{self.state.global_step}")
        self._writes_checkpoint = True
        try:
            unfinished = Path(self._get_output_dir(trial), checkpoint.name)
            if self.accelerator.is_local_main_process:
                shutil.rmtree(unfinished.parent, ignore_errors=True)  # left over from a run that was killed
            self.accelerator.wait_for_everyone()
            super()._save_checkpoint(model, trial)
            if not self.args.save_only_model:
                self.add_to_checkpoint(unfinished)
        finally:
            self._writes_checkpoint = False
        if self.state.best_global_step:  # transformers has looked for the best one in the temporary folder
            best = os.path.join(run, f"checkpoint-{self.state.best_global_step}")
            if os.path.exists(best) or Path(best) == checkpoint:
                self.state.best_model_checkpoint = best
            if self.args.should_save:
                self.state.save_to_json(str(unfinished / TRAINER_STATE_NAME))
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            _publish(unfinished, checkpoint)
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_local_main_process and unfinished.exists():  # another machine with its own disk
            _publish(unfinished, checkpoint)
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub:
            super()._push_from_checkpoint(str(checkpoint))
        if self.args.should_save:
            trainer_utils.rotate_checkpoints(
                output_dir=run,
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if not self._writes_checkpoint:
            super()._push_from_checkpoint(checkpoint_folder)

    def add_to_checkpoint(self, checkpoint: Path) -> None:
        """Add the rollouts in use, the position in them and the metrics not yet logged to a checkpoint.

        Every process must call this method. Each writes its own file.
        """
        checkpoint.mkdir(parents=True, exist_ok=True)
        window = {
            "settings": window_settings(self),
            "position": self._step,
            "rollouts": self._buffered_inputs if self._step % generation_interval(self) else None,
            "metrics": dict(self._metrics["train"]),
            # as numbers, which `map_location` does not move to a device
            "pool": {key: totals.tolist() for key, totals in self._pool["train"].items()},
            "tables": self._tables(),
        }
        torch.save(window, checkpoint / self._window_file())

    def take_from_checkpoint(self, checkpoint: Path) -> None:
        """Restore what `add_to_checkpoint` added.

        Raises:
            ValueError: The checkpoint cannot be resumed exactly. It is of another model. Or it was taken inside a
                generation window, and its rollouts are missing or were made with other settings. Or it was taken in
                the second pass over a stream of data, and the run has steps left.
        """
        self._refuse_another_model(checkpoint)  # again, because DeepSpeed does not use `_load_from_checkpoint`
        # for a stream, transformers takes max_steps as one epoch: the end of the first pass is 1.0 or below
        is_in_later_pass = self._train_sampler is None and (self.state.epoch or 0) > 1
        if is_in_later_pass and self.state.global_step < self.state.max_steps:
            raise ValueError(
                f"{checkpoint} was taken after the stream of training data had started again, where transformers "
                "cannot restore the position. Resume from a checkpoint of the first pass, or use a dataset that has a "
                "length."
            )
        for _ in range(int(self.state.epoch or 0)):  # TRL's sampler draws each epoch's order from one generator
            next(iter(self._train_sampler or ()), None)
        interval, file = generation_interval(self), checkpoint / self._window_file()
        if not file.is_file():
            if self.state.global_step * self.args.gradient_accumulation_steps % interval:
                raise ValueError(
                    f"{checkpoint} was taken inside a generation window and has no {file.name}, so it cannot be "
                    "resumed exactly: it was written by TRL, by fewer processes, or with save_only_model=True. Resume "
                    f"from a checkpoint at the end of a window (every {interval} micro-batches)."
                )
            return
        window = torch.load(file, map_location=self.accelerator.device.type, weights_only=True)
        settings = window_settings(self)
        if window["rollouts"] is not None:
            refuse_other_settings(checkpoint, window["settings"], settings)
        same = not different(window["settings"], settings)
        self._step = window["position"] if same else 0
        self._buffered_inputs = window["rollouts"]
        self._metrics["train"].update(window["metrics"])
        for key, totals in window["pool"].items():
            self._pool["train"][key] = torch.tensor(totals, dtype=torch.float64)
        for name, values in json.loads(window["tables"]).items():
            if isinstance(values, list):
                self._logs[name].extend(values)
            else:
                for column, cells in values.items():
                    self._logs[name][column].extend(cells)

    def _tables(self) -> str:
        """Return the table of completions of the rollouts in use as JSON; an empty one if it contains images."""
        lists = {name: list(self._logs[name]) for name in ("prompt", "completion", "advantages")}
        columns = {name: {k: list(v) for k, v in self._logs[name].items()} for name in ("rewards", "extra")}
        try:
            return json.dumps({**lists, **columns})
        except TypeError:
            return "{}"

    def _window_file(self) -> str:
        return f"rollouts_{self.accelerator.process_index}.pt"

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.take_from_checkpoint(Path(checkpoint))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        self._refuse_another_model(Path(resume_from_checkpoint))
        self.load_model_from(Path(resume_from_checkpoint), model)

    def _refuse_another_model(self, checkpoint: Path) -> None:
        refuse_another_model(checkpoint, self.accelerator.unwrap_model(self.model, keep_torch_compile=False))

    def load_model_from(self, checkpoint: Path, model: torch.nn.Module | None) -> None:
        """Load the policy from a checkpoint as transformers does; subclasses may override this method."""
        super()._load_from_checkpoint(str(checkpoint), model)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        super()._issue_warnings_after_load(load_result)
        tensors = {name: tensor for name, tensor in self.model.state_dict().items() if isinstance(tensor, Tensor)}
        lost = not_loaded(tensors, tensors.keys() - set(load_result.missing_keys))
        if not lost:
            return
        lacks = f"the checkpoint lacks {len(lost)} of the model's {len(tensors)} tensors, for example {min(lost)}: "
        if set(lost) <= set(saved_otherwise(self.model)):
            raise ValueError(
                f"{lacks}transformers saves models of this kind under other names than it loads, and would keep the "
                "initial tensors. Train an adapter, or start a new run with the checkpoint as its model."
            )
        raise ValueError(
            f"{lacks}it is of a {type(self.model).__name__} with other tensors. Give the trainer the model that the "
            "run started with."
        )

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        self.save_policy(output_dir, state_dict)

    def save_policy(self, folder: str | None, state_dict: Any) -> None:
        """Write the policy to a folder as transformers does; subclasses may override this method."""
        super()._save(folder, state_dict)


def _publish(unfinished: Path, checkpoint: Path) -> None:
    if checkpoint.exists():  # from a run that was later resumed at an earlier checkpoint
        os.replace(checkpoint, unfinished.parent / "replaced")
    os.replace(unfinished, checkpoint)
    shutil.rmtree(unfinished.parent, ignore_errors=True)
