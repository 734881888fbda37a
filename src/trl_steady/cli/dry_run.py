"""`--dry-run`: build everything, print the arithmetic of the run, and end it in place of training, or after a step."""

import math
import sys
import tempfile
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple, NoReturn, cast
from unittest import mock

import torch
from transformers import TrainerControl, TrainerState
from transformers.trainer_callback import TrainerCallback
from transformers.trainer_utils import has_length

from trl_steady.config.shared import SharedOptions
from trl_steady.functional.memory import ADAM, Model, passes
from trl_steady.trainers.base import SteadyTrainer

_ADAPTERS = {"default": "adapter", "ref": "reference", "value": "critic", "reward": "reward model"}


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
        micro_batch, accumulated, processes = (
            args.per_device_train_batch_size,
            args.gradient_accumulation_steps,
            args.world_size,
        )
        completions, slices, group = args.generation_batch_size, args.steps_per_generation, args.num_generations
        assert completions and slices and group  # filled in and checked by TRL's config
        per_step, window = micro_batch * accumulated * processes, slices * args.num_iterations
        return cls(processes, completions // group, completions, per_step, accumulated, micro_batch, window)

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
            peak = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0
            print("dry run: took one optimizer step" + (f", with a peak of {peak:.1f} GB" if peak else ""), flush=True)
        sys.exit()


@contextmanager
def dry_run(*, step: bool) -> Generator[None]:
    """Let configs print their batches, and trainers print the run in place of training.

    Outputs go to a temporary folder. No tracker starts, nothing is sent to a hub, and checkpoints are not read.

    Args:
        step: True to take one optimizer step too.
    """
    said: set[str] = set()
    check = SharedOptions.__post_init__
    train = SteadyTrainer.train

    def say(args: SharedOptions, text: str) -> None:
        if args.process_index == 0 and text not in said:
            said.add(text)
            print(text, flush=True)

    def announce(args: SharedOptions) -> None:
        args.output_dir = folder
        args.report_to = []
        args.resume_from_checkpoint = None
        args.push_to_hub = False
        args.log_completions_hub_repo = None
        say(args, f"dry run: nothing is saved\n{Batches.of(args)}")

    @wraps(check)
    def check_and_announce(args: SharedOptions) -> None:
        check(args)
        announce(args)

    @wraps(train)
    def rehearse(trainer: SteadyTrainer, *_: object, **__: object) -> NoReturn:
        args: SharedOptions = trainer.args
        announce(args)  # again: the script may have changed them
        say(args, "\n".join(f"  {line}" for line in _lines(trainer)))
        if step:
            args.eval_on_start = False
            trainer.add_callback(_OneStep())
            train(trainer)
        sys.exit()

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(SharedOptions, "__post_init__", check_and_announce),
        mock.patch.object(SteadyTrainer, "train", rehearse),
    ):
        yield


def _lines(trainer: SteadyTrainer) -> Generator[str]:
    args: SharedOptions = trainer.args
    data = trainer.get_train_dataloader()
    epoch = len(data) if has_length(cast(Any, data)) else None
    _, per_epoch, *_, steps = trainer.set_initial_training_values(args, data)
    rollouts = Batches.of(args).rollouts(steps, epoch)
    yield f"run: {steps} optimizer steps, {rollouts} rollouts" + (f", {steps / per_epoch:.3g} epochs" if epoch else "")
    rows = cast(Any, trainer.eval_dataset)
    if args.eval_strategy != "no" and has_length(rows):
        prompts = sum(map(len, rows.values())) if isinstance(rows, dict) else len(rows)
        completions = prompts * (args.num_generations_eval or args.num_generations or 1)
        yield f"evaluation: {prompts} prompts, {completions} completions"
    parts = memory(trainer)
    total, listed = sum(parts.values()), " + ".join(f"{part} {size / 1e9:.3g}" for part, size in parts.items())
    yield f"memory of a device, by arithmetic and without prompts: {total / 1e9:.3g} GB = {listed}"
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        yield "  FSDP and DeepSpeed divide what they shard among the processes"
    if args.use_vllm and args.vllm_mode == "colocate":
        yield f"  vLLM takes {args.vllm_gpu_memory_utilization:.0%} of the device in addition"


def memory(trainer: SteadyTrainer) -> dict[str, float]:
    """Return the bytes on a device by their purpose: as `docs/memory.md`, but for the weights that have been loaded.

    The micro-batch has the longest completions, without their prompts.
    """
    args: SharedOptions = trainer.args
    parts, trained, seen = Counter[str](), 0, set[torch.nn.Parameter]()
    is_quantised, is_wide = False, False
    critic = getattr(trainer, "critic", None)
    models = [("weights", trainer.model), ("reference", trainer.ref_model)]
    models += [("critic", getattr(critic, name, None)) for name in ("backbone", "head")]
    models += [("reward model", function) for function in trainer.reward_funcs]
    adapters = getattr(trainer.model, "peft_config", {})
    for part, model in models:
        for name, each in model.named_parameters() if isinstance(model, torch.nn.Module) else ():
            blocks = getattr(getattr(each, "quant_state", None), "absmax", None)  # scales of 4-bit weights
            size = getattr(each, "ds_numel", each.numel()) * each.element_size()  # of the whole, if ZeRO-3 shards it
            size += 0 if blocks is None else blocks.numel() * blocks.element_size()
            if each not in seen:
                adapter = next((_ADAPTERS.get(word, word) for word in name.split(".") if word in adapters), part)
                parts[adapter] += size
                is_trained = adapter == "critic" or (each.requires_grad and adapter in ("weights", "adapter"))
                trained += size * is_trained  # the adapter of a critic needs gradients in its own pass only
                is_wide |= adapter == "adapter" and each.element_size() > 2
            seen.add(each)
            is_quantised |= blocks is not None
    parts |= {"gradients": trained, "optimizer, if AdamW": ADAM * trained}
    if sizes := _sizes(trainer.model):
        # float32 adapters take as much on a quantised base
        mode = ("QLoRA" if is_quantised and not is_wide else "LoRA") if adapters else "full"
        tokens = args.per_device_train_batch_size * (args.max_completion_length or 0)
        setting = {"checkpointing": args.gradient_checkpointing, "on_cpu": args.device.type == "cpu"}
        kept, *moments = passes(sizes, mode, tokens, **setting).values()
        parts[f"micro-batch of {tokens} tokens"] = round(kept + max(moments))
    return {**parts}


def _sizes(model: object) -> Model | None:
    """Return the sizes of a decoder; None if its config has other names, or sizes that differ among layers."""
    try:
        config = cast(Any, model).config.get_text_config()
        experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 0
        sizes = Model(
            hidden=config.hidden_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            intermediate=config.moe_intermediate_size if experts else config.intermediate_size,
            tied=config.tie_word_embeddings,
            experts=experts,
            chosen=config.num_experts_per_tok if experts else 1,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            vocab=config.vocab_size,
        )
    except Exception:  # such as a class of transformers for an attribute of layers
        return None
    has_all = all(isinstance(size, int) for size in sizes)  # pyright: ignore[reportUnnecessaryIsInstance]
    return sizes if has_all else None  # some have lists, or None
