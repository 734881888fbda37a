"""A model with a scalar head in float32: an adapter on the policy's own base, or a model of its own.

The critic and the reward model are both one.
"""

# pyright: reportDeprecated=false
# pyright: reportIncompatibleMethodOverride=false, reportPossiblyUnboundVariable=false
# PEFT has no public switch that leaves requires_grad alone

import contextlib
import copy
import functools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from peft import LoraConfig, PeftConfig, PeftModel, TaskType
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from trl_steady.core.feature import Trainer, warn_user
from trl_steady.core.tensor_file import refuse_other_shapes
from trl_steady.core.types import Scorer
from trl_steady.features.adapters.base_model import BaseModel, base_changing_init
from trl_steady.features.adapters.saved import adapter_settings
from trl_steady.trl_bridge import models
from trl_steady.trl_bridge.lm_head import per_token
from trl_steady.trl_bridge.models import VALUE_ADAPTER, drop_adapter, is_lora_parameter, keep_base, keep_parameters
from trl_steady.trl_bridge.patching import patched

_HEAD = "score"  # the name in transformers' models for sequence classification
_HEAD_WEIGHT = f"{_HEAD}.weight"
_POLICY_HEAD = f"lora_{_HEAD}"  # the head's name inside the PEFT policy; PEFT names what belongs to LoRA so
_BASE_PREFIX = "base_model.model."  # before the names of a transformers model in a PEFT model
_WEIGHTS_FILE = "adapter_model.safetensors"  # PEFT's name

SavedAdapter = tuple[LoraConfig, dict[str, Tensor]]
"""The configuration and the tensors of a saved adapter."""


