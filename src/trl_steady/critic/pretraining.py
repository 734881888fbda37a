"""InstructGPT's pretraining loss as a part: a language-model loss on other text, in each optimizer step."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import TrainerCallback

from trl_steady.host import models
from trl_steady.host.part import Part

__all__ = ["PretrainingPart"]


class PretrainingPart(Part):
    """Adds `ptx_coef` times the language-model loss on examples of `ptx_dataset` to the policy's loss.

    Each micro-batch takes as many examples as it has completions. Their loss is the mean over the tokens of all
    examples of the optimizer step, over all processes. Each pass over the dataset has an order of its own, drawn from
    the seed of the run, so that a resume goes on with the same examples.
    """

    _of_step: list[list[int]]
    """Token ids of the examples that the optimizer step has not used yet."""

    def built(self) -> None:
        """Refuse a dataset that is missing, would be ignored or has no text."""
        trainer, dataset = self.trainer, self.trainer.ptx_dataset
        coef = trainer.args.ptx_coef
        self._of_step = []
        if coef == 0:
            if dataset is not None:
                raise ValueError("ptx_dataset would be ignored: ptx_coef=0. Set ptx_coef (InstructGPT uses 27.8).")
            return
        if not isinstance(dataset, Dataset) or not len(dataset):
            raise ValueError(
                f"ptx_coef={coef} needs ptx_dataset, a datasets.Dataset with rows, and got {type(dataset).__name__}. "
                "Pass ptx_dataset to the trainer, or set ptx_coef=0."
            )
        if not {"text", "messages"} & {*dataset.column_names}:
            raise ValueError(
                f"ptx_dataset has the columns {', '.join(dataset.column_names)}, and neither 'text' nor 'messages'. "
                "Rename the column that holds the text: dataset.rename_column(..., 'text')."
            )
        trainer.add_callback(_AtStepBegin(self))

    def computing(
        self, model: torch.nn.Module, compute: Callable[[Mapping[str, Any]], Tensor], inputs: Mapping[str, Any]
    ) -> Tensor:
        """Return the policy's loss plus that of the next examples."""
        coef = self.trainer.args.ptx_coef
        if coef == 0 or not self.trainer.model.training:
            return compute(inputs)
        # before the policy's pass, whose routes are replayed until backward ends
        own = coef * self._loss(model, len(inputs["completion_ids"]))
        return own + compute(inputs)

    def begin_step(self) -> None:
        """Draw the examples of an optimizer step."""
        trainer, args = self.trainer, self.trainer.args
        before = trainer.state.global_step * args.world_size + trainer.accelerator.process_index
        first = before * args.per_device_train_batch_size * args.gradient_accumulation_steps
        # the last window of an epoch can be shorter than gradient_accumulation_steps
        count = args.per_device_train_batch_size * trainer.current_gradient_accumulation_steps
        dataset = trainer.ptx_dataset
        self._of_step = []
        for position in range(first, first + count):
            epoch, place = divmod(position, len(dataset))
            order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(args.seed + epoch))
            self._of_step.append(self._ids(dataset[int(order[place])]))
        own = torch.tensor(
            float(sum(max(len(ids) - 1, 0) for ids in self._of_step)), device=trainer.accelerator.device
        )
        self._tokens = trainer.accelerator.reduce(own, reduction="sum").clamp(min=1)

    def _ids(self, example: Mapping[str, Any]) -> list[int]:
        tokenizer: Any = models.text_tokenizer(self.trainer)
        config = models.bare(self.trainer, self.trainer.model).config.get_text_config()
        limit = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)
        if example.get("messages") is not None:
            ids = tokenizer.apply_chat_template(example["messages"], tokenize=True, return_dict=False)
        else:
            ids = [*tokenizer(example["text"]).input_ids, tokenizer.eos_token_id]
        return ids[:limit]

    def _loss(self, model: torch.nn.Module, count: int) -> Tensor:
        trainer = self.trainer
        examples, self._of_step = self._of_step[:count], self._of_step[count:]
        device, width = trainer.accelerator.device, max(map(len, examples))
        ids = torch.tensor([[*own, *[0] * (width - len(own))] for own in examples], device=device)
        mask = torch.tensor([[1] * len(own) + [0] * (width - len(own)) for own in examples], device=device)
        labels = ids.masked_fill(mask == 0, -100)
        outputs: Any = model(input_ids=ids, attention_mask=mask, labels=labels, num_items_in_batch=self._tokens)
        total = outputs.loss.detach() * self._tokens
        trainer.metrics.pooled(sums={"ptx_loss": torch.stack([total, mask[:, 1:].sum().to(total.dtype)])})
        # gradients are averaged over processes, and the loss is a mean over the tokens of all
        return outputs.loss * trainer.accelerator.num_processes


class _AtStepBegin(TrainerCallback):
    def __init__(self, part: PretrainingPart) -> None:
        self._part = part

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._part.begin_step()
