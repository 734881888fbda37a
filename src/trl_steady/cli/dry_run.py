"""`--dry-run`: build everything, print the arithmetic of the run, and end it in place of training, or after a step."""

import functools
import math
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, cast
from unittest import mock

import torch
from accelerate import PartialState
from transformers import TrainerControl, TrainerState
from transformers.trainer_callback import TrainerCallback
from transformers.trainer_utils import has_length

from trl_steady.cli.device_memory import host_memory, memory
from trl_steady.cli.earlier_stages import EarlierStages
from trl_steady.config.shared import SharedOptions
from trl_steady.trainers.base import SteadyTrainer

IS_ON = False
"""True inside `dry_run`, for scripts that do more than build a trainer and train."""


class Batches(NamedTuple):
    """Numbers that follow from a config. A rollout, and an optimizer step, are those of all processes together."""

    processes: int
    prompts: int
    """Prompts of a rollout."""
    completions: int
    """Completions of a rollout."""
    per_step: int
    """Completions of an optimizer step."""
    micro_batches: int
    """Micro-batches of an optimizer step, on each process."""
    micro_batch: int
    """Completions of a micro-batch."""
    window: int
    """Micro-batches between two rollouts, on each process."""

    @classmethod
    def of(cls, args: SharedOptions) -> "Batches":
        """Return the numbers of a config."""
        completions = args.generation_batch_size
        slices = args.steps_per_generation
        group = args.num_generations
        assert completions and slices and group  # filled in and checked by TRL's config
        micro_batch = args.per_device_train_batch_size
        micro_batches = args.gradient_accumulation_steps
        return cls(
            processes=args.world_size,
            prompts=completions // group,
            completions=completions,
            per_step=micro_batch * micro_batches * args.world_size,
            micro_batches=micro_batches,
            micro_batch=micro_batch,
            window=slices * args.num_iterations,
        )

    def rollouts(self, steps: int, epoch: int | None) -> int:
        """Return the rollouts of optimizer steps.

        Args:
            steps: Number of optimizer steps.
            epoch: Micro-batches of an epoch on each process, whose last step may have fewer. None: not known.
        """
        micro_batches = steps * self.micro_batches
        if epoch:
            epochs, rest = divmod(steps, math.ceil(epoch / self.micro_batches))
            micro_batches = epochs * epoch + min(rest * self.micro_batches, epoch)
        return math.ceil(micro_batches / self.window)

    def __str__(self) -> str:
        return (
            f"  rollout: {self.prompts} prompts, {self.completions} completions, for "
            f"{self.window / self.micro_batches:g} optimizer steps\n"
            f"  optimizer step: {self.per_step} completions = gradient_accumulation_steps {self.micro_batches} "
            f"* per_device_train_batch_size {self.micro_batch} * processes {self.processes}"
        )


class _OneStep(TrainerCallback):
    """Ends the run with the log of its first optimizer step, before anything is saved."""

    def on_step_end(self, args: object, state: object, control: TrainerControl, **_: object) -> None:
        control.should_log = True

    def on_log(self, args: object, state: TrainerState, *_: object, **__: object) -> None:
        """End the run, once all others have this log."""
        if not state.global_step:  # of an evaluation
            return
        if state.is_world_process_zero:
            text = "dry run: took one optimizer step"
            peak = 0
            if torch.cuda.is_available():
                peak = torch.cuda.max_memory_allocated()
            if peak:
                text = f"{text}, with a peak of {peak / 1e9:.1f} GB"
            print(text, flush=True)
        sys.exit()


@contextmanager
def dry_run(*, step: bool) -> Generator[None]:
    """Let configs print their batches, and trainers print the run in place of training.

    Outputs go to a temporary folder. No tracker starts, nothing is sent to a hub, and checkpoints are not read.
    Earlier stages of a script, and evaluations before the training, are announced and left out.

    Args:
        step: True to take one optimizer step too.
    """
    said: set[str] = set()
    check = SharedOptions.__post_init__
    train = SteadyTrainer.train

    def say(text: str) -> None:
        if PartialState().is_main_process and text not in said:
            said.add(text)
            print(text, flush=True)

    def announce(args: SharedOptions) -> None:
        args.output_dir = folder
        args.report_to = []
        args.resume_from_checkpoint = None
        args.push_to_hub = False
        args.log_completions_hub_repo = None
        say(f"dry run: nothing is saved\n{Batches.of(args)}")

    @functools.wraps(check)
    def check_and_announce(args: SharedOptions) -> None:
        check(args)
        announce(args)

    @functools.wraps(train)
    def rehearse(trainer: SteadyTrainer, *_: object, **__: object) -> NoReturn:
        args: SharedOptions = trainer.args
        announce(args)  # again: the script may have changed them
        say("\n".join(_lines(trainer)))
        if step:
            args.eval_on_start = False
            trainer.add_callback(_OneStep())
            train(trainer)
        sys.exit()

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(SharedOptions, "__post_init__", check_and_announce),
        mock.patch.object(SteadyTrainer, "train", rehearse),
        mock.patch(f"{__name__}.IS_ON", True),
        EarlierStages(Path(folder), say).left_out(),
    ):
        yield


def _lines(trainer: SteadyTrainer) -> Generator[str]:
    """Yield the lines about a run that need its trainer."""
    args: SharedOptions = trainer.args
    data = trainer.get_train_dataloader()
    epoch: int | None = None
    if has_length(cast(Any, data)):
        epoch = len(data)
    planned = trainer.set_initial_training_values(args, data)
    steps_per_epoch = planned[1]
    steps = planned[-1]
    rollouts = Batches.of(args).rollouts(steps, epoch)
    run = f"  run: {steps} optimizer steps, {rollouts} rollouts"
    if epoch:
        run = f"{run}, {steps / steps_per_epoch:.3g} epochs"
    yield run
    sets = cast(Any, trainer.eval_dataset)
    if not isinstance(sets, dict):
        sets = {"": sets}
    if args.eval_strategy != "no" and all(map(has_length, sets.values())):
        prompts = sum(map(len, sets.values()))
        completions = prompts * (args.num_generations_eval or args.num_generations or 1)
        yield f"  evaluation: {prompts} prompts, {completions} completions"
    parts = memory(trainer)
    total = sum(parts.values())
    listed = " + ".join(f"{part} {size / 1e9:.3g}" for part, size in parts.items())
    yield f"  memory of a device, by arithmetic and without prompts: {total / 1e9:.3g} GB = {listed}"
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        yield "    FSDP and DeepSpeed divide what they shard among the processes"
    held = host_memory(trainer)
    if held and args.device.type == "cpu":
        yield "    offload saves nothing here: the device is the host"
    elif held:
        yield f"    offload keeps {held / 1e9:.3g} GB in the host's memory in addition"
    if args.use_vllm and args.vllm_mode == "colocate":
        yield f"    vLLM takes {args.vllm_gpu_memory_utilization:.0%} of the device in addition"