class ScalarHeadModel(Scorer):
    """A model that TRL's method for log-probs can call in place of a policy, with or without padding.

    The value of a token is that of the state in which it is chosen: the prompt and all tokens before it.

    Args:
        backbone: The transformers model, or the PEFT model around it, whose last hidden state the head reads.
        head: (1, H) float32, without bias.
        adapter: Name of the adapter on `backbone` with which values are computed. None: `backbone` is the model's own,
            and all of it is trained.
    """

    def __init__(self, backbone: torch.nn.Module, head: torch.nn.Linear, adapter: str | None) -> None:
        super().__init__(backbone)
        self.head, self.adapter = head, adapter
        # found once, because a model has hundreds of layers
        self._adapter_layers = [
            layer for layer in backbone.modules() if isinstance(layer, BaseTunerLayer | AuxiliaryTrainingWrapper)
        ]

    @property
    def bare(self) -> PreTrainedModel:
        """The transformers model without an adapter around it."""
        backbone = self.backbone
        return cast(PreTrainedModel, backbone.get_base_model() if isinstance(backbone, PeftModel) else backbone)

    @property
    def is_fresh(self) -> bool:
        """True if nobody has trained it."""
        return not self.head.weight.any()

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield the trained parameters: those of the adapter, or of the whole model, and the head.

        Under FSDP2 these are shards, and every process must call this method.
        """
        models.reshard(self.backbone)
        body: torch.nn.Module = self.bare.base_model
        for name, parameter in body.named_parameters():
            if self.adapter is None or is_lora_parameter(name, self.adapter):
                yield name, parameter
        yield _HEAD_WEIGHT, cast(torch.nn.Parameter, self.head.weight)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The trained parameters."""
        return [parameter for _, parameter in self.named_parameters()]

    def __call__(self, *, labels: Tensor, fused_lm_head: bool = True, **inputs: Any) -> SimpleNamespace:
        """Return the values (b, l - 1) of the tokens after the first that have a label, as `log_probs`."""
        if self.adapter is None:
            hidden = self.bare.base_model(**inputs, use_cache=False).last_hidden_state
            values = self._values(hidden[:, :-1])
        else:  # run the whole model, which FSDP2 may shard
            with self._adapter_active(), ExitStack() as stack:
                for context in self._recomputation_contexts():
                    stack.enter_context(context)
                values = per_token(self.backbone, lambda head: self._values(head.hidden), labels=labels, **inputs)
        return SimpleNamespace(log_probs=values, entropy=None, aux_loss=None)

    def _values(self, hidden: Tensor) -> Tensor:
        """Return the values (...) of hidden states (..., H)."""
        with torch.autocast(hidden.device.type, enabled=False):
            dtype = torch.promote_types(self.head.weight.dtype, torch.float32)  # FSDP2 may cast the weight
            return torch.nn.functional.linear(hidden.to(dtype), self.head.weight.to(dtype)).squeeze(-1)

    @contextlib.contextmanager
    def _adapter_active(self) -> Iterator[None]:
        """Activate the model's adapter. PEFT's own switch would change which parameters are trained."""
        before = [(layer, layer._active_adapter, layer._disable_adapters) for layer in self._adapter_layers]
        try:
            for layer in self._adapter_layers:
                # a layer without LoRA has no part in the adapter, and runs what it wraps only while it is disabled
                layer._active_adapter, layer._disable_adapters = [self.adapter], not isinstance(layer, LoraLayer)
            yield
        finally:
            for layer, active, disabled in before:
                layer._active_adapter, layer._disable_adapters = active, disabled

    def _recomputation_contexts(self) -> Iterator[AbstractContextManager[None]]:
        """Yield contexts that let gradient checkpointing recompute layers with the model's adapter in backward."""
        name = "_gradient_checkpointing_func"

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return contextlib.nullcontext(), self._adapter_active()  # of the forward, and of its recomputation

        for layer in self.bare.modules() if torch.is_grad_enabled() else ():
            if name in vars(layer):
                checkpoint = functools.partial(vars(layer)[name], use_reentrant=False, context_fn=contexts)
                yield patched(layer, {name: checkpoint})

    # files

    @property
    def settings(self) -> dict[str, Any]:
        """The `adapter_settings` of the model's adapter; empty without one."""
        if self.adapter is None:
            return {}
        return adapter_settings(cast(PeftModel, self.backbone).peft_config[self.adapter])

    def state(self) -> dict[str, Tensor]:
        """Return the trained parameters by name, whole and on the CPU. Under FSDP2 every process must call this."""
        return {name: models.whole(parameter).cpu().contiguous() for name, parameter in self.named_parameters()}

    def load(self, state: Mapping[str, Tensor], source: str) -> None:
        """Restore what `state` returned, or raise a ValueError. Under FSDP2 every process must call this."""
        parameters = dict(self.named_parameters())
        refuse_other_shapes(state, {name: parameter.shape for name, parameter in parameters.items()}, source)
        for name, parameter in parameters.items():
            models.assign(parameter, state[name])

    def save_pretrained(self, folder: Path, state: Mapping[str, Tensor] | None = None) -> None:
        """Save a model that `AutoModelForSequenceClassification` loads, or an adapter that PEFT loads on such a model.

        `state` is what the method of this name returned; None: as the model is now.
        """
        folder.mkdir(parents=True, exist_ok=True)
        if self.adapter is None:
            with torch.no_grad():
                self.bare.get_parameter(_HEAD_WEIGHT).copy_(self.head.weight)
            self.bare.save_pretrained(folder)
            return
        config, tensors = self.to_saved_adapter(state)
        config.save_pretrained(str(folder))
        save_file(tensors, folder / _WEIGHTS_FILE)

    def to_saved_adapter(self, state: Mapping[str, Tensor] | None = None) -> SavedAdapter:
        """Return the configuration and the tensors of an adapter for sequence classification, as PEFT names them."""
        assert isinstance(self.backbone, PeftModel) and self.adapter is not None
        config = cast(LoraConfig, copy.deepcopy(self.backbone.peft_config[self.adapter]))
        config.task_type, config.modules_to_save, config.inference_mode = TaskType.SEQ_CLS, [_HEAD], True
        state = self.state() if state is None else state
        return config, {saved: state[name] for name, saved in self.saved_names().items()}

    def saved_names(self) -> dict[str, str]:
        """Return the name of each parameter in the file of PEFT for sequence classification."""
        assert self.adapter is not None
        saved = {name: f"{self._body_prefix}{_rename(name, self.adapter, '')}" for name, _ in self.named_parameters()}
        saved[_HEAD_WEIGHT] = f"{_BASE_PREFIX}{_HEAD_WEIGHT}"
        dora = "lora_magnitude_vector"  # saved without ".weight"
        return {name: entry.removesuffix(".weight") if dora in entry else entry for name, entry in saved.items()}

    @property
    def _body_prefix(self) -> str:
        """The text before the name of a parameter of the body in the state of a PEFT model."""
        return f"{_BASE_PREFIX}{self.bare.base_model_prefix}."

    # sharding

    def join_policy(self) -> None:
        """Make the head a module of the PEFT policy, under a name of the adapter. FSDP2 then shards it."""
        assert self.adapter is not None
        self.backbone.add_module(_POLICY_HEAD, torch.nn.ModuleDict({self.adapter: self.head}))

    def state_from_policy(self, policy_state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what `state` returns, taken from the whole state of the PEFT policy that the head has joined."""
        assert self.adapter is not None
        names = {name: f"{self._body_prefix}{name}" for name, _ in self.named_parameters()}
        names[_HEAD_WEIGHT] = f"{_POLICY_HEAD}.{self.adapter}.weight"
        return {name: policy_state[entry].cpu().contiguous() for name, entry in names.items()}


def build_adapter_model(
    policy: PeftModel,
    peft_config: LoraConfig | None,
    name: str = VALUE_ADAPTER,
    *,
    saved: SavedAdapter | None = None,
    has_dropout: bool = True,
) -> ScalarHeadModel:
    """Add an adapter in float32 to a PEFT policy, with a scalar head. Nothing else in the policy changes.

    Args:
        policy: The policy.
        peft_config: Configuration of a new adapter, whose head is 0. None: that of the policy's adapter, with a copy
            of its weights.
        name: Name of the adapter, which replaces another of this name, such as that of an earlier stage.
        saved: An adapter to begin with, instead of a new one.
        has_dropout: False to leave out the dropout of the configuration.

    Raises:
        ValueError: The adapter is not LoRA, or is for another base, or its values would change with the policy's.
    """
    for option in ("modules_to_save", "trainable_token_indices", "bias"):
        if (value := getattr(peft_config, option, None)) and value != "none":
            raise ValueError(
                f"{option}={value!r} would have no effect on the adapter {name!r}, which is LoRA with a scalar head. "
                "Leave it unset."
            )
    base, policy_adapter = BaseModel(policy), policy.active_adapters[0]
    policy_config = policy.peft_config[policy_adapter]
    is_copy = saved is None and peft_config is None
    config = _adapter_config(saved[0] if saved else peft_config or policy_config, base, name)
    if saved:
        _warn_of_other_base(saved[0], base, name)
    if base.changing_init is not None:  # PEFT changes these modules again when it loads the saved adapter
        config.target_modules = copy.copy(cast(LoraConfig, policy_config).target_modules)
    # PEFT would copy whole modules, and train biases in the base
    config.modules_to_save, config.trainable_token_indices, config.bias = None, None, "none"
    config.lora_dropout = config.lora_dropout if has_dropout else 0.0
    drop_adapter(policy, name)
    # keep the random state, so that rollouts are the same as without the adapter
    with keep_parameters(policy), keep_base(config), models.keep_random_state():
        policy.add_adapter(name, config)
    parameters = dict(policy.named_parameters())
    for parameter_name, parameter in parameters.items():
        if not is_lora_parameter(parameter_name, name):
            continue
        parameter.data = parameter.data.float()
        parameter.requires_grad_(False)
        twin = parameters.get(_rename(parameter_name, name, policy_adapter))
        if is_copy and twin is not None:
            parameter.data.copy_(twin.data)
    model = ScalarHeadModel(policy, _zero_head(base.model, parameter.device), name)
    if saved:
        names = {entry: parameter_name for parameter_name, entry in model.saved_names().items()}
        state = {names.get(entry, entry): tensor for entry, tensor in saved[1].items()}
        model.load(state, f"the saved adapter {name!r}")
    return model


def _adapter_config(config: PeftConfig, base: BaseModel, name: str) -> LoraConfig:
    """Return a copy of an adapter's configuration. Raises ValueError if the adapter cannot have a scalar head."""
    config = copy.deepcopy(config)
    if not isinstance(config, LoraConfig):
        raise ValueError(
            f"the adapter {name!r} has a {type(config).__name__}, and must be LoRA. Train the policy with a "
            "LoraConfig, or as a whole (no peft_config)."
        )
    if (init := base_changing_init(config)) != base.changing_init:  # PEFT changes the base when it makes some adapters
        raise ValueError(
            f"the adapter {name!r} has {init or 'a start that keeps the base'}, and the policy's adapter has "
            f"{base.changing_init or 'one that keeps it'}. They share one base. Give both the same init_lora_weights "
            "and r."
        )
    if trained := base.trained:
        raise ValueError(
            f"{len(trained)} parameters of the base train with the policy, for example {min(trained)}, and would "
            f"change what the adapter {name!r} says. Set bias='none' in peft_config, and list modules in "
            "modules_to_save."
        )
    return config


def _warn_of_other_base(config: LoraConfig, base: BaseModel, name: str) -> None:
    trained_on, base_path = config.base_model_name_or_path, base.model.config.name_or_path
    if trained_on and base_path and Path(trained_on).resolve() != Path(base_path).resolve():
        warn_user(
            f"the adapter {name!r} was trained on {trained_on!r}, and the base of the policy is {base_path!r}. If "
            "that is another model, its values mean nothing."
        )


def load_adapter(folder: str | Path) -> SavedAdapter:
    """Return what `save_pretrained` or PEFT wrote for an adapter."""
    return cast(LoraConfig, LoraConfig.from_pretrained(str(folder))), load_file(Path(folder) / _WEIGHTS_FILE)


def build_whole_model(
    trainer: Trainer, source: str | Path | PreTrainedModel | None, option: str, *, has_dropout: bool = True
) -> ScalarHeadModel:
    """Return a model for sequence classification with one label, all of which is trained.

    Args:
        trainer: The trainer of the policy, whose dtype, attention and gradient checkpointing the model gets.
        source: The model, its folder, or its name on the hub. None: a copy of the policy's body, with a head of zeros.
        option: The user's name for `source`, for messages.
        has_dropout: False to switch dropout off for good.

    Raises:
        ValueError: The saved model has no trained head, or its head has a bias.
    """
    args = trainer.args
    model = source if isinstance(source, PreTrainedModel) else _load_classifier(trainer, source, option)
    if f"{_HEAD}.bias" in dict(model.named_parameters()):
        raise ValueError(f"{option}: its head has a bias, which the critic would leave out. Give a model without one.")
    score = model.get_parameter(_HEAD_WEIGHT)
    head = _zero_head(model, trainer.accelerator.device)
    head.weight.data.copy_(score.data)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout) and not has_dropout:
            module.p = 0.0
    model.to(trainer.accelerator.device)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs)
    return ScalarHeadModel(model, head, None)


