"""The models of a trainer: without wrappers, their adapters, and tensors that FSDP2 may shard.

This file knows PEFT, accelerate and FSDP2.
"""

import functools
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any, cast

import torch
from accelerate import PartialState
from accelerate.utils import DynamoBackend, parse_flag_from_env
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from peft import PeftConfig, PeftModel
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from trl_steady.core.feature import Trainer
from trl_steady.core.types import Scorer
from trl_steady.trl_bridge.patching import patched, replace

# names of adapters on one model; TRL takes the second as the reference
POLICY_ADAPTER, REFERENCE_ADAPTER = "default", "ref"
REWARD_ADAPTER, VALUE_ADAPTER, TEACHER_ADAPTER = "reward", "value", "teacher"

_OF_TRANSFORMERS = ("every_n_layers", "offload")  # of `gradient_checkpointing_kwargs`; the others are torch's


def bare(trainer: Trainer, model: torch.nn.Module | Scorer) -> PreTrainedModel:
    """Return the transformers model in `model`, without wrappers."""
    if isinstance(model, Scorer):
        model = model.backbone
    # keeping torch.compile's wrapper would change it: it would lose the wrapper of DDP inside
    inner = trainer.accelerator.unwrap_model(model, keep_torch_compile=False)
    if isinstance(inner, PeftModel):
        inner = inner.get_base_model()
    return cast(PreTrainedModel, inner)


def is_lora_parameter(name: str, adapter: str) -> bool:
    """Return True if a parameter of this name belongs to a LoRA adapter.

    A module of the model may have the adapter's name too, as the projection `value` in many models' attention.

    >>> [is_lora_parameter(name, "value") for name in ("query.value.lora_A.value.weight", "query.value.weight")]
    [True, False]
    """
    pairs = pairwise(name.split("."))
    return any(part == adapter and before.startswith("lora_") for before, part in pairs)


def compiles(trainer: Trainer) -> bool:
    """Return True if the model goes through torch.compile."""
    dynamo = trainer.accelerator.state.dynamo_plugin
    return trainer.args.torch_compile or (dynamo is not None and dynamo.backend != DynamoBackend.NO)


def enable_checkpointing(
    enable: Callable[..., None], gradient_checkpointing_kwargs: Mapping[str, Any] | None = None, **options: Any
) -> None:
    """Call a model's `gradient_checkpointing_enable`, as transformers' trainer does when a training begins.

    Options of transformers become arguments. The model would hand them to torch with the rest of the dictionary.
    """
    of_torch = dict(gradient_checkpointing_kwargs or {})
    for name in _OF_TRANSFORMERS:
        if name in of_torch:
            options[name] = of_torch.pop(name)
    if not torch.accelerator.is_available():
        options.pop("offload", None)  # the host has the tensors already, and torch for CPU cannot pin memory
    enable(of_torch or None, **options)


def keep_checkpointing_options(model: PreTrainedModel, args: Any) -> None:
    """Let a model keep transformers' options when TRL switches gradient checkpointing off and on again.

    TRL does that around each generation and each scoring, and gives the model the whole dictionary.
    """
    given: Mapping[str, Any] = args.gradient_checkpointing_kwargs or {}
    if not args.gradient_checkpointing or given.keys().isdisjoint(_OF_TRANSFORMERS):
        return
    enable = functools.partial(enable_checkpointing, model.gradient_checkpointing_enable)
    replace(model, {"gradient_checkpointing_enable": enable})  # which transformers calls when a training begins


def keep_random_state() -> AbstractContextManager[None]:
    """Restore the random state of the CPU and of this process's GPU. torch would warn on a machine with several."""
    devices: list[int] = []
    if torch.cuda.is_available():
        devices.append(torch.cuda.current_device())
    return cast("AbstractContextManager[None]", torch.random.fork_rng(devices))


def has_classifier(config: PreTrainedConfig) -> bool:
    """Return True if transformers, or the model's own code, has sequence classification for this architecture."""
    remote: dict[str, str] = getattr(config, "auto_map", None) or {}
    known = AutoModelForSequenceClassification._model_mapping
    return AutoModelForSequenceClassification.__name__ in remote or type(config) in known


def random_setting(model: torch.nn.Module) -> str | None:
    """Return a setting with which two passes of a model in training differ, such as dropout; None without one."""
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            setting = f"{type(module).__name__}.{key}".lower()
            if "drop" not in setting and "jitter" not in setting:
                continue
            rates: list[object] = [value]
            if isinstance(value, dict):  # by adapter
                rates = list(cast("dict[str, object]", value).values())
            if any(isinstance(rate, float) and rate > 0 for rate in rates):
                return f"{name}.{key}={value}"
    return None


def text_tokenizer(trainer: Trainer) -> PreTrainedTokenizerBase:
    """Return the tokenizer, which is part of the processor if the model reads more than text."""
    processor = trainer.processing_class
    return processor.tokenizer if isinstance(processor, ProcessorMixin) else processor


def keep_base(config: PeftConfig | None) -> AbstractContextManager[None]:
    """Keep PEFT from changing the base while it adds adapters of this configuration, as PiSSA and OLoRA would."""
    if isinstance(getattr(config, "init_lora_weights", None), str):
        return patched(config, {"init_lora_weights": True})
    return nullcontext()


