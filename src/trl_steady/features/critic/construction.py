"""Making the critic of a run: an adapter on the policy's base, or a model of its own."""

import copy
from typing import Any

import torch
from peft import PeftModel

from trl_steady.features.critic.model import Critic, adapter_critic, saved_adapter, whole_critic
from trl_steady.features.critic.trainer import PPO


def critic_of(trainer: PPO) -> Critic:
    """Return the critic that the trainer's options ask for: an adapter if the policy has one, else a model.

    Raises ValueError for options that do not go together, or not with the policy.
    """
    unwrap = trainer.accelerator.unwrap_model
    policy = unwrap(trainer.model)
    is_adapted, reward, init = isinstance(policy, PeftModel), trainer.reward_model, trainer.args.value_init
    option, idle = ("value_peft_config", "value_model") if is_adapted else ("value_model", "value_peft_config")
    scorers: list[Any] = [unwrap(each) for each in trainer.reward_funcs if isinstance(each, torch.nn.Module)]
    scorers += [] if reward is None else [reward.bare]
    has_start = reward is not None and not reward.is_fresh if is_adapted else scorers
    for is_wrong, message in (
        (getattr(trainer, idle) is not None, f"{idle} would have no effect on the critic of this policy. Unset it."),
        (
            init != "policy" and getattr(trainer, option) is not None,
            f"{option} and value_init={init!r} both say where the critic begins. Give one of them.",
        ),
        (
            init == "reward" and not has_start,
            "value_init='reward' begins with the reward model, and reward_funcs has no "
            f"{'trained RewardAdapter' if is_adapted else 'model or RewardAdapter'} to begin with. Add one, or set "
            "value_init to 'policy' or to the path of a saved critic.",
        ),
    ):
        if is_wrong:
            raise ValueError(message)
    source = None if init in ("policy", "reward") else init
    has_dropout = not trainer.args.disable_dropout  # TRL has done so before there was a critic
    if is_adapted:
        saved = reward.as_saved() if init == "reward" and reward is not None else source and saved_adapter(source)
        return adapter_critic(policy, trainer.value_peft_config, saved=saved, has_dropout=has_dropout)
    model = scorers[0] if init == "reward" else source or trainer.value_model
    if any(scorer is model for scorer in scorers):  # which must not learn while it scores
        model = copy.deepcopy(model)
    critic = whole_critic(trainer, model, f"value_init={init!r}" if source else "value_model", has_dropout=has_dropout)
    critic.bare.train()
    return critic
