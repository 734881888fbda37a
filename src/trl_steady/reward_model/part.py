"""The reward model as a part: it is made, scores rollouts, and is saved and restored."""

import contextlib
import functools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate.utils import broadcast
from peft import LoraConfig, PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import TrainerCallback

from trl_steady.critic.model import Critic, add_value_adapter, copied_from, loaded, own_critic, trusts, without_dropout
from trl_steady.host.models import REWARD_ADAPTER, is_of_lora, text_tokenizer
from trl_steady.host.part import Part, Rollout
from trl_steady.host.rollouts import noting_prompts
from trl_steady.host.saving import saved_without
from trl_steady.reward_model.adapter import RewardAdapter
from trl_steady.rewards.placement import Completion, token_ends
from trl_steady.rewards.splitters import Steps

if TYPE_CHECKING:
    from trl_steady.reward_model.callback import RewardModelRefreshCallback

__all__ = ["REWARD_FILE", "STATE_FILE", "RewardModelPart"]

REWARD_FILE = "reward_model.safetensors"
"""File of a checkpoint that holds the reward model's tensors."""
STATE_FILE = "reward_refresh.pt"
"""File of a checkpoint that holds what `RewardModelRefreshCallback` needs to go on."""


class RewardModelPart(Part):
    """Scores rollouts with the `RewardAdapter` in `reward_funcs`, if there is one."""

    model: Critic | None = None
    """Scores texts as a critic does; None without a `RewardAdapter`."""
    refresher: "RewardModelRefreshCallback | None" = None
    """Trains the reward model; None if it does not change."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self._prompts: list[list[int]] = []

    # construction

    def built(self) -> None:
        """Make the reward model.

        Raises:
            ValueError: There are two, or the reward model cannot be made or would not act as asked.
        """
        found = [function for function in self.trainer.reward_funcs if isinstance(function, RewardAdapter)]
        if not found:
            return
        if len(found) > 1:
            raise ValueError(
                f"reward_funcs has {len(found)} RewardAdapters, and the policy's base has one adapter named "
                f"{REWARD_ADAPTER!r}. Give one of them."
            )
        (self.adapter,) = found
        if self.adapter.part is not None:
            raise ValueError("this RewardAdapter belongs to another trainer. Make a RewardAdapter for each trainer.")
        trainer = self.trainer
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            engine = "FSDP" if trainer.is_fsdp_enabled else "DeepSpeed"
            raise ValueError(
                f"RewardAdapter does not work with {engine}, which would shard it without training it. Use DDP "
                "(accelerate launch --multi_gpu), or a reward model of its own in reward_funcs."
            )
        self.model = self._made()
        self.adapter.part = self  # now that nothing can fail, so that a second attempt may use the adapter
        for _, parameter in self.model.named_parameters():
            parameter.data = broadcast(parameter.data)  # pyright: ignore[reportAttributeAccessIssue]
            parameter.requires_grad_(False)  # so that neither the policy's optimizer nor DDP takes it
        trainer.add_callback(_Ends(self))

    def _made(self) -> Critic:
        policy = self.trainer.accelerator.unwrap_model(self.trainer.model)
        source, config = self.adapter.source, self.adapter.peft_config
        if isinstance(policy, PeftModel):
            if source is not None:
                config = LoraConfig.from_pretrained(str(source))
                if not isinstance(config, LoraConfig):
                    raise ValueError(f"RewardAdapter({str(source)!r}) is not LoRA. Give the folder of a LoRA adapter.")
            model = add_value_adapter(policy, config, REWARD_ADAPTER)
            if source is not None:
                model.load_pretrained(Path(source), f"RewardAdapter({str(source)!r})")
            for name, module in policy.named_modules():
                if isinstance(module, torch.nn.Dropout) and is_of_lora(name, REWARD_ADAPTER):
                    module.p = 0.0  # as in TRL's RewardTrainer
            policy.peft_config[REWARD_ADAPTER].lora_dropout = 0.0  # pyright: ignore[reportAttributeAccessIssue]
            return model
        if config is not None:
            raise ValueError(
                "peft_config of RewardAdapter: the policy has no adapter, so its reward model is a model of its own. "
                "Give the trainer a peft_config too, or leave it unset."
            )
        if source is None:
            whole = copied_from(policy, "RewardAdapter a source", trusted=trusts(self.trainer.args))
        elif (Path(source) / "adapter_config.json").is_file():
            raise ValueError(
                f"RewardAdapter({str(source)!r}) is an adapter, and the policy has none. Train the policy with "
                "peft_config, or merge the reward model's adapter into its base and save it."
            )
        else:
            name = f"RewardAdapter({str(source)!r})"
            whole = loaded(source, policy, name, "RewardAdapter()", trusted=trusts(self.trainer.args))
        model, args = own_critic(whole.eval(), f"RewardAdapter({str(source)!r})"), self.trainer.args
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
        self, prompts: Sequence[Any], completions: Sequence[Any], ids: Sequence[list[int]], columns: Mapping[str, Any]
    ) -> list[Any]:
        """Return what the reward model returns as a reward function of TRL."""
        # rows with text alone have None or []; an image may have no truth value
        images = [
            name
            for name in ("image", "images")
            if any(own is not None and not (isinstance(own, list) and not own) for own in columns.get(name) or ())
        ]
        if images:
            raise ValueError(
                f"RewardAdapter reads text only, and the dataset has {images[0]!r}. Use a reward model of its own in "
                "reward_funcs."
            )
        if len(self._prompts) != len(ids):
            raise ValueError(
                f"RewardAdapter got {len(ids)} completions, and this rollout has {len(self._prompts)}. Return one "
                "completion for each prompt of the trainer's rollout."
            )
        steps = [
            self._steps(number, content, own)
            for number, (content, own) in enumerate(zip(completions, ids, strict=True))
        ]
        ends = [[self._length(own)] if of is None else of[1] for of, own in zip(steps, ids, strict=True)]
        training = self.trainer.model.training
        size = self.trainer.args.per_device_train_batch_size
        size = size if training else self.trainer.args.per_device_eval_batch_size
        with torch.no_grad(), self.dropping_out(False):
            scores = self.scores(self._prompts, ids, ends, batch_size=size)
        found = [row.tolist() for row in scores.cpu()]
        if self.refresher is not None:
            self.refresher.collect(prompts, completions, self._prompts, ids, ends, columns)
        if self.adapter.head == "outcome":
            return [row[0] for row in found]
        return [of[0].rewards(row[: len(own)]) for of, own, row in zip(steps, ends, found, strict=True) if of]

    def _length(self, ids: list[int]) -> int:
        """Return the number of tokens up to the last that is no padding, whose score transformers takes.

        An end of sequence that is also the padding token counts as padding there.
        """
        pad = text_tokenizer(self.trainer).pad_token_id
        return next((n for n in range(len(ids), 0, -1) if ids[n - 1] != pad), 0)

    def _steps(self, number: int, content: Any, ids: list[int]) -> tuple[Steps, list[int]] | None:
        """Return the steps of a completion, and how many tokens there are before the end of each."""
        if self.adapter.head == "outcome":
            return None
        steps = self.adapter.splitter(content)
        if steps.ends is None:
            raise ValueError(
                "RewardAdapter(head='steps') cannot score turns, whose tokens are known only after the rewards. Set "
                "splitter to by_blank_line() or by_regex(...)."
            )
        placed = steps.rewards([0.0] * len(steps.texts))
        completion = Completion(number, content, ids, [True] * len(ids), "")
        return steps, token_ends(placed, completion, text_tokenizer(self.trainer))

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

        Args:
            prompts: N prompts as token ids.
            completions: N completions as token ids.
            ends: For each completion, numbers of its tokens: the score is read after so many.
            batch_size: Texts that go through the model together; None for all.
        """
        assert self.model is not None
        device, pad = self.trainer.accelerator.device, cast(int, text_tokenizer(self.trainer).pad_token_id)
        # the score after a token is a critic's value of the next one
        longer = [[*own, pad] for own in completions]
        prompt_ids, prompt_mask = _padded(prompts, pad, "left")
        completion_ids, completion_mask = _padded(longer, pad, "right")
        names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
        columns = (prompt_ids, prompt_mask, completion_ids, completion_mask)
        samples = {name: column.to(device) for name, column in zip(names, columns, strict=True)}
        with self.trainer.accelerator.autocast():
            values = self.trainer.values(self.model, samples, None, batch_size)
        places, is_step = _padded(ends, 0, "right")
        return values.gather(1, places.to(device)) * is_step.to(device)

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
        if self.model is None:
            return
        if self.trainer.args.should_save:
            save_file(self.model.state(), checkpoint / REWARD_FILE)
        if self.refresher is not None:
            self.refresher.save(checkpoint)

    def loading(self, checkpoint: Path) -> contextlib.AbstractContextManager[None]:
        """Refuse a checkpoint without this reward model, before anything is loaded."""
        self._check(checkpoint)
        return contextlib.nullcontext()

    def _check(self, checkpoint: Path) -> None:
        """Refuse a checkpoint that this run cannot continue."""
        file = checkpoint / REWARD_FILE
        if self.model is None:
            if file.is_file():
                raise ValueError(
                    f"{checkpoint} holds a reward model ({REWARD_FILE}), and reward_funcs has no RewardAdapter. Build "
                    "the trainer as in the run that wrote it."
                )
            return
        if not file.is_file():
            raise ValueError(
                f"{checkpoint} holds no {REWARD_FILE}: it was written without a RewardAdapter, or with "
                "save_only_model=True, and a resume would begin with another reward model. Begin a new run from its "
                "model."
            )
        with safe_open(file, framework="pt") as opened:
            names = list(opened.keys())
            self.model.check({name: opened.get_slice(name).get_shape() for name in names}, str(file))
        if self.refresher is not None:
            self.refresher.check(checkpoint)
        elif (checkpoint / STATE_FILE).is_file():
            raise ValueError(
                f"{checkpoint} holds a reward model that learns ({STATE_FILE}), and in this run nothing trains it. "
                "Add a RewardModelRefreshCallback, as in the run that wrote it."
            )

    def load(self, checkpoint: Path) -> None:
        """Restore what `save` has added.

        Raises:
            ValueError: The checkpoint has no reward model, or another one.
        """
        self._check(checkpoint)
        if self.model is not None:
            self.model.load(load_file(checkpoint / REWARD_FILE), str(checkpoint / REWARD_FILE))
        if self.refresher is not None:
            self.refresher.load(checkpoint)


