"""Build a model with a scalar head for a run: an adapter on the policy's base, or a model of its own.

This file knows the options of a run, the policy and the formats in `saved.py`. It trains nothing.
"""

import copy
from pathlib import Path
from typing import cast

import torch
from peft import LoraConfig, PeftConfig, PeftModel
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel

from trl_steady.core.feature import Trainer
from trl_steady.features.adapters.base_model import BaseModel, base_changing_init
from trl_steady.features.adapters.saved import warn_of_other_base
from trl_steady.features.scalar_head.model import HEAD, HEAD_WEIGHT, ScalarHeadModel
from trl_steady.features.scalar_head.saved import (
    SavedAdapter,
    rename_adapter,
    restore_adapter,
)
from trl_steady.trl_bridge import models
from trl_steady.trl_bridge.models import (
    VALUE_ADAPTER,
    drop_adapter,
    enable_checkpointing,
    is_lora_parameter,
    keep_base,
    keep_dtypes_and_trainability,
)

_TRAIN_AN_ADAPTER = "train with a peft_config, with which it is an adapter on the policy's base"


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
        value = getattr(peft_config, option, None)
        if value and value != "none":
            raise ValueError(
                f"{option}={value!r} would have no effect on the adapter {name!r}, which is LoRA with a scalar head. "
                "Leave it unset."
            )
    base = BaseModel(policy)
    policy_adapter = policy.active_adapters[0]
    policy_config = policy.peft_config[policy_adapter]
    is_copy = saved is None and peft_config is None
    if saved is not None:
        config = _adapter_config(saved[0], base, name)
        warn_of_other_base(saved[0], base, name)
    else:
        config = _adapter_config(peft_config or policy_config, base, name)
    if base.changing_init is not None:  # PEFT changes these modules again when it loads the saved adapter
        config.target_modules = copy.copy(cast(LoraConfig, policy_config).target_modules)
    # PEFT would copy whole modules, and train biases in the base
    config.modules_to_save = None
    config.trainable_token_indices = None
    config.bias = "none"
    if not has_dropout:
        config.lora_dropout = 0.0
    drop_adapter(policy, name)
    # keep the random state, so that rollouts are the same as without the adapter
    with keep_dtypes_and_trainability(policy), keep_base(config), models.keep_random_state():
        policy.add_adapter(name, config)
    parameters = dict(policy.named_parameters())
    for parameter_name, parameter in parameters.items():
        if not is_lora_parameter(parameter_name, name):
            continue
        parameter.data = parameter.data.float()
        parameter.requires_grad_(False)
        twin = parameters.get(rename_adapter(parameter_name, name, policy_adapter))
        if is_copy and twin is not None:
            parameter.data.copy_(twin.data)
    device = list(parameters.values())[-1].device  # that of the last hidden state
    model = ScalarHeadModel(policy, _zero_head(base.model, device), name)
    if saved is not None:
        restore_adapter(model, saved[1])
    return model


def _adapter_config(config: PeftConfig, base: BaseModel, name: str) -> LoraConfig:
    """Return a copy of an adapter's configuration. Raises ValueError if the adapter cannot have a scalar head."""
    config = copy.deepcopy(config)
    if not isinstance(config, LoraConfig):
        raise ValueError(
            f"the adapter {name!r} has a {type(config).__name__}, and must be LoRA. Train the policy with a "
            "LoraConfig, or as a whole (no peft_config)."
        )
    init = base_changing_init(config)
    if init != base.changing_init:  # PEFT changes the base when it makes some adapters
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
    if HEAD_WEIGHT not in dict(model.named_parameters()):
        raise ValueError(
            f"{option}: {type(model).__name__} has no {HEAD_WEIGHT}. Give a model for sequence classification whose "
            f"head has this name, or {_TRAIN_AN_ADAPTER}."
        )
    if f"{HEAD}.bias" in dict(model.named_parameters()):
        raise ValueError(f"{option}: its head has a bias, which would be left out. Give a model without one.")
    score = model.get_parameter(HEAD_WEIGHT)
    head = _zero_head(model, trainer.accelerator.device)
    head.weight.data.copy_(score.data)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout) and not has_dropout:
            module.p = 0.0
    model.to(trainer.accelerator.device)
    if args.gradient_checkpointing:
        enable_checkpointing(model.gradient_checkpointing_enable, args.gradient_checkpointing_kwargs)
    return ScalarHeadModel(model, head, None)


def _load_classifier(trainer: Trainer, source: str | Path | None, option: str) -> PreTrainedModel:
    """Return a model for sequence classification from a path, or from the policy with a head of zeros."""
    policy = cast(PreTrainedModel, trainer.accelerator.unwrap_model(trainer.model))
    init_kwargs = trainer.args.model_init_kwargs or {}
    settings = {
        "dtype": policy.dtype,
        "attn_implementation": policy.config._attn_implementation,
        "trust_remote_code": init_kwargs.get("trust_remote_code", trainer.args.trust_remote_code),
    }
    is_adapter = source is not None and Path(source, "adapter_config.json").is_file()
    if source is None:
        config = policy.config
        _refuse_architecture(config, option)
        config = copy.deepcopy(config)
        config.num_labels = 1
        with models.keep_random_state():
            model = AutoModelForSequenceClassification.from_config(config, **settings)
        model.base_model.load_state_dict(policy.base_model.state_dict())
        torch.nn.init.zeros_(model.get_parameter(HEAD_WEIGHT))
        return model
    if not is_adapter:
        config = AutoConfig.from_pretrained(source, trust_remote_code=settings["trust_remote_code"])
        _refuse_architecture(config, option)
    model, loading = AutoModelForSequenceClassification.from_pretrained(
        source, num_labels=1, output_loading_info=True, **settings
    )
    # transformers would put the adapter into its base, and save no more than the adapter
    if loading["missing_keys"] or is_adapter:
        raise ValueError(
            f"{option} has no {HEAD_WEIGHT} or other weights, which would be random, or is an adapter. Give a "
            "whole model for sequence classification with one label, or leave it unset for a new one."
        )
    return model


def _refuse_architecture(config: PreTrainedConfig, option: str) -> None:
    if not models.has_classifier(config):
        raise ValueError(
            f"{option}: transformers has no model for sequence classification of the architecture "
            f"{config.model_type!r}, and a critic or reward model of its own needs one. Pass one with a head "
            f"{HEAD_WEIGHT}, or {_TRAIN_AN_ADAPTER}."
        )


def _zero_head(model: PreTrainedModel, device: torch.device) -> torch.nn.Linear:
    size = model.config.get_text_config().hidden_size
    head = torch.nn.Linear(size, 1, bias=False, device="meta", dtype=torch.float32)  # keeps the random state
    head.weight = torch.nn.Parameter(torch.zeros(1, size, device=device))
    return head
