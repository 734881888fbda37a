"""The trainer as PPO's features read it."""

from typing import Protocol

from datasets import Dataset
from peft import LoraConfig
from transformers import PreTrainedModel

from trl_steady.core.feature import Trainer
from trl_steady.features.critic.model import ScalarHeadModel


class PPOTrainerProtocol(Trainer, Protocol):
    """A trainer with the arguments of `PPOTrainer`."""

    value_model: PreTrainedModel | str | None
    value_peft_config: LoraConfig | None
    ptx_dataset: Dataset | None
    eos_token_ids: list[int]
    reward_model: ScalarHeadModel | None
