"""The reward model as a part: it is made, scores rollouts, and is saved and restored."""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from peft import PeftModel
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trl_steady.core.tensor_file import TensorFile
from trl_steady.core.types import Rollout
from trl_steady.features.critic.feature import ScorerPart
from trl_steady.features.critic.model import Critic, adapter_critic, saved_adapter, whole_critic
from trl_steady.features.reward_model.adapter import RewardAdapter
from trl_steady.features.reward_model.labelling import Answers
from trl_steady.features.step_rewards.alignment import Completion, token_ends
from trl_steady.rewards.splitters import Conversation
from trl_steady.rewards.steps import StepRewards
from trl_steady.trl_bridge.models import REWARD_ADAPTER, text_tokenizer
from trl_steady.trl_bridge.rollout import record_prompts

if TYPE_CHECKING:
    from trl_steady.features.reward_model.callback import RewardModelRefreshCallback

STATE_FILE = "reward_refresh.pt"
"""File of a checkpoint that holds what `RewardModelRefreshCallback` needs to go on."""


class RewardModelPart(ScorerPart):
    """Scores rollouts with the `RewardAdapter` in `reward_funcs`, if there is one."""

    FILE = TensorFile("reward_model.safetensors", "reward model")
    FOLDER = REWARD_ADAPTER
    adapter: RewardAdapter
    refresher: "RewardModelRefreshCallback | None" = None
    """Trains the reward model; None if it does not change."""
    _prompts: list[list[int]]
    """Token ids of the rollout in progress."""

    # construction

    def built(self) -> None:
        """Make the reward model, and refuse setups in which it would not act as asked."""
        found = [function for function in self.trainer.reward_funcs if isinstance(function, RewardAdapter)]
        if not found:
            return
        self.adapter = found[0]
        if len(found) > 1 or self.adapter.part is not None:
            raise ValueError(
                f"reward_funcs has {len(found)} RewardAdapters, or one of another trainer. Make exactly one for each "
                "trainer."
            )
        if self.trainer.is_fsdp_enabled or self.trainer.is_deepspeed_enabled:
            raise ValueError(
                "RewardAdapter does not work with FSDP or DeepSpeed, which would shard it and not train it. Use DDP "
                "(accelerate launch --multi_gpu), or a reward model of its own in reward_funcs."
            )
        self.adopt(self._made())
        self.adapter.part = self  # now that nothing can fail, so that a second attempt may use the adapter

    def _made(self) -> Critic:
        """Return a new reward model, without dropout, as in TRL's `RewardTrainer`."""
        policy = self.trainer.accelerator.unwrap_model(self.trainer.model)
        source, config = self.adapter.source, self.adapter.peft_config
        if isinstance(policy, PeftModel):
            saved = None if source is None else saved_adapter(source)
            return adapter_critic(policy, config, REWARD_ADAPTER, saved=saved, has_dropout=False)
        if config is not None:
            raise ValueError("RewardAdapter has a peft_config, and the policy has none. Give both one, or neither.")
        model = whole_critic(self.trainer, source, f"RewardAdapter({str(source)!r})", has_dropout=False)
        model.bare.eval()
        return model

    # a rollout

    def rolling(self, rollout: Rollout) -> contextlib.AbstractContextManager[None]:
        """Remember the tokens of the prompts."""
        if self.model is None:
            return contextlib.nullcontext()
        return record_prompts(self.trainer, functools.partial(setattr, self, "_prompts"))

    def rewards(
        self,
        prompts: Sequence[object],
        completions: Sequence[str | Conversation],
        ids: Sequence[list[int]],
        columns: Mapping[str, Any],
    ) -> list[float] | list[StepRewards]:
        """Return what the reward model returns as a reward function of TRL."""
        # rows with text alone have None or []
        pictures = (picture for name in ("image", "images") for picture in columns.get(name) or [])
        if any(picture not in (None, []) for picture in pictures):
            raise ValueError("RewardAdapter reads text only, and the dataset has images. Use another reward function.")
        steps: list[StepRewards] = []
        if self.adapter.head == "steps":
            ends = []
            for number, (content, tokens) in enumerate(zip(completions, ids, strict=True)):
                split = self.adapter.splitter(content)
                steps.append(split.rewards([0.0] * len(split.texts)))
                completion = Completion(f"completion {number} of RewardAdapter", content, tokens, [True] * len(tokens))
                ends.append(token_ends(steps[-1], completion, text_tokenizer(self.trainer)))
        else:
            ends = [[self._length(tokens)] for tokens in ids]
        with torch.no_grad(), self.dropping_out(False):
            scores = self.scores(self._prompts, ids, ends, batch_size=self.batch_size).tolist()
        if self.refresher is not None:
            self.refresher.collect(Answers(prompts, completions, columns, self._prompts, ids, ends))
        if self.adapter.head == "outcome":
            return [score for score, *_ in scores]
        return [
            dataclasses.replace(step, values=row[: len(step.values)]) for step, row in zip(steps, scores, strict=True)
        ]

    def _length(self, ids: list[int]) -> int:
        """Return the number of tokens up to the last that is no padding, whose score transformers takes.

        An end of sequence that is also the padding token counts as padding there.
        """
        pad = text_tokenizer(self.trainer).pad_token_id
        return next((n for n in range(len(ids), 0, -1) if ids[n - 1] != pad), 0)

    @contextlib.contextmanager
    def dropping_out(self, acts: bool) -> Iterator[None]:
        """Switch dropout and recomputation on or off, whatever the trainer is doing. A score is not random."""
        assert self.model is not None
        before = [(module, module.training) for module in self.model.bare.modules()]
        self.model.bare.train(acts)
        try:
            yield
        finally:
            for module, was_training in before:
                module.training = was_training

    def scores(
        self,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        ends: Sequence[Sequence[int]],
        *,
        batch_size: int | None = None,
    ) -> Tensor:
        """Return scores (N, S) of texts at the ends of their steps, 0 where a text has fewer. S is the most steps.

        Prompts and completions are token ids. `ends` has for each completion the numbers of its tokens after which a
        score is read. `batch_size` texts go through the model together; None for all.
        """
        assert self.model is not None
        device, pad = self.trainer.accelerator.device, cast(int, text_tokenizer(self.trainer).pad_token_id)
        samples: dict[str, Tensor] = {}
        # the score after a token is a critic's value of the next one
        longer = [[*tokens, pad] for tokens in completions]
        for name, rows, side in (("prompt", prompts, "left"), ("completion", longer, "right")):
            samples[f"{name}_ids"], samples[f"{name}_mask"] = _padded(rows, pad, side, device)
        with self.trainer.accelerator.autocast():
            values = self.trainer.values(self.model, samples, None, batch_size)
        token_indices, is_step = _padded(ends, 0, "right", device)
        return values.gather(1, token_indices) * is_step

    # checkpoints

    def save(self, checkpoint: Path) -> None:
        """Save the reward model, and what its training needs to go on."""
        super().save(checkpoint)
        if self.refresher is not None:
            self.refresher.save(checkpoint)

    def load(self, checkpoint: Path) -> None:
        """Restore what `save` has added. Raises ValueError if this run cannot continue it."""
        for file, owner in ((self.FILE.name, self.model), (STATE_FILE, self.refresher)):
            if owner is None and (checkpoint / file).is_file():
                raise ValueError(
                    f"{checkpoint} has {file}, and this run would go on without it. Build the trainer with that "
                    "run's RewardAdapter and RewardModelRefreshCallback, or begin a new run from its model."
                )
        super().load(checkpoint)
        if self.refresher is not None:
            self.refresher.load(checkpoint)

    def beginning(self) -> None:
        """Refuse a new reward model that nothing trains, and warn of one that is trained only later."""
        if self.model is None or not self.model.is_fresh:
            return
        if self.refresher is None:
            raise ValueError(
                "RewardAdapter() is new, its scores are all 0, and nothing trains it. Give it a source, or make a "
                "RewardModelRefreshCallback."
            )
        warnings.warn(
            "RewardAdapter() is new: the policy learns nothing from it before the first refresh. Call the callback's "
            "fit(rows) before train().",
            stacklevel=2,
        )


def _padded(rows: Sequence[Sequence[int]], value: int, side: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return rows of numbers as a padded tensor, and its mask."""
    tensors = [torch.as_tensor(row, dtype=torch.long) for row in rows]
    masks = [torch.ones_like(row) for row in tensors]
    pad = functools.partial(pad_sequence, batch_first=True, padding_side=side)
    return pad(tensors, padding_value=value).to(device), pad(masks).to(device)
