"""Wrapper that runs a model without the padding of a batch, and returns outputs for the padded batch."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass
from types import SimpleNamespace
from typing import Any, cast

from torch import Tensor
from torch.nn.functional import pad

from trl_steady.features.padding_free.packing import Length, Segment, longest, pack
from trl_steady.features.padding_free.support import Support
from trl_steady.trl_bridge.log_probs import KNOWN_INPUTS

_TOKEN_INPUTS = ("token_type_ids", "mm_token_type_ids", "token_indices")  # also (B, L)
_PACKED = {"input_ids", "attention_mask", "labels", "token_indices"}
_WITH_TEXT = {"fused_lm_head", "output_router_logits"}  # other arguments of TRL for a batch that is text only


@dataclass(eq=False)
class PaddingFreeModel:
    """Wrapper that leaves out padding, for a model with TRL's fused LM head and one pass over padded batches.

    Columns that are padding in every row are cut off at both ends. If padding is left and the model allows it, the
    sequences are packed into one row. A batch without padding goes to the model unchanged, unless prompts are shared.
    """

    model: Callable[..., Any]  # may be wrapped for several processes
    support: Support  # of the transformers model in it
    _: KW_ONLY
    prompt_width: int  # number of columns of the batches that belong to the prompts
    lengths: Iterator[Length]  # of all sequences that will come, in order
    attend_within: Callable[[Sequence[Segment]], AbstractContextManager[None]]
    """Returns a context in which the model attends within the given segments."""

    def __call__(self, *, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **others: object) -> object:
        """Return `log_probs` and `entropy`, (B, L - 1) each, and `aux_loss`, for inputs of shape (B, L)."""
        width = input_ids.size(1)
        lengths = list(itertools.islice(self.lengths, len(input_ids)))
        batch = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
        # a later TRL may give more for each column, such as kept sets
        unknown = others.keys() - {*_TOKEN_INPUTS, *_WITH_TEXT, *KNOWN_INPUTS}
        if width > self.support.width_limit or unknown:
            return self.model(**batch, **others)
        longest_prompt, longest_completion = longest(lengths)
        left = 0
        if self.support.is_shift_invariant:
            left = self.prompt_width - max(longest_prompt, 1)
        right = self.prompt_width + max(longest_completion, 1)
        for name in _TOKEN_INPUTS:
            if name in others:
                batch[name] = cast(Tensor, others.pop(name))
        batch = {name: values[:, left:right] for name, values in batch.items()}
        if self._packs(batch, others, lengths, left):
            outputs = self._packed(batch, others, lengths, left)
        else:
            outputs = self.model(**batch, **others)
        return _mapped(outputs, lambda values: pad(values, (left, width - right)))

    def _packs(
        self, batch: dict[str, Tensor], others: dict[str, object], lengths: Sequence[Length], left: int
    ) -> bool:
        if self.support.why_not_packed or not batch.keys() <= _PACKED or not others.keys() <= _WITH_TEXT:
            return False
        prompt_width = self.prompt_width - left
        full = (prompt_width, batch["labels"].size(1) - prompt_width)
        has_padding = has_groups = False
        for length in lengths:
            if not length.prompt:  # no token predicts the first token after an empty prompt
                return False
            has_padding |= (length.prompt, length.completion) != full
            has_groups |= length.group >= 0
        return has_padding or has_groups

    def _packed(
        self, batch: dict[str, Tensor], others: dict[str, object], lengths: Sequence[Length], left: int
    ) -> SimpleNamespace:
        input_ids = batch["input_ids"]
        labels = batch["labels"]
        packing = pack(lengths, prompt_width=self.prompt_width - left, device=input_ids.device)
        if "token_indices" in batch:
            others = {**others, "token_indices": packing.gather(batch["token_indices"])}
        with self.attend_within(packing.segments):
            outputs = self.model(
                input_ids=packing.gather(input_ids),
                attention_mask=None,
                position_ids=packing.columns.unsqueeze(0) + left,  # as in the padded batch
                labels=packing.gather(labels),
                **others,
            )
        shape = len(labels), labels.size(1) - 1
        return _mapped(outputs, lambda values: packing.scatter_predictions(values, shape))


def _mapped(outputs: Any, change: Callable[[Tensor], Tensor]) -> SimpleNamespace:
    """Return outputs of a model with changed values of tokens."""
    log_probs = change(outputs.log_probs)
    entropy = outputs.entropy
    if entropy is not None:
        entropy = change(entropy)
    return SimpleNamespace(log_probs=log_probs, entropy=entropy, aux_loss=outputs.aux_loss)
