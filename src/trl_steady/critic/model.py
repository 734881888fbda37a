"""The critic: an adapter `value` on the policy's own base, or a model of its own, with a scalar head in float32."""

import contextlib
import copy
import functools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel, TaskType
from peft.tuners.lora import LoraLayer, LoraModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from trl_steady.adapters.base import Base, start_of
from trl_steady.host import models
from trl_steady.host.files import refuse_other_shapes
from trl_steady.host.fused_head import per_token
from trl_steady.host.models import VALUE_ADAPTER, Scorer, base_kept, is_of_lora, parameters_kept

_HEAD = "score"  # the name in transformers' models for sequence classification
_HEAD_WEIGHT = f"{_HEAD}.weight"
_JOINED = f"lora_{_HEAD}"  # as PEFT names what belongs to LoRA
_BARE = "base_model.model."  # before the names of a transformers model in a PEFT model
_WEIGHTS = "adapter_model.safetensors"  # PEFT's name


class Critic(Scorer):
    """A critic that TRL's scoring method can call in place of a policy, with or without padding.

    The value of a token is that of the state in which it is chosen: the prompt and all tokens before it.

    Args:
        backbone: The transformers model, or the PEFT model around it, whose last hidden state the head reads.
        head: (1, H) float32, without bias.
        adapter: Name of the adapter on `backbone` with which values are computed. None: `backbone` is the critic's
            own, and all of it is trained.
    """

    def __init__(self, backbone: torch.nn.Module, head: torch.nn.Linear, adapter: str | None) -> None:
        super().__init__(backbone)
        self.head, self.adapter = head, adapter
        self._of_policy: list[torch.nn.Parameter] = []  # parameters of the base that train with the policy
        # layers are found once: a model has hundreds
        self._switches = [
            layer for layer in backbone.modules() if isinstance(layer, BaseTunerLayer | AuxiliaryTrainingWrapper)
        ]

    @property
    def bare(self) -> PreTrainedModel:
        """The transformers model without an adapter around it."""
        return self.backbone.get_base_model() if isinstance(self.backbone, PeftModel) else self.backbone  # pyright: ignore

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield the trained parameters: those of the adapter, or of the whole model, and the head.

        Under FSDP2 these are shards, and every process must call this method.
        """
        models.reshard(self.backbone)
        yield from self._named()

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The trained parameters."""
        return [parameter for _, parameter in self.named_parameters()]

    def _named(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        body: torch.nn.Module = self.bare.base_model
        for name, parameter in body.named_parameters():
            if self.adapter is None or is_of_lora(name, self.adapter):
                yield name, parameter
        yield _HEAD_WEIGHT, cast(torch.nn.Parameter, self.head.weight)

    def __call__(self, *, labels: Tensor, fused_lm_head: bool = True, **inputs: Any) -> SimpleNamespace:
        """Return the values (b, l - 1) of the tokens after the first that have a label, as `log_probs`."""
        if self.adapter is None:
            hidden = self.bare.base_model(**inputs, use_cache=False).last_hidden_state
            found = self._values(hidden[:, :-1])
        else:
            if torch.is_grad_enabled():
                self._of_policy = [*Base(self.backbone).trained.values()]  # pyright: ignore[reportArgumentType]
            # through the whole model, which FSDP2 may shard
            with self._speaking(), self._recomputed():
                found = per_token(self.backbone, lambda head: self._values(head.hidden), labels=labels, **inputs)
        return SimpleNamespace(log_probs=found, entropy=None, aux_loss=None)

    def _values(self, hidden: Tensor) -> Tensor:
        """Return the values (...) of hidden states (..., H)."""
        with torch.autocast(hidden.device.type, enabled=False):
            dtype = torch.promote_types(self.head.weight.dtype, torch.float32)  # FSDP2 may cast the weight
            return torch.nn.functional.linear(hidden.to(dtype), self.head.weight.to(dtype)).squeeze(-1)

    @contextlib.contextmanager
    def _speaking(self) -> Iterator[None]:
        """Let the critic's adapter act, without gradients of the base.

        PEFT's own switch would change which parameters are trained.
        """
        before = [
            (layer, layer._active_adapter, getattr(layer, "_disable_adapters", False)) for layer in self._switches
        ]
        try:
            for layer, _, _ in before:
                # a layer without LoRA has no part in the critic, and shows what it wraps only so
                layer._active_adapter, layer._disable_adapters = [self.adapter], not isinstance(layer, LoraLayer)
            for parameter in self._of_policy:
                parameter.requires_grad_(False)
            yield
        finally:
            for layer, active, disabled in before:
                layer._active_adapter, layer._disable_adapters = active, disabled
            for parameter in self._of_policy:
                parameter.requires_grad_(True)

    @contextlib.contextmanager
    def _recomputed(self) -> Iterator[None]:
        """Let gradient checkpointing recompute layers with the critic's adapter, whichever acts in backward."""
        name = "_gradient_checkpointing_func"
        layers = [layer for layer in self.bare.modules() if name in vars(layer)] if torch.is_grad_enabled() else []
        before = [vars(layer)[name] for layer in layers]
        try:
            for layer, function in zip(layers, before, strict=True):
                vars(layer)[name] = functools.partial(function, use_reentrant=False, context_fn=self._contexts)
            yield
        finally:
            for layer, function in zip(layers, before, strict=True):
                vars(layer)[name] = function

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the contexts of a checkpointed forward, in which the adapter acts, and of its recomputation."""
        return contextlib.nullcontext(), self._speaking()

    # files

    def state(self) -> dict[str, Tensor]:
        """Return the trained parameters by name, whole and on the CPU. Under FSDP2 every process must call this."""
        return {name: models.whole(parameter).cpu().contiguous() for name, parameter in self.named_parameters()}

    def check(self, shapes: Mapping[str, Sequence[int]], source: str) -> None:
        """Raise a ValueError if tensors of these shapes are not those of this critic."""
        refuse_other_shapes(shapes, {name: parameter.shape for name, parameter in self._named()}, source)

    def load(self, state: Mapping[str, Tensor], source: str) -> None:
        """Restore what `state` returned, or raise a ValueError. Under FSDP2 every process must call this."""
        self.check({name: tensor.shape for name, tensor in state.items()}, source)
        for name, parameter in self.named_parameters():
            models.assign(parameter, state[name])

    def copy(self, other: "Critic") -> None:
        """Take over the weights of another adapter of the same configuration on the same base."""
        assert self.adapter is not None and other.adapter is not None
        state = {_renamed(name, other.adapter, self.adapter): tensor for name, tensor in other.state().items()}
        self.load(state, f"the adapter {other.adapter!r}")

    def save_pretrained(self, folder: Path, state: Mapping[str, Tensor] | None = None) -> None:
        """Save a critic that `AutoModelForSequenceClassification` loads, or PEFT on such a model.

        `state` is what the method of this name returned; None: as the critic is now.
        """
        folder.mkdir(parents=True, exist_ok=True)
        if self.adapter is None:
            bare: Any = self.bare
            with torch.no_grad():
                getattr(bare, _HEAD).weight.copy_(self.head.weight)
            bare.save_pretrained(folder)
            return
        assert isinstance(self.backbone, PeftModel)
        config: Any = copy.deepcopy(self.backbone.peft_config[self.adapter])
        config.task_type, config.modules_to_save, config.inference_mode = TaskType.SEQ_CLS, [_HEAD], True
        config.save_pretrained(str(folder))
        names, state = self._saved_names(), self.state() if state is None else state
        save_file({names[name]: state[name] for name in names}, folder / _WEIGHTS)

    def _saved_names(self) -> dict[str, str]:
        """Return the name of each parameter in the file of PEFT for sequence classification."""
        assert self.adapter is not None
        names = {name: f"{self._prefix}{_as_saved(_renamed(name, self.adapter, ''))}" for name, _ in self._named()}
        return {**names, _HEAD_WEIGHT: f"{_BARE}{_HEAD_WEIGHT}"}

    @property
    def _prefix(self) -> str:
        """The text before the name of a parameter of the body in the state of a PEFT model."""
        return f"{_BARE}{self.bare.base_model_prefix}."

    # sharding

    def join(self) -> None:
        """Make the head a part of the PEFT model, under a name of the adapter. FSDP2 then shards it."""
        assert self.adapter is not None
        self.backbone.add_module(_JOINED, torch.nn.ModuleDict({self.adapter: self.head}))

    def part_of(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what `state` returns, taken from the whole state of the PEFT model that the head has joined."""
        assert self.adapter is not None
        saved = {name: f"{self._prefix}{name}" for name, _ in self._named()}
        saved[_HEAD_WEIGHT] = f"{_JOINED}.{self.adapter}.weight"
        return {name: state[entry].cpu().contiguous() for name, entry in saved.items()}

    def load_pretrained(self, folder: Path, source: str) -> None:
        """Load what `save_pretrained` wrote for an adapter. `source` names the folder in errors.

        Raises:
            ValueError: The folder has an adapter with other tensors, or one for another start of the base.
        """
        config: Any = LoraConfig.from_pretrained(str(folder))
        base = Base(self.backbone)  # pyright: ignore[reportArgumentType]
        _refuse_other_start(base, config, source)
        trained_on, name = config.base_model_name_or_path, base.model.config.name_or_path
        if trained_on and name and Path(trained_on).resolve() != Path(name).resolve():
            warnings.warn(
                f"{source} was trained on {trained_on!r}, and the base of the policy is {name!r}. If that is another "
                "model, its values mean nothing.",
                UserWarning,
                stacklevel=2,
            )
        names = {saved: name for name, saved in self._saved_names().items()}
        state = {_as_saved(saved): tensor for saved, tensor in load_file(folder / _WEIGHTS).items()}
        self.load({names.get(saved, saved): tensor for saved, tensor in state.items()}, source)


def add_value_adapter(model: PeftModel, peft_config: Any, name: str = VALUE_ADAPTER) -> Critic:
    """Add an adapter to a PEFT policy, with a head of zeros, and return the critic.

    Nothing else in the model changes. The adapter is in float32, whatever the dtype of the policy's.

    Args:
        model: The policy.
        peft_config: Configuration of the adapter. None: that of the policy's adapter, with a copy of its weights.
        name: Name of the adapter.

    Raises:
        ValueError: The model has an adapter of this name, or the adapter is not LoRA.
    """
    base, of_policy = Base(model), model.active_adapters[0]
    config = copy.deepcopy(peft_config or model.peft_config[of_policy])
    if not (isinstance(model.base_model, LoraModel) and isinstance(config, LoraConfig)):
        kinds = f"{type(model.peft_config[of_policy]).__name__} and {type(config).__name__}"
        raise ValueError(
            f"the adapters of the policy and {name!r} are {kinds}, and must both be LoRA. Train the policy with a "
            "LoraConfig, or as a whole (no peft_config)."
        )
    _refuse_other_start(base, config, f"the configuration of the adapter {name!r}")
    if base.start is not None:  # PEFT changes these modules again when it loads the saved adapter
        config.target_modules = copy.copy(cast(Any, model.peft_config[of_policy]).target_modules)
    if trained := base.trained:
        warnings.warn(
            f"{len(trained)} parameters of the base train with the policy, for example {min(trained)}. They change "
            f"what the adapter {name!r} says. Set bias='none' in peft_config, and list modules in modules_to_save.",
            UserWarning,
            stacklevel=2,
        )
    # whole copies, which a value needs least, and biases, which PEFT trains in the base
    config.modules_to_save, config.trainable_token_indices, config.bias = None, None, "none"
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    # keep the random state, so that rollouts are the same as without a critic
    with parameters_kept(model), base_kept(config), torch.random.fork_rng(devices=devices):
        model.add_adapter(name, config)
    bare: Any = model.get_base_model()
    read = {id(parameter) for parameter in bare.base_model.parameters()}
    of_model = dict(model.named_parameters())
    for parameter_name, parameter in of_model.items():
        if not is_of_lora(parameter_name, name):
            continue
        parameter.data = parameter.data.float()
        parameter.requires_grad_(id(parameter) in read)  # not of the LM head, through which no value goes
        source = of_model.get(_renamed(parameter_name, name, of_policy))
        if peft_config is None and source is not None:
            parameter.data.copy_(source.data)
    return Critic(model, _head(bare.config, parameter.device), name)


def own_critic(model: PreTrainedModel, name: str = "value_model") -> Critic:
    """Return the critic of a model for sequence classification with one label. All of it is trained.

    Raises:
        ValueError: The model, which messages call `name`, has no head named `score` for one label.
    """
    score = getattr(model, _HEAD, None)
    if not isinstance(score, torch.nn.Linear) or score.out_features != 1 or score.bias is not None:
        raise ValueError(
            f"{name} is a {type(model).__name__} without a head 'score' for one label. Load it with "
            "AutoModelForSequenceClassification.from_pretrained(..., num_labels=1), or train an adapter (peft_config)."
        )
    head = _head(model.config, score.weight.device)
    head.weight.data.copy_(score.weight.data)
    score.requires_grad_(False)  # the float32 copy is trained
    model.base_model.requires_grad_(True)
    return Critic(model, head, None)


def loaded(
    source: str | Path, policy: PreTrainedModel, name: str, instead: str, *, trusted: bool = False
) -> PreTrainedModel:
    """Return a saved model for sequence classification, with the policy's dtype and attention.

    Args:
        source: The model's folder, or its name on the hub.
        policy: The policy.
        name: The user's name for the model, for messages.
        instead: The way to a new one, for messages.
        trusted: transformers' `trust_remote_code`.

    Raises:
        ValueError: The model has no trained head.
    """
    model, found = AutoModelForSequenceClassification.from_pretrained(
        source,
        num_labels=1,
        output_loading_info=True,
        dtype=policy.dtype,
        attn_implementation=policy.config._attn_implementation,
        trust_remote_code=trusted,
    )
    if found["missing_keys"]:
        raise ValueError(
            f"{name} has no {', '.join(sorted(found['missing_keys'])[:3])}, which would be random. Give a model for "
            f"sequence classification with one label, or {instead} for a new one."
        )
    return model


def trusts(args: Any) -> bool:
    """Return True if the user lets transformers run code that comes with a model, as TRL reads it."""
    return (args.model_init_kwargs or {}).get("trust_remote_code", args.trust_remote_code)


def without_dropout(model: torch.nn.Module) -> None:
    """Switch dropout off for good."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0


def copied_from(policy: PreTrainedModel, instead: str = "value_model", *, trusted: bool = False) -> PreTrainedModel:
    """Return a model for sequence classification whose body is a copy of the policy's, with a head of zeros.

    Raises:
        ValueError: transformers has no such model of this kind. `instead` is another way out.
    """
    config = copy.deepcopy(policy.config)
    config.num_labels = 1
    try:
        with torch.random.fork_rng():
            model: Any = AutoModelForSequenceClassification.from_config(
                config,
                dtype=policy.dtype,
                attn_implementation=policy.config._attn_implementation,
                trust_remote_code=trusted,
            )
    except ValueError as error:
        raise ValueError(
            f"transformers has no {type(config).__name__.removesuffix('Config')} for sequence classification, so "
            f"there is no copy of the policy with a head. Train adapters (peft_config), or give {instead}."
        ) from error
    model.base_model.load_state_dict(policy.base_model.state_dict())
    torch.nn.init.zeros_(getattr(model, _HEAD).weight)
    return model.to(policy.device)


def _head(config: Any, device: torch.device) -> torch.nn.Linear:
    size = config.get_text_config().hidden_size
    head = torch.nn.Linear(size, 1, bias=False, device="meta", dtype=torch.float32)  # keeps the random state
    head.weight = torch.nn.Parameter(torch.zeros(1, size, device=device))
    return head


def _refuse_other_start(base: Base, config: Any, what: str) -> None:
    """Refuse an adapter that is right on another base, because PEFT changes the base when it makes some adapters."""
    if (start := start_of(config)) != base.start:
        raise ValueError(
            f"{what} has {start or 'a start that keeps the base'}, and the policy's adapter has "
            f"{base.start or 'one that keeps it'}. They share one base. Give both the same init_lora_weights and r."
        )


def _as_saved(name: str) -> str:
    """Return a parameter's name as PEFT saves it, which leaves out a part of DoRA's."""
    return name.removesuffix(".weight") if name.endswith("lora_magnitude_vector.weight") else name


def _renamed(name: str, adapter: str, other: str) -> str:
    """Return the name of a parameter with another adapter's name in it, or with none if `other` is empty."""
    parts = name.split(".")
    renamed = [
        other if part == adapter and before.startswith("lora_") else part
        for before, part in zip(["", *parts], parts, strict=False)
    ]
    return ".".join(part for part in renamed if part)