def drop_adapter(model: PeftModel, name: str) -> None:
    """Delete an adapter, such as that of an earlier stage, whose name a new one needs. Raise if it is the policy's."""
    if name not in model.peft_config:
        return
    if name in model.active_adapters:
        raise ValueError(f"the policy's adapter is named {name!r}. Load it under another name, such as 'default'.")
    with keep_dtypes_and_trainability(model):
        model.delete_adapter(name)
    PartialState().print(f"trl-steady: this run replaces the adapter {name!r} that the model had.", flush=True)


def refuse_missing_tensors(model: torch.nn.Module, missing: Collection[str]) -> None:
    """Refuse a checkpoint without some tensors of the model, because transformers would keep the initial ones."""
    tensors = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    loaded = {tensor.data_ptr() for name, tensor in tensors.items() if name not in missing}
    lost: list[str] = []
    for name in missing:
        if name in tensors and tensors[name].data_ptr() not in loaded:  # a tied one is loaded by another name
            lost.append(name)
    if lost:
        raise ValueError(
            f"the checkpoint lacks {len(lost)} of the model's {len(tensors)} tensors, for example {min(lost)}. Give "
            "the trainer the model and the peft_config that the run had."
        )


def save_only(model: PeftModel, adapter: str) -> AbstractContextManager[None]:
    """Let the model save one adapter, and no others, whichever it is told to."""
    save_all = model.save_pretrained

    def save(*arguments: Any, **options: Any) -> None:
        save_all(*arguments, **{**options, "selected_adapters": [adapter]})

    return patched(model, {"save_pretrained": save})


@contextmanager
def save_without(model: PeftModel, adapter: str) -> Generator[dict[str, Any]]:
    """Keep an adapter out of what the model saves. Gives the state that the model is told to save, if it is told."""
    save_all, gathered = model.save_pretrained, {}

    def save(*arguments: Any, **options: Any) -> None:
        gathered.update(options.get("state_dict") or {})
        selected = options.pop("selected_adapters", None) or list(model.peft_config)
        save_all(*arguments, selected_adapters=[name for name in selected if name != adapter], **options)

    with patched(model, {"save_pretrained": save}):
        yield gathered


@contextmanager
def in_mode(model: object, *, is_training: bool) -> Generator[None]:
    """Let modules be in training or in eval mode. On exit, each is in its own mode again.

    Quantised layers stay as they are: they have no dropout, and on CPU their product is another one in eval mode.
    """
    if isinstance(model, Scorer):
        model = model.backbone
    switched: list[torch.nn.Module] = []
    if isinstance(model, torch.nn.Module):  # a teacher may be a function
        for module in model.modules():
            if module.training != is_training and not isinstance(module, Linear4bit | Linear8bitLt):
                switched.append(module)
    for module in switched:  # each by itself, because some may be frozen in eval mode
        module.training = is_training
    try:
        yield
    finally:
        for module in switched:
            module.training = not is_training


@contextmanager
def keep_dtypes_and_trainability(model: torch.nn.Module) -> Generator[None]:
    """Restore the dtype and `requires_grad` of all parameters on exit.

    PEFT makes every parameter of an adapter trainable when it switches adapters, and float32 when it loads one. FSDP2
    may put an unsharded copy in the place of a parameter, in the dtype of its forwards, which is kept.
    """
    before: dict[str, tuple[bool, torch.dtype, bool]] = {}
    for name, parameter in model.named_parameters():
        before[name] = isinstance(parameter, DTensor), parameter.dtype, parameter.requires_grad
    try:
        yield
    finally:
        for name, parameter in model.named_parameters():
            if name in before:
                was_shard, dtype, requires_grad = before[name]
                if parameter.dtype != dtype and isinstance(parameter, DTensor) == was_shard:
                    parameter.data = parameter.data.to(dtype)
                parameter.requires_grad_(requires_grad)


def is_fsdp_asked() -> bool:
    """Return True if the launcher or the config asks for FSDP, also before accelerate has made its state."""
    return parse_flag_from_env("ACCELERATE_USE_FSDP")


def reshard(model: torch.nn.Module) -> None:
    """Let the model's parameters be those that the optimizer knows.

    A forward without a backward leaves unsharded copies in their place, and writes to them are lost.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor without its graph, gathered if it is sharded."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(parameter: Tensor, values: Tensor) -> Tensor:
    """Return whole values, sharded as a parameter of their shape is. Shards take those of the first process."""
    if not isinstance(parameter, DTensor):
        return values
    mesh, placements = parameter.device_mesh, parameter.placements
    sharded = distribute_tensor(values.to(parameter.device), mesh, placements)  # on the mesh's kind of device
    local = sharded.to_local().to(parameter.device)  # where FSDP2 has offloaded the parameter, the CPU
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


@torch.no_grad()
def assign(target: Tensor, values: Tensor) -> None:
    """Set a tensor to whole values."""
    if isinstance(target, DTensor):
        target.to_local().copy_(like(target, values).to_local())  # pyright: ignore[reportAttributeAccessIssue]
    else:
        target.copy_(values)
