"""The reward model of a `RewardAdapter`: it is made, scores rollouts, and is saved and restored."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from peft import PeftModel

from trl_steady.core.tensor_file import TensorFile
from trl_steady.core.types import Rollout
from trl_steady.features.reward_model.labelling import RolloutCompletions
from trl_steady.features.reward_model.reward_function import RewardAdapter, Rewards
from trl_steady.features.reward_model.scorer import RewardScorer
from trl_steady.features.scalar_head.construction import build_adapter_model, build_whole_model
from trl_steady.features.scalar_head.feature import ScalarHeadFeature
from trl_steady.features.scalar_head.model import ScalarHeadModel
from trl_steady.features.scalar_head.saved import load_adapter
from trl_steady.features.step_rewards.alignment import Completion, token_ends
from trl_steady.rewards.splitters import Conversation
from trl_steady.rewards.steps import StepRewards
from trl_steady.trl_bridge.generation import record_prompts
from trl_steady.trl_bridge.models import REWARD_ADAPTER, text_tokenizer

STATE_FILE = "reward_refresh.pt"
"""File of a checkpoint that holds what `RewardModelRefreshCallback` needs to go on."""


class RewardRefresh(NamedTuple):
    """One retraining of the reward model."""

    step: int
    """Optimizer steps taken before it."""
    samples: int
    """Examples of this iteration that it was trained on."""
    replayed: int
    """Examples of earlier iterations that it was trained on."""
    accepted: bool
    """False if the old weights were kept, with `accept="held_out_not_worse"`."""
    old: float | None
    """Accuracy of the old reward model on held-out examples of this iteration; None without any, or if it was new."""
    new: float | None
    """Accuracy of the new one on the same, also if it was refused."""


class Refresher(Protocol):
    """The callback that retrains the reward model, as the feature sees it: `RewardModelRefreshCallback`."""

    refreshes: list[RewardRefresh]
    collect: Callable[[RolloutCompletions], None]
    save: Callable[[Path], None]
    load: Callable[[Path], None]


class RewardModel(ScalarHeadFeature):
    """Scores rollouts with the `RewardAdapter` in `reward_funcs`, if there is one."""

    FILE = TensorFile("reward_model.safetensors", "reward model")
    FOLDER = REWARD_ADAPTER
    adapter: RewardAdapter
    refresher: Refresher | None = None
    """Trains the reward model; None if it does not change."""
    _prompt_ids: list[list[int]]
    """Token ids of the prompts of the rollout in progress."""

    @functools.cached_property
    def scorer(self) -> RewardScorer:
        """Computes scores."""
        assert self.model is not None
        return RewardScorer(self.trainer, self.model)

    # construction

    def on_init_end(self) -> None:
        """Make the reward model, and refuse setups in which it would not act as asked."""
        adapters = [function for function in self.trainer.reward_funcs if isinstance(function, RewardAdapter)]
        if not adapters:
            return
        self.adapter = adapters[0]
        if len(adapters) > 1 or self.adapter.compute_rewards is not None:
            raise ValueError(
                f"reward_funcs has {len(adapters)} RewardAdapters, or one of another trainer. Make exactly one for "
                "each trainer."
            )
        if self.trainer.is_fsdp_enabled or self.trainer.is_deepspeed_enabled:
            raise ValueError(
                "RewardAdapter does not work with FSDP or DeepSpeed, which would shard it and not train it. Use DDP "
                "(accelerate launch --multi_gpu), or a reward model of its own in reward_funcs."
            )
        policy = self.trainer.accelerator.unwrap_model(self.trainer.model)
        if isinstance(policy, PeftModel) and self.trainer.args.rounds_adapters:
            raise ValueError(
                "RewardAdapter does not work with use_transformers_continuous_batching=True and bf16=True, with which "
                "TRL rounds all adapters to bf16. Use bf16=False, another generation, or a reward model of its own."
            )
        self.adopt(self._build())
        self.adapter.compute_rewards = self.compute_rewards  # last, so that a second attempt may use the adapter

    def _build(self) -> ScalarHeadModel:
        """Return a new reward model, without dropout, as in TRL's `RewardTrainer`."""
        policy = self.trainer.accelerator.unwrap_model(self.trainer.model)
        source = self.adapter.source
        config = self.adapter.peft_config
        if isinstance(policy, PeftModel):
            saved = None
            if source is not None:
                saved = load_adapter(source)
            return build_adapter_model(policy, config, REWARD_ADAPTER, saved=saved, has_dropout=False)
        if config is not None:
            raise ValueError("RewardAdapter has a peft_config, and the policy has none. Give both one, or neither.")
        return build_whole_model(self.trainer, source, f"RewardAdapter({str(source)!r})", has_dropout=False)

    # a rollout

    def around_rollout(self, rollout: Rollout, call_next: Callable[[Rollout], dict[str, Any]]) -> dict[str, Any]:
        """Record the tokens of the prompts, which reward functions do not get."""
        if self.model is None:
            return call_next(rollout)
        with record_prompts(self.trainer, functools.partial(setattr, self, "_prompt_ids")):
            return call_next(rollout)

    def compute_rewards(
        self,
        prompts: Sequence[object],
        completions: Sequence[str | Conversation],
        completion_ids: Sequence[list[int]],
        columns: Mapping[str, Any],
    ) -> Rewards:
        """Return what the reward model returns as a reward function of TRL."""
        for name in ("image", "images"):
            for image in columns.get(name) or []:
                if image not in (None, []):  # those of examples with text alone
                    raise ValueError(
                        "RewardAdapter reads text only, and the dataset has images. Use another reward function."
                    )
        has_steps = self.adapter.head == "steps"
        steps: list[StepRewards] = []
        if has_steps:
            steps = list(map(self._split, completions))
            ends = self._step_ends(steps, completions, completion_ids)
        else:
            ends = [[self._length(ids)] for ids in completion_ids]
        with torch.no_grad():
            scores = self.scorer.scores(self._prompt_ids, completion_ids, ends, batch_size=self.batch_size).tolist()
        if self.refresher is not None:
            self.refresher.collect(
                RolloutCompletions(prompts, completions, columns, self._prompt_ids, completion_ids, ends)
            )
        if not has_steps:
            return [row[0] for row in scores]
        rewards: list[StepRewards] = []
        for unscored, row in zip(steps, scores, strict=True):
            rewards.append(dataclasses.replace(unscored, values=row[: len(unscored.values)]))
        return rewards

    def _split(self, completion: str | Conversation) -> StepRewards:
        """Return the steps of a completion, with rewards of 0."""
        steps = self.adapter.splitter(completion)
        return steps.rewards([0.0] * len(steps.texts))

    def _step_ends(
        self, steps: list[StepRewards], completions: Sequence[str | Conversation], completion_ids: Sequence[list[int]]
    ) -> list[list[int]]:
        """Return for each completion the number of tokens before the end of each step."""
        ends: list[list[int]] = []
        for number, (content, ids) in enumerate(zip(completions, completion_ids, strict=True)):
            completion = Completion(f"completion {number} of RewardAdapter", content, ids, [True] * len(ids))
            ends.append(token_ends(steps[number], completion, text_tokenizer(self.trainer)))
        return ends

    def _length(self, ids: list[int]) -> int:
        """Return the number of tokens up to the last that is no padding, whose score transformers takes.

        An end of sequence that is also the padding token counts as padding there.
        """
        pad = text_tokenizer(self.trainer).pad_token_id
        for length in range(len(ids), 0, -1):
            if ids[length - 1] != pad:
                return length
        return 0

    # training and checkpoints

    def on_train_begin(self) -> None:
        """Refuse a new reward model that nothing trains, and warn of one that is trained only later."""
        if self.model is None or not self.model.is_fresh:
            return
        if self.refresher is None:
            raise ValueError(
                "RewardAdapter() is new, its scores are all 0, and nothing trains it. Give it a source, or make a "
                "RewardModelRefreshCallback."
            )
        self.warn(
            "RewardAdapter() is new: the policy learns nothing from it before the first refresh. Call the callback's "
            "fit(rows) before train()."
        )

    def save_state(self, checkpoint: Path) -> None:
        """Save the reward model, and what its training needs to go on."""
        super().save_state(checkpoint)
        if self.refresher is not None:
            self.refresher.save(checkpoint)

    def load_state(self, checkpoint: Path) -> None:
        """Restore what `save_state` has added. Raises ValueError if this run cannot continue it."""
        for file, owner in ((self.FILE.name, self.model), (STATE_FILE, self.refresher)):
            if owner is None and (checkpoint / file).is_file():
                raise ValueError(
                    f"{checkpoint} has {file}, and this run would go on without it. Build the trainer with that "
                    "run's RewardAdapter and RewardModelRefreshCallback, or begin a new run from its model."
                )
        super().load_state(checkpoint)
        if self.refresher is not None:
            self.refresher.load(checkpoint)
