"""The reward model as a part: it is made, scores rollouts, and is saved and restored."""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from accelerate.utils import broadcast
from peft import LoraConfig, PeftModel
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trl_steady.critic.model import Critic, add_value_adapter, copied_from, loaded, own_critic, trusts, without_dropout
from trl_steady.host.checkpoints import saved_without
from trl_steady.host.files import TensorFile
from trl_steady.host.models import REWARD_ADAPTER, is_of_lora, text_tokenizer
from trl_steady.host.part import Part, Rollout, Trainer
from trl_steady.host.rollouts import noting_prompts
from trl_steady.reward_model.adapter import RewardAdapter
from trl_steady.reward_model.labelling import Answers
from trl_steady.rewards.placement import Completion, token_ends
from trl_steady.rewards.steps import StepRewards

if TYPE_CHECKING:
    from trl_steady.reward_model.callback import RewardModelRefreshCallback

REWARD_MODEL = TensorFile("reward_model.safetensors", "reward model")
STATE_FILE = "reward_refresh.pt"
"""File of a checkpoint that holds what `RewardModelRefreshCallback` needs to go on."""


class RewardModelPart(Part):
    """Scores rollouts with the `RewardAdapter` in `reward_funcs`, if there is one."""

    adapter: RewardAdapter
    model: Critic | None = None
    """Scores texts as a critic does; None without a `RewardAdapter`."""
    refresher: "RewardModelRefreshCallback | None" = None
    """Trains the reward model; None if it does not change."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self._prompts: list[list[int]] = []

    # construction

    def built(self) -> None:
        """Make the reward model, and refuse setups in which it would not act as asked."""
        trainer = self.trainer
        found = [function for function in trainer.reward_funcs if isinstance(function, RewardAdapter)]
        if not found:
            return
        self.adapter = found[0]
        if len(found) > 1 or self.adapter.part is not None:
            raise ValueError(
                f"reward_funcs has {len(found)} RewardAdapters, or one of another trainer. Make exactly one for each "
                "trainer."
            )
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            engine = "FSDP" if trainer.is_fsdp_enabled else "DeepSpeed"
            raise ValueError(
                f"RewardAdapter does not work with {engine}, which would shard it without training it. Use DDP "
                "(accelerate launch --multi_gpu), or a reward model of its own in reward_funcs."
            )
        self.model = self._made()
        self.adapter.part = self  # now that nothing can fail, so that a second attempt may use the adapter
        for parameter in self.model.parameters:
            parameter.data = broadcast(parameter.data)  # pyright: ignore[reportAttributeAccessIssue]
            parameter.requires_grad_(False)  # so that neither the policy's optimizer nor DDP takes it

    def _made(self) -> Critic:
        policy = self.trainer.accelerator.unwrap_model(self.trainer.model)
        source, config, args = self.adapter.source, self.adapter.peft_config, self.trainer.args
        name = f"RewardAdapter({str(source)!r})"
        if isinstance(policy, PeftModel):
            if source is not None:
                config = LoraConfig.from_pretrained(str(source))
            model = add_value_adapter(policy, config, REWARD_ADAPTER)
            if source is not None:
                model.load_pretrained(Path(source), name)
            for module_name, module in policy.named_modules():
                if is_of_lora(module_name, REWARD_ADAPTER):
                    without_dropout(module)  # as in TRL's RewardTrainer
            policy.peft_config[REWARD_ADAPTER].lora_dropout = 0.0  # pyright: ignore[reportAttributeAccessIssue]
            return model
        if config is not None or Path(source or "", "adapter_config.json").is_file():
            raise ValueError(
                f"{name} is an adapter (peft_config, or adapter_config.json in its folder), and the policy has none. "
                "Train the policy with peft_config, or give the folder of a whole model or nothing."
            )
        if source is None:
            whole = copied_from(policy, "RewardAdapter a source", trusted=trusts(args))
        else:
            whole = loaded(source, policy, name, "RewardAdapter()", trusted=trusts(args))
        model = own_critic(whole.eval(), name)
        without_dropout(model.bare)
        if args.gradient_checkpointing:
            model.bare.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs)
        model.bare.to(self.trainer.accelerator.device)
        model.head.to(self.trainer.accelerator.device)
        return model

    @property
    def is_fresh(self) -> bool:
        """True if nobody has trained the reward model."""
        return self.model is not None and not bool(self.model.head.weight.any())

    # a rollout

    def rolling(self, rollout: Rollout) -> contextlib.AbstractContextManager[None]:
        """Remember the tokens of the prompts."""
        if self.model is None:
            return contextlib.nullcontext()
        return noting_prompts(self.trainer, functools.partial(setattr, self, "_prompts"))

    def rewards(
        self,
        prompts: Sequence[object],
        completions: Sequence[object],
        ids: Sequence[list[int]],
        columns: Mapping[str, object],
    ) -> list[float] | list[StepRewards]:
        """Return what the reward model returns as a reward function of TRL."""
        # rows with text alone have None or []; an image may have no truth value
        pictures = (picture for name in ("image", "images") for picture in cast(list[object], columns.get(name) or []))
        if any(picture is not None and not (isinstance(picture, list) and not picture) for picture in pictures):
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
        args = self.trainer.args
        is_training = self.trainer.model.training
        size = args.per_device_train_batch_size if is_training else args.per_device_eval_batch_size
        with torch.no_grad(), self.dropping_out(False):
            scores = self.scores(self._prompts, ids, ends, batch_size=size).tolist()
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
        bare = self.model.bare
        before = [(module, module.training) for module in bare.modules()]
        bare.train(acts)
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
        prompt_ids, prompt_mask = _padded(prompts, pad, "left")
        # the score after a token is a critic's value of the next one
        completion_ids, completion_mask = _padded([[*tokens, pad] for tokens in completions], pad, "right")
        samples = {
            "prompt_ids": prompt_ids.to(device),
            "prompt_mask": prompt_mask.to(device),
            "completion_ids": completion_ids.to(device),
            "completion_mask": completion_mask.to(device),
        }
        with self.trainer.accelerator.autocast():
            values = self.trainer.values(self.model, samples, None, batch_size)
        token_indices, is_step = _padded(ends, 0, "right")
        return values.gather(1, token_indices.to(device)) * is_step.to(device)

    # checkpoints

    @contextlib.contextmanager
    def saving(self, folder: Path | None) -> Iterator[None]:
        """Save the policy without the reward model, and the reward model beside it in `reward`."""
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        is_shared = self.model is not None and self.model.adapter is not None
        with saved_without(model, REWARD_ADAPTER) if is_shared else contextlib.nullcontext():
            yield
        if self.model is not None and folder is not None and self.trainer.args.should_save:
            self.model.save_pretrained(folder / REWARD_ADAPTER)

    def save(self, checkpoint: Path) -> None:
        """Save the reward model, and what its training needs to go on."""
        if self.model is not None and self.trainer.args.should_save:
            REWARD_MODEL.save(checkpoint, self.model.state())
        if self.refresher is not None:
            self.refresher.save(checkpoint)

    def loading(self, checkpoint: Path) -> contextlib.AbstractContextManager[None]:
        """Refuse a checkpoint that this run cannot continue, before anything is loaded."""
        for file, is_expected, needed in (
            (REWARD_MODEL.name, self.model is not None, "RewardAdapter"),
            (STATE_FILE, self.refresher is not None, "RewardModelRefreshCallback"),
        ):
            if (checkpoint / file).is_file() != is_expected:
                differs = f"without {needed} or with save_only_model=True" if is_expected else f"with {needed}"
                raise ValueError(
                    f"{checkpoint} was written {differs} ({file}), and this run would go on otherwise. Build the "
                    "trainer as in that run, or begin a new run from its model."
                )
        if self.model is not None:
            self.model.check(REWARD_MODEL.shapes(checkpoint), str(checkpoint / REWARD_MODEL.name))
        if self.refresher is not None:
            self.refresher.check(checkpoint)
        return contextlib.nullcontext()

    def load(self, checkpoint: Path) -> None:
        """Restore what `save` has added. Raises ValueError as `loading` does."""
        self.loading(checkpoint)  # again, for a trainer that loads the policy in another way
        if self.model is not None:
            self.model.load(REWARD_MODEL.load(checkpoint)[0], str(checkpoint / REWARD_MODEL.name))
        if self.refresher is not None:
            self.refresher.load(checkpoint)

    def beginning(self) -> None:
        """Refuse a new reward model that nothing trains, and warn of one that is trained only later."""
        if not self.is_fresh:
            return
        if self.refresher is None:
            raise ValueError(
                "RewardAdapter() is new, its scores are all 0, and nothing trains it. Give it a source, or make a "
                "RewardModelRefreshCallback."
            )
        if self.trainer.state.global_step == 0 and self.trainer.accelerator.is_main_process:
            warnings.warn(
                "RewardAdapter() is new: all its scores are 0, and the policy learns nothing from them before the "
                "first refresh. Call the callback's fit(rows) before train().",
                UserWarning,
                stacklevel=2,
            )

    def ending(self, best: Path | None) -> None:
        """Restore the reward model that belongs to the best policy."""
        if self.model is None or self.refresher is None or best is None:
            return
        tensors = REWARD_MODEL.load_best(best)
        if tensors is not None:
            self.model.load(tensors, str(best))


def _padded(rows: Sequence[Sequence[int]], value: int, side: str) -> tuple[Tensor, Tensor]:
    """Return rows of numbers as a padded tensor, and its mask."""
    tensors = [torch.as_tensor(row, dtype=torch.long) for row in rows]
    masks = [torch.ones_like(row) for row in tensors]
    pad = functools.partial(pad_sequence, batch_first=True, padding_side=side)
    return pad(tensors, padding_value=value), pad(masks)
