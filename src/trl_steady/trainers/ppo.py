"""PPO: GRPO's trainer with a critic, whose advantages take the place of a group's."""

import functools
from typing import Any

import trl

from trl_steady.config.ppo import PPOConfig
from trl_steady.features.critic.feature import Critic
from trl_steady.features.scalar_head.model import ScalarHeadModel
from trl_steady.trainers.grpo import GRPOTrainer
from trl_steady.trainers.order import ORDER
from trl_steady.trl_bridge.trl_state import set_model_card


class PPOTrainer(GRPOTrainer):
    """`GRPOTrainer` with a critic: PPO (arXiv 1707.06347) with the KL in the reward (InstructGPT, arXiv 2203.02155).

    With PEFT, policy, critic and reference are adapters of one base, quantised or not: the critic is an adapter
    `value` with a float32 head. Without PEFT the critic is a model of its own.

    `save_model` writes the policy as before, and the critic into the folder `value` beside it.

    Args:
        model: As in TRL.
        reward_funcs: As in TRL. For a completion, a function may also return `StepRewards`: each reward goes to the
            last token of its step. A `GroupReward` gets all completions of a prompt at once.
        args: A `trl_steady.PPOConfig`.
        *positional: TRL's other arguments, in TRL's order.
        value_model: Without PEFT, the critic: a model for sequence classification with one label, or its path. None: a
            copy of the policy.
        value_peft_config: With PEFT, the configuration of the critic's adapter, a `LoraConfig`. None: that of the
            policy's adapter, with a copy of its weights.
        ptx_dataset: With `ptx_coef`, examples with a column `text` or `messages` for the language-model loss.
        **keywords: TRL's other arguments, by name.

    Raises:
        ValueError: As for `GRPOTrainer`. The critic cannot be made, or would not be trained as asked.
    """

    FEATURES = ORDER
    CONFIG = PPOConfig
    args: PPOConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    @functools.wraps(trl.GRPOTrainer.__init__, assigned=())
    def __init__(  # pyright: ignore[reportIncompatibleVariableOverride]
        self,
        model: Any,
        reward_funcs: Any = None,
        args: PPOConfig | None = None,
        *positional: Any,
        value_model: Any = None,
        value_peft_config: Any = None,
        ptx_dataset: Any = None,
        **keywords: Any,
    ) -> None:
        self.value_model, self.value_peft_config, self.ptx_dataset = value_model, value_peft_config, ptx_dataset
        super().__init__(model, reward_funcs, args, *positional, **keywords)

    @property
    def kl_coef(self) -> float:
        """The coefficient of the KL in the reward, which moves with `kl_target`."""
        return self.feature(Critic).kl_coef

    @property
    def critic(self) -> ScalarHeadModel:
        """The critic, with its `backbone`, its `head` and the name of its `adapter`."""
        return self.feature(Critic).critic


set_model_card(PPOTrainer, "PPO", title="Proximal Policy Optimization Algorithms", id="1707.06347")
