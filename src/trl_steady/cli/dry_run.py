"""`--dry-run`: build everything, print the arithmetic of the run, and end it in place of training, or after a step."""

import functools
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Container, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, cast
from unittest import mock

import torch
from accelerate import PartialState
from packaging.version import Version
from transformers import TrainerControl, TrainerState
from transformers.trainer_callback import TrainerCallback
from transformers.trainer_utils import has_length

from trl_steady.cli.earlier_stages import EarlierStages
from trl_steady.config.shared import SharedOptions
from trl_steady.functional.memory import ADAM, Model, on_host, passes
from trl_steady.trainers.base import SteadyTrainer

IS_ON = False
"""True inside `dry_run`, for scripts that do more than build a trainer and train."""
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


def _owner(model: torch.nn.Module, parameter: str, adapters: Container[str]) -> str | None:
    """Return whose adapter has a parameter; None for weights of the model itself.

    PEFT keeps adapters in dictionaries. A module of the model may have the name of an adapter too, such as `value`.
    """
    words = parameter.split(".")
    for place, word in enumerate(words):
        if word not in adapters:
            continue
        holder = model.get_submodule(".".join(words[:place]))
        if isinstance(holder, torch.nn.ModuleDict | torch.nn.ParameterDict):
            return _ADAPTERS.get(word, word)
    return None


def memory(trainer: SteadyTrainer) -> dict[str, float]:
    """Return the bytes on a device by their purpose: as `docs/memory.md`, but for the weights that have been loaded.

    The micro-batch has the longest completions, without their prompts.
    """
    args: SharedOptions = trainer.args
    parts = Counter[str]()
    trained = 0
    seen = set[torch.nn.Parameter]()
    is_quantised = False
    has_wide_adapter = False
    adapters = getattr(trainer.model, "peft_config", {})
    for part, model in _models(trainer):
        for name, parameter in model.named_parameters():
            scales = getattr(getattr(parameter, "quant_state", None), "absmax", None)  # of 4-bit weights
            is_quantised |= scales is not None
            if parameter in seen:
                continue
            seen.add(parameter)
            size = getattr(parameter, "ds_numel", parameter.numel()) * parameter.element_size()  # ZeRO-3: of the whole
            if scales is not None:
                size += scales.numel() * scales.element_size()
            owner = _owner(model, name, adapters) or part
            parts[owner] += size
            if owner == "adapter" and parameter.element_size() > 2:
                has_wide_adapter = True
            # the adapter of a critic needs gradients in its own pass only
            if owner == "critic" or (parameter.requires_grad and owner in ("weights", "adapter")):
                trained += size
    if trained:
        parts["gradients"] = trained
        parts["optimizer, if AdamW"] = ADAM * trained
    sizes = _sizes(trainer.model)
    if sizes is not None:
        mode = "full"
        if adapters:
            mode = "LoRA"
            if is_quantised and not has_wide_adapter:  # float32 adapters take as much on a quantised base
                mode = "QLoRA"
        tokens = _tokens(args)
        device = args.device.type
        checkpointing = _checkpointing(args)
        if device == "cpu":  # which is the host
            checkpointing["offload"] = False
        of_passes = functools.partial(
            passes,
            sizes,
            tokens=tokens,
            **checkpointing,
            on_cpu=device == "cpu",
            copies_head=device != "cuda" or Version(torch.__version__) < Version("2.8"),
        )
        totals = [_peak(of_passes(mode=mode))]
        if getattr(trainer, "critic", None) is not None:  # whose passes are over when the policy's begin
            if mode == "LoRA" and is_quantised:
                mode = "QLoRA"
            totals.append(_peak(of_passes(mode=mode, critic=True)))
        parts[f"micro-batch of {tokens} tokens"] = round(max(totals))
    return {**parts}


def host_memory(trainer: SteadyTrainer) -> int:
    """Return the bytes of the micro-batch of `memory` that `offload` keeps in the host's memory."""
    args: SharedOptions = trainer.args
    checkpointing = _checkpointing(args)
    sizes = _sizes(trainer.model)
    if sizes is None or not checkpointing["offload"]:
        return 0
    mode = "full"
    if getattr(trainer.model, "peft_config", {}):
        mode = "LoRA"
    return on_host(sizes, mode, _tokens(args), every_n_layers=checkpointing["every_n_layers"])


def _checkpointing(args: SharedOptions) -> dict[str, Any]:
    """Return the settings of gradient checkpointing, by their names in `passes`."""
    given = cast("dict[str, Any]", args.gradient_checkpointing_kwargs or {})
    return {
        "checkpointing": args.gradient_checkpointing,
        "every_n_layers": given.get("every_n_layers", 1),
        "offload": args.gradient_checkpointing and given.get("offload", False),
    }


def _tokens(args: SharedOptions) -> int:
    """Return the tokens of a micro-batch of the longest completions."""
    return args.per_device_train_batch_size * (args.max_completion_length or 0)


def _peak(moments: dict[str, float]) -> float:
    """Return what is kept for backward and the highest moment on top of it."""
    return moments.pop("kept") + max(moments.values())


def _models(trainer: SteadyTrainer) -> Generator[tuple[str, torch.nn.Module]]:
    """Yield the purpose of each model of a trainer, and the model."""
    critic = getattr(trainer, "critic", None)
    models: list[tuple[str, Any]] = [
        ("weights", trainer.model),
        ("reference", trainer.ref_model),
        ("critic", getattr(critic, "backbone", None)),
        ("critic", getattr(critic, "head", None)),
    ]
    for function in trainer.reward_funcs:
        models.append(("reward model", function))
    for part, model in models:
        if isinstance(model, torch.nn.Module):
            yield part, model


def _sizes(model: object) -> Model | None:
    """Return the sizes of a decoder; None if its config has other names, or sizes that differ among layers."""
    try:
        config = cast(Any, model).config.get_text_config()
        experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 0
        intermediate = config.intermediate_size
        chosen = 1
        if experts:
            intermediate = getattr(config, "moe_intermediate_size", intermediate)  # gpt-oss and Mixtral have one size
            chosen = config.num_experts_per_tok
        norms = _norms(cast(torch.nn.Module, model))
        sizes = Model(
            hidden=config.hidden_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            intermediate=intermediate,
            tied=config.tie_word_embeddings,
            experts=experts,
            chosen=chosen,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            vocab=config.vocab_size,
            norms=sum(not is_of_head for is_of_head in norms.values()) or 2,
            head_norms=any(norms.values()),
        )
        if config.model_type == "gpt_oss":
            sizes = sizes._replace(activation=6, expert_biases=True)
    except Exception:  # such as a class of transformers for an attribute of layers
        return None
    for size in sizes:
        if not isinstance(size, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            return None  # some have lists, or None
    return sizes


def _norms(model: torch.nn.Module) -> dict[str, bool]:
    """Return the names of the norms in the first decoder layer, with True for those of queries and keys."""
    norms: dict[str, bool] = {}
    for name, _ in model.named_modules():
        _, found, name_in_layer = name.partition(".layers.0.")
        if found and name_in_layer.endswith("norm"):
            norms[name_in_layer] = name_in_layer.endswith(("q_norm", "k_norm"))
    return norms
