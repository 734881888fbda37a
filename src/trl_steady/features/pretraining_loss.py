"""InstructGPT's pretraining loss: a language-model loss on other text, in each optimizer step."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trl_steady.config.ppo import PPOConfig
from trl_steady.core.devices import copy_async
from trl_steady.core.feature import Feature
from trl_steady.core.types import LossPass
from trl_steady.trl_bridge import models


class PretrainingLoss(Feature):
    """Adds `ptx_coef` times the language-model loss on examples of `ptx_dataset` to the policy's loss.

    Each micro-batch takes as many examples as it has completions. Their loss is the mean over the tokens of all
    examples of the optimizer step, over all processes. Each pass over the dataset has an order of its own, drawn from
    the seed of the run, so that a resume goes on with the same examples.

    Source: InstructGPT (arXiv 2203.02155), equation 2.
    """

    args: PPOConfig
    _order: tuple[tuple[int, int], Tensor] | None = None
    """The last order of the dataset, and its seed and length: one permutation for each pass, not for each example."""

    def on_init_end(self) -> None:
        """Refuse a dataset that is missing or would be ignored."""
        self._examples: list[Tensor] = []  # token ids that the optimizer step has not used yet
        coef = self.args.ptx_coef
        if (self.trainer.ptx_dataset is None) != (coef == 0):
            raise ValueError(
                f"ptx_coef={coef} and ptx_dataset need each other. Give both (InstructGPT uses 27.8), or neither."
            )

    def on_step_begin(self) -> None:
        """Draw the examples of an optimizer step."""
        trainer, dataset = self.trainer, self.trainer.ptx_dataset
        if dataset is None:
            return
        self._examples = [self._token_ids(dataset[index]) for index in self._indices(dataset)]
        predicted = float(sum(max(len(ids) - 1, 0) for ids in self._examples))
        own_count = torch.full((), predicted, device=trainer.accelerator.device)
        total = trainer.accelerator.reduce(own_count, reduction="sum")
        self._token_count = cast(Tensor, total).clamp(min=1)

    def _indices(self, dataset: Dataset) -> Iterable[int]:
        """Yield the indices of this process's examples of the optimizer step."""
        trainer, args = self.trainer, self.args
        number = trainer.state.global_step * args.world_size + trainer.accelerator.process_index
        first = number * args.per_device_train_batch_size * args.gradient_accumulation_steps
        # the last window of an epoch can be shorter than gradient_accumulation_steps
        count = args.per_device_train_batch_size * trainer.current_gradient_accumulation_steps
        for position in range(first, first + count):
            epoch, index = divmod(position, len(dataset))
            yield int(self._order_of(args.seed + epoch, len(dataset))[index])

    def _order_of(self, seed: int, length: int) -> Tensor:
        """Return the order of one pass over the dataset."""
        if self._order is None or self._order[0] != (seed, length):
            order = torch.randperm(length, generator=torch.Generator().manual_seed(seed))
            self._order = (seed, length), order
        return self._order[1]

    def _token_ids(self, example: Mapping[str, Any]) -> Tensor:
        tokenizer: Any = models.text_tokenizer(self.trainer)
        config = models.bare(self.trainer, self.trainer.model).config.get_text_config()
        if example.get("messages") is not None:
            ids = tokenizer.apply_chat_template(example["messages"], tokenize=True, return_dict=False)
        else:
            ids = [*tokenizer(example["text"]).input_ids, tokenizer.eos_token_id]
        limit = getattr(config, "max_position_embeddings", None)
        return torch.tensor(ids[:limit], dtype=torch.long)

    def around_loss(self, loss: LossPass, call_next: Callable[[LossPass], Tensor]) -> Tensor:
        """Return the policy's loss plus that of the next examples."""
        coef = self.args.ptx_coef
        if coef == 0 or not self.trainer.model.training:
            return call_next(loss)
        # before the policy's pass, whose routes are replayed until backward ends
        pretraining_loss = self._loss(loss.model, len(loss.inputs["completion_ids"]))
        return coef * pretraining_loss + call_next(loss)

    def _loss(self, model: torch.nn.Module, count: int) -> Tensor:
        trainer = self.trainer
        device = trainer.accelerator.device
        examples = self._examples[:count]
        self._examples = self._examples[count:]
        masks = [torch.ones_like(tokens) for tokens in examples]
        ids = copy_async(pad_sequence(examples, batch_first=True), device)
        mask = copy_async(pad_sequence(masks, batch_first=True), device)
        labels = ids.masked_fill(mask == 0, -100)
        outputs = model(input_ids=ids, attention_mask=mask, labels=labels, num_items_in_batch=self._token_count)
        total = outputs.loss.detach() * self._token_count
        count_in_batch = mask[:, 1:].sum().to(total.dtype)
        trainer.metrics.pooled(sums={"ptx_loss": torch.stack([total, count_in_batch])})
        # gradients are averaged over processes, and the loss is a mean over the tokens of all
        return outputs.loss * trainer.accelerator.num_processes