class _Ends(TrainerCallback):
    """Refuses to begin with a reward model that never learns, and ends with the one of the best policy."""

    def __init__(self, part: RewardModelPart) -> None:
        self._part = part

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        part, refresher = self._part, self._part.refresher
        if refresher is not None and refresher not in part.trainer.callback_handler.callbacks:
            raise ValueError(
                "RewardModelRefreshCallback was made, and is not among the trainer's callbacks. Add it with "
                "trainer.add_callback(...)."
            )
        if refresher is not None and part.is_fresh and state.global_step == 0 and args.process_index == 0:
            warnings.warn(
                "RewardAdapter() is new: all its scores are 0, and the policy learns nothing from them before the "
                "first refresh. Call the callback's fit(rows) before train().",
                UserWarning,
                stacklevel=2,
            )
        if refresher is None and part.is_fresh:
            raise ValueError(
                "RewardAdapter() is new, its scores are all 0, and nothing trains it. Give it a source, or add a "
                "RewardModelRefreshCallback."
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        part, best = self._part, state.best_model_checkpoint
        if part.model is None or part.refresher is None or not args.load_best_model_at_end or best is None:
            return
        file = Path(best) / REWARD_FILE
        if file.is_file():
            part.model.load(load_file(file), str(file))
            return
        warnings.warn(
            f"load_best_model_at_end=True has loaded the policy of {best}, which has no reward model. The trainer "
            "keeps the last one. Set save_only_model=False to save it too.",
            UserWarning,
            stacklevel=2,
        )


def _padded(rows: Sequence[Sequence[int]], value: int, side: str) -> tuple[Tensor, Tensor]:
    """Return rows of numbers as a padded tensor, and its mask."""
    tensors = [torch.as_tensor(row, dtype=torch.long) for row in rows]
    masks = [torch.ones_like(row) for row in tensors]
    how: dict[str, Any] = {"batch_first": True, "padding_side": side}
    return pad_sequence(tensors, padding_value=value, **how), pad_sequence(masks, **how)
