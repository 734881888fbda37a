"""Making the critic of a run: an adapter on the policy's base, or a model of its own."""

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from trl_steady.critic.model import Critic, add_value_adapter, copied_from, loaded, own_critic, trusts, without_dropout
from trl_steady.critic.trainer import PPO


def critic_of(trainer: PPO) -> Critic:
    """Return the critic that the trainer's options ask for: an adapter if the policy has one, else a model.

    Raises:
        ValueError: `value_model`, `value_init` or `value_peft_config` does not go with the policy or with the others.
    """
    policy = trainer.accelerator.unwrap_model(trainer.model)
    _refuse_contradictions(trainer, is_adapted=isinstance(policy, PeftModel))
    critic = _adapter(trainer, policy) if isinstance(policy, PeftModel) else _whole_model(trainer, policy)
    if trainer.args.disable_dropout:  # TRL has done so before there was a critic
        without_dropout(critic.backbone)
    return critic


def _refuse_contradictions(trainer: PPO, *, is_adapted: bool) -> None:
    idle, other = "value_model", "value_peft_config"
    if not is_adapted:
        idle, other = other, idle
    if getattr(trainer, idle) is not None:
        critic = "an adapter, so its critic is one too" if is_adapted else "no adapter, so its critic is a whole model"
        raise ValueError(f"{idle} would have no effect: the policy has {critic}. Leave it unset.")
    init = trainer.args.value_init
    is_decided = init == "reward" if is_adapted else init != "policy"
    if is_decided and getattr(trainer, other) is not None:
        raise ValueError(f"{other} and value_init={init!r} both say where the critic begins. Give one of them.")
    for option in ("modules_to_save", "trainable_token_indices", "bias"):
        if (value := getattr(trainer.value_peft_config, option, None)) and value != "none":
            raise ValueError(
                f"{option}={value!r} in value_peft_config would have no effect: the critic has LoRA, and its head. "
                f"Leave {option} unset."
            )
    reward = trainer.reward_model
    has_adapter = is_adapted and reward is not None and bool(reward.head.weight.any())
    if init == "reward" and not (has_adapter if is_adapted else _scorers(trainer)):
        needed = "trained RewardAdapter" if is_adapted else "model or RewardAdapter"
        raise ValueError(
            f"value_init='reward' begins with the reward model, and reward_funcs has no {needed} "
            "to begin with. Add one, or set value_init to 'policy' or to the path of a saved critic."
        )


def _adapter(trainer: PPO, policy: PeftModel) -> Critic:
    init, reward = trainer.args.value_init, trainer.reward_model
    if init == "reward" and reward is not None and reward.adapter is not None:
        critic = add_value_adapter(policy, policy.peft_config[reward.adapter])
        critic.copy(reward)
        return critic
    critic = add_value_adapter(policy, trainer.value_peft_config)
    if init != "policy":
        critic.load_pretrained(Path(init), f"value_init={str(init)!r}")
    return critic


def _scorers(trainer: PPO) -> list[torch.nn.Module]:
    """Return the models among the reward functions."""
    scorers = [function for function in trainer.reward_funcs if isinstance(function, torch.nn.Module)]
    return [*scorers, trainer.reward_model.bare] if trainer.reward_model else scorers


def _whole_model(trainer: PPO, policy: PreTrainedModel) -> Critic:
    args, init = trainer.args, trainer.args.value_init
    scorers = _scorers(trainer)
    model: Any = scorers[0] if init == "reward" else trainer.value_model
    if init not in ("policy", "reward"):
        model = loaded(init, policy, f"value_init={str(init)!r}", "value_init='policy'", trusted=trusts(args))
    elif isinstance(model, str | Path):
        model = loaded(model, policy, f"value_model={str(model)!r}", "no value_model", trusted=trusts(args))
    for scorer in scorers:
        if scorer is model and isinstance(scorer, PreTrainedModel):  # which must not learn while it scores
            model = type(scorer)._from_config(scorer.config, dtype=scorer.dtype)
            model.load_state_dict(scorer.state_dict())
    critic = own_critic(copied_from(policy, trusted=trusts(args)) if model is None else model)
    critic.bare.to(trainer.accelerator.device)
    critic.head.to(trainer.accelerator.device)
    if args.gradient_checkpointing:
        critic.bare.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs)
    critic.bare.train()
    return critic
