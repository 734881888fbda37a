"""InstructGPT's pretraining loss as a part: a language-model loss on other text, in each optimizer step."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trl_steady.features.critic.trainer import PPO
from trl_steady.features.legacy import Part
from trl_steady.trl_bridge import models


class PretrainingPart(Part):
    """Adds `ptx_coef` times the language-model loss on examples of `ptx_dataset` to the policy's loss.

    Each micro-batch takes as many examples as it has completions. Their loss is the mean over the tokens of all
    examples of the optimizer step, over all processes. Each pass over the dataset has an order of its own, drawn from
    the seed of the run, so that a resume goes on with the same examples.
    """

    trainer: PPO

    def built(self) -> None:
        """Refuse a dataset that is missing or would be ignored."""
        dataset, coef = self.trainer.ptx_dataset, self.trainer.args.ptx_coef
        self._of_step: list[Tensor] = []  # token ids of examples that the optimizer step has not used yet
        if (dataset is None) != (coef == 0):
            raise ValueError(
                f"ptx_coef={coef} and ptx_dataset need each other. Give both (InstructGPT uses 27.8), or neither."
            )

    def computing(
        self, model: torch.nn.Module, compute: Callable[[Mapping[str, Any]], Tensor], inputs: Mapping[str, Any]
    ) -> Tensor:
        """Return the policy's loss plus that of the next examples."""
        coef = self.trainer.args.ptx_coef
        if coef == 0 or not self.trainer.model.training:
            return compute(inputs)
        # before the policy's pass, whose routes are replayed until backward ends
        return coef * self._loss(model, len(inputs["completion_ids"])) + compute(inputs)

    def stepping(self) -> None:
        """Draw the examples of an optimizer step."""
        trainer, args, dataset = self.trainer, self.trainer.args, self.trainer.ptx_dataset
        self._of_step = []
        if dataset is None:
            return
        before = trainer.state.global_step * args.world_size + trainer.accelerator.process_index
        first = before * args.per_device_train_batch_size * args.gradient_accumulation_steps
        # the last window of an epoch can be shorter than gradient_accumulation_steps
        count = args.per_device_train_batch_size * trainer.current_gradient_accumulation_steps
        for position in range(first, first + count):
            epoch, index = divmod(position, len(dataset))
            order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(args.seed + epoch))
            self._of_step.append(self._ids(dataset[int(order[index])]))
        device = trainer.accelerator.device
        tokens = torch.tensor(float(sum(max(len(ids) - 1, 0) for ids in self._of_step)), device=device)
        self._tokens = cast(Tensor, trainer.accelerator.reduce(tokens, reduction="sum")).clamp(min=1)

    def _ids(self, example: Mapping[str, Any]) -> Tensor:
        tokenizer: Any = models.text_tokenizer(self.trainer)
        config = models.bare(self.trainer, self.trainer.model).config.get_text_config()
        if example.get("messages") is not None:
            ids = tokenizer.apply_chat_template(example["messages"], tokenize=True, return_dict=False)
        else:
            ids = [*tokenizer(example["text"]).input_ids, tokenizer.eos_token_id]
        limit = getattr(config, "max_position_embeddings", None)
        return torch.tensor(ids[:limit], dtype=torch.long, device=self.trainer.accelerator.device)

    def _loss(self, model: torch.nn.Module, count: int) -> Tensor:
        trainer = self.trainer
        examples, self._of_step = self._of_step[:count], self._of_step[count:]
        ids = pad_sequence(examples, batch_first=True)
        mask = pad_sequence([torch.ones_like(row) for row in examples], batch_first=True)
        labels = ids.masked_fill(mask == 0, -100)
        outputs = model(input_ids=ids, attention_mask=mask, labels=labels, num_items_in_batch=self._tokens)
        total = outputs.loss.detach() * self._tokens
        trainer.metrics.pooled(sums={"ptx_loss": torch.stack([total, mask[:, 1:].sum().to(total.dtype)])})
        # gradients are averaged over processes, and the loss is a mean over the tokens of all
        return outputs.loss * trainer.accelerator.num_processes
