"""Making the critic of a run: an adapter on the policy's base, or a model of its own."""

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from trl_steady.critic.model import Critic, add_value_adapter, copied_from, loaded, own_critic, trusts, without_dropout

__all__ = ["critic_of"]


def critic_of(trainer: Any) -> Critic:
    """Return the critic that the trainer's options ask for: an adapter if the policy has one, else a model.

    Raises:
        ValueError: `value_model`, `value_init` or `value_peft_config` does not go with the policy or with the others.
    """
    policy = trainer.accelerator.unwrap_model(trainer.model)
    return (_adapter if isinstance(policy, PeftModel) else _whole_model)(trainer, policy)


def _adapter(trainer: Any, policy: PeftModel) -> Critic:
    args, init = trainer.args, trainer.args.value_init
    value_model, peft_config = trainer.value_model, trainer.value_peft_config
    if value_model is not None:
        raise ValueError(
            f"value_model={type(value_model).__name__}: the policy has an adapter, and its critic is an "
            "adapter on the same base. Leave value_model unset, or load a saved critic with value_init."
        )
    reward = trainer.reward_model
    if init == "reward" and reward is None:
        raise ValueError(
            "value_init='reward': the reward model is not an adapter on the policy's base. Put a "
            "RewardAdapter into reward_funcs, or set value_init to 'policy' or to the path of a saved critic."
        )
    if init == "reward" and not reward.head.weight.any():
        raise ValueError(
            "value_init='reward': RewardAdapter() is new, so the critic would begin with values of 0. Give "
            "RewardAdapter the folder of a trained reward model, or set value_init='policy'."
        )
    if init == "reward" and peft_config is not None:
        raise ValueError(
            "value_init='reward' begins with the reward model's adapter and its configuration, which "
            "value_peft_config would change. Give one of them."
        )
    for option in ("modules_to_save", "trainable_token_indices", "bias"):
        if (value := getattr(peft_config, option, None)) and value != "none":
            raise ValueError(
                f"{option}={value!r} in value_peft_config would have no effect: the critic has LoRA, and its head. "
                f"Leave {option} unset."
            )
    critic = add_value_adapter(policy, policy.peft_config[reward.adapter] if init == "reward" else peft_config)
    if args.disable_dropout:  # TRL has done so before there was a critic
        without_dropout(policy)
    if init == "reward":
        critic.copy(reward)
    elif init != "policy":
        critic.load_pretrained(Path(init), f"value_init={str(init)!r}")
    return critic


def _whole_model(trainer: Any, policy: Any) -> Critic:
    args, init = trainer.args, trainer.args.value_init
    value_model: Any = trainer.value_model
    if (peft_config := trainer.value_peft_config) is not None:
        raise ValueError(
            f"value_peft_config={type(peft_config).__name__}(...): the policy has no adapter, so its critic is a "
            "whole model. Give peft_config too, or leave value_peft_config unset."
        )
    if value_model is not None and init != "policy":
        raise ValueError(f"value_model and value_init={init!r} both say where the critic begins. Give one of them.")
    scorers: list[Any] = [own for own in trainer.reward_funcs if isinstance(own, torch.nn.Module)]
    scorers += [trainer.reward_model.bare] if trainer.reward_model else []
    if init == "reward":
        if not scorers:
            raise ValueError(
                "value_init='reward': no reward function is a model. Set value_init to 'policy' or to a path."
            )
        value_model = scorers[0]
    elif init != "policy":
        value_model = loaded(init, policy, f"value_init={str(init)!r}", "value_init='policy'", trusted=trusts(args))
    elif isinstance(value_model, str | Path):
        name = f"value_model={str(value_model)!r}"
        value_model = loaded(value_model, policy, name, "no value_model", trusted=trusts(args))
    for scorer in scorers:
        if scorer is value_model and isinstance(scorer, PreTrainedModel):  # which must not learn while it scores
            value_model = type(scorer)._from_config(scorer.config, dtype=scorer.dtype)
            value_model.load_state_dict(scorer.state_dict())
    critic = own_critic(copied_from(policy, trusted=trusts(args)) if value_model is None else value_model)
    bare: Any = critic.bare.to(trainer.accelerator.device)
    critic.head.to(trainer.accelerator.device)
    if args.disable_dropout:
        without_dropout(bare)
    if args.gradient_checkpointing:
        bare.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs)
    bare.train()
    return critic