def _load_classifier(trainer: Trainer, source: str | Path | None, option: str) -> PreTrainedModel:
    """Return a model for sequence classification from a path, or from the policy with a head of zeros."""
    policy, args = cast(PreTrainedModel, trainer.accelerator.unwrap_model(trainer.model)), trainer.args
    settings = {
        "dtype": policy.dtype,
        "attn_implementation": policy.config._attn_implementation,
        "trust_remote_code": (args.model_init_kwargs or {}).get("trust_remote_code", args.trust_remote_code),
    }
    if source is None:
        config = copy.deepcopy(policy.config)
        config.num_labels = 1
        with models.keep_random_state():
            model = AutoModelForSequenceClassification.from_config(config, **settings)
        model.base_model.load_state_dict(policy.base_model.state_dict())
        torch.nn.init.zeros_(model.get_parameter(_HEAD_WEIGHT))
        return model
    model, loading = AutoModelForSequenceClassification.from_pretrained(
        source, num_labels=1, output_loading_info=True, **settings
    )
    # transformers would put the adapter into its base, and save no more than the adapter
    if loading["missing_keys"] or Path(source, "adapter_config.json").is_file():
        raise ValueError(
            f"{option} has no {_HEAD_WEIGHT} or other weights, which would be random, or is an adapter. Give a "
            "whole model for sequence classification with one label, or leave it unset for a new one."
        )
    return model


def _zero_head(model: PreTrainedModel, device: torch.device) -> torch.nn.Linear:
    size = model.config.get_text_config().hidden_size
    head = torch.nn.Linear(size, 1, bias=False, device="meta", dtype=torch.float32)  # keeps the random state
    head.weight = torch.nn.Parameter(torch.zeros(1, size, device=device))
    return head


def _rename(name: str, adapter: str, other: str) -> str:
    """Return the name of a parameter with another adapter's name in it, or with none if `other` is empty."""
    parts = name.split(".")
    renamed = [
        other if part == adapter and before.startswith("lora_") else part
        for before, part in zip(["", *parts], parts, strict=False)
    ]
    return ".".join(part for part in renamed if part)
