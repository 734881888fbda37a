"""Wrappers that run a model on a padded batch without its padding, and return outputs for the padded batch."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from trl_steady.host.scoring import needs_places
from trl_steady.padding.families import Traits
from trl_steady.padding.packing import Segment, pack

__all__ = ["UnpaddedModel"]

_OF_TOKENS = ("token_type_ids", "mm_token_type_ids", "places")  # also (B, L)
_PACKED = {"input_ids", "attention_mask", "labels", "places"}
# other arguments that TRL passes for a batch that is text only
_WITH_TEXT = {"fused_lm_head", "output_router_logits"}


class UnpaddedModel:
    """Wrapper that leaves out padding, for a model with TRL's fused LM head and one pass over padded batches.

    Columns that are padding in every row are cut off at both ends. If padding is left and the model allows it, the
    sequences are packed into one row. A batch without padding goes to the model unchanged, unless prompts are shared.

    Args:
        model: The model to call, which may be wrapped for several processes.
        traits: Traits of the transformers model in it.
        prompt_width: Number of columns of the batches that belong to the prompts.
        share_prompts: True if rows with the same prompt share one copy of it.
        attending: Returns a context in which the model attends within the given segments.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        traits: Traits,
        *,
        prompt_width: int,
        share_prompts: bool,
        attending: Callable[[Sequence[Segment]], AbstractContextManager[None]],
    ) -> None:
        self._model, self._traits = model, traits
        self._prompt_width, self._share_prompts, self._attending = prompt_width, share_prompts, attending
        self.needs_places = needs_places(model)

    def __call__(self, *, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **others: Any) -> Any:
        """Return `log_probs` and `entropy`, (B, L - 1) each, and `aux_loss`, for inputs of shape (B, L)."""
        width = input_ids.size(1)
        used = attention_mask.any(0).nonzero().squeeze(-1).tolist()
        if width > self._traits.width_limit > 0:
            warnings.warn(
                f"batches wider than {self._traits.width_limit} tokens keep their padding, because the model's rotary "
                "frequencies then depend on the width of the batch.",
                UserWarning,
                stacklevel=2,
            )
        if not used or width > self._traits.width_limit:
            return self._model(input_ids=input_ids, attention_mask=attention_mask, labels=labels, **others)
        left = min(used[0], self._prompt_width - 1) if self._traits.is_shift_invariant else 0
        right = max(used[-1] + 1, self._prompt_width + 1)
        batch = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
        batch |= {name: others.pop(name) for name in _OF_TOKENS if name in others}
        batch = {name: values[:, left:right] for name, values in batch.items()}
        if self._packs(batch, others, self._prompt_width - left):
            outputs = self._packed(batch, others, self._prompt_width - left, left)
        else:
            outputs = self._model(**batch, **others)
        return _mapped(outputs, lambda values: pad(values, (left, width - right)))

    def _packs(self, batch: dict[str, Tensor], others: dict[str, Any], prompt_width: int) -> bool:
        mask = batch["attention_mask"]
        if self._traits.why_not_packed or not batch.keys() <= _PACKED or not others.keys() <= _WITH_TEXT:
            return False
        if not mask[:, prompt_width - 1].all():  # no token predicts the first token after an empty prompt
            return False
        return self._share_prompts or not mask.all()

    def _packed(self, batch: dict[str, Tensor], others: dict[str, Any], prompt_width: int, left: int) -> Any:
        input_ids, labels = batch["input_ids"], batch["labels"]
        packing = pack(
            batch["attention_mask"],
            prompt_width=prompt_width,
            input_ids=input_ids if self._share_prompts else None,
        )
        if "places" in batch:
            others = {**others, "places": packing.gather(batch["places"])}
        with self._attending(packing.segments):
            outputs = self._model(
                input_ids=packing.gather(input_ids),
                attention_mask=None,
                position_ids=packing.columns.unsqueeze(0) + left,  # as in the padded batch
                labels=packing.gather(labels),
                **others,
            )
        shape = len(labels), labels.size(1) - 1
        return _mapped(outputs, lambda values: packing.scatter_predictions(values, shape))


def _mapped(outputs: Any, change: Callable[[Tensor], Tensor]) -> SimpleNamespace:
    """Return outputs of a model with changed values of tokens, also those that a proxy has added as `extras`."""
    return SimpleNamespace(
        log_probs=None if outputs.log_probs is None else change(outputs.log_probs),
        entropy=None if outputs.entropy is None else change(outputs.entropy),
        aux_loss=outputs.aux_loss,
        extras={name: change(values) for name, values in getattr(outputs, "extras", {}).items()},
    )
