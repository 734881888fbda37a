"""Build the critic that the options of a run ask for."""

import copy
from typing import Any, cast

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from trl_steady.config.ppo import PPOConfig
from trl_steady.core.feature import Trainer
from trl_steady.features.scalar_head.construction import build_adapter_model, build_whole_model
from trl_steady.features.scalar_head.model import ScalarHeadModel
from trl_steady.features.scalar_head.saved import load_adapter, to_saved_adapter


def build_critic(trainer: Trainer, args: PPOConfig) -> ScalarHeadModel:
    """Return the critic that the options ask for: an adapter if the policy has one, otherwise a model of its own.

    Raises:
        ValueError: Options do not go together, or not with the policy.
    """
    unwrap = trainer.accelerator.unwrap_model
    policy = unwrap(trainer.model)
    reward_model: ScalarHeadModel | None = trainer.reward_model
    init = args.value_init
    has_dropout = not args.disable_dropout
    if isinstance(policy, PeftModel):
        is_trained = reward_model is not None and not reward_model.is_fresh
        _refuse_contradictions(trainer, init, "value_peft_config", "value_model", "trained RewardAdapter", is_trained)
        saved = None
        if init == "reward" and reward_model is not None:
            saved = to_saved_adapter(reward_model)
        elif init != "policy":
            saved = load_adapter(init)
        # TRL has switched dropout off before the adapter exists
        return build_adapter_model(policy, trainer.value_peft_config, saved=saved, has_dropout=has_dropout)
    reward_models: list[Any] = []
    for function in trainer.reward_funcs:
        if isinstance(function, torch.nn.Module):
            reward_models.append(unwrap(function))
    if reward_model is not None:
        reward_models.append(reward_model.bare)
    has_reward_model = bool(reward_models)
    _refuse_contradictions(
        trainer, init, "value_model", "value_peft_config", "model or RewardAdapter", has_reward_model
    )
    option = "value_model"
    source = trainer.value_model
    if init == "reward":
        source = cast(PreTrainedModel, reward_models[0])
    elif init != "policy":
        option = f"value_init={init!r}"
        source = init
    if any(source is scoring for scoring in reward_models):  # a reward model must not learn while it scores
        source = copy.deepcopy(source)
    critic = build_whole_model(trainer, source, option, has_dropout=has_dropout)
    critic.bare.train()
    return critic


def _refuse_contradictions(
    trainer: Trainer, init: str, option: str, idle_option: str, start: str, has_start: bool
) -> None:
    """Raise a ValueError if the critic's start is said twice, or is missing, or an argument has no effect.

    `option` and `idle_option` are the arguments that this kind of critic reads and ignores. `start` is what
    `value_init="reward"` needs in `reward_funcs`.
    """
    if getattr(trainer, idle_option) is not None:
        raise ValueError(f"{idle_option} would have no effect on the critic of this policy. Unset it.")
    if init != "policy" and getattr(trainer, option) is not None:
        raise ValueError(f"{option} and value_init={init!r} both say where the critic begins. Give one of them.")
    if init == "reward" and not has_start:
        raise ValueError(
            f"value_init='reward' begins with the reward model, and reward_funcs has no {start} to begin with. Add "
            "one, or set value_init to 'policy' or to the path of a saved critic."
        )
