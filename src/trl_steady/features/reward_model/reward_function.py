"""The reward model that users put into `reward_funcs`."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from peft import LoraConfig

from trl_steady.rewards.splitters import Conversation, Splitter, by_blank_line
from trl_steady.rewards.steps import StepRewards

Rewards = list[float] | list[StepRewards]
RewardFunction = Callable[
    [Sequence[object], Sequence[str | Conversation], Sequence[list[int]], Mapping[str, Any]], Rewards
]
"""Takes prompts, completions, token ids of the completions, and the other arguments of a reward function."""


class RewardAdapter:
    """A reward model that is an adapter `reward`, with a float32 head, on the policy's own base.

    Put it into `reward_funcs` of a trainer of trl-steady: `GRPOTrainer(..., reward_funcs=RewardAdapter("my-model"))`.
    The base may be quantised. The trainer scores with the adapters of policy and reference off, without padding, on
    the tokens that the policy has read and written. Without PEFT the reward model is a model of its own.

    The scores are logits: the head's output at the last token of the completion, or at the last token of each step.
    `RewardModelRefreshCallback` trains it while the policy trains.

    Args:
        source: Folder of a PEFT adapter for sequence classification with one label, as TRL's `RewardTrainer` or a
            trl-steady run saves it (`reward/`). Without PEFT, the folder or the name of such a model. None: a new one,
            whose scores are 0 until it is trained.
        head: `"outcome"`: one score for a completion. `"steps"`: `StepRewards` with a score for each step.
        peft_config: `LoraConfig` of a new adapter; None: that of the policy's, with a copy of its weights.
        splitter: With `head="steps"`, splits a completion into steps. None: `by_blank_line()`.

    Raises:
        ValueError: An argument has no meaning, alone or with the others.
    """

    def __init__(
        self,
        source: str | Path | None = None,
        *,
        head: Literal["outcome", "steps"] = "outcome",
        peft_config: LoraConfig | None = None,
        splitter: Splitter | None = None,
    ) -> None:
        if head not in ("outcome", "steps"):
            raise ValueError(f"head={head!r} is unknown. Set it to 'outcome' or 'steps'.")
        if splitter and head != "steps":
            raise ValueError(f"splitter has no effect with head={head!r}. Set head='steps'.")
        if source and peft_config:
            raise ValueError(f"source={str(source)!r} has a peft_config already. Give one of them.")
        self.source = source
        self.head = head
        self.peft_config = peft_config
        self.splitter = splitter or by_blank_line()
        self.__name__ = "reward_model"  # under which TRL logs the reward
        self.compute_rewards: RewardFunction | None = None
        """The trainer's function that scores; None before there is a trainer."""

    def __call__(
        self,
        prompts: Sequence[object],
        completions: Sequence[str | Conversation],
        completion_ids: Sequence[list[int]],
        **columns: object,
    ) -> Rewards:
        """Return a score or `StepRewards` for each completion. Raises ValueError in a trainer of TRL."""
        if self.compute_rewards is None:
            raise ValueError("RewardAdapter scores with a trainer of trl-steady. Import the trainer from trl_steady.")
        return self.compute_rewards(prompts, completions, completion_ids, columns)
