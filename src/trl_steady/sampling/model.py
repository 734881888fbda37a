"""What stands in for a model while its log-probs are those among the kept tokens."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from trl_steady.sampling.head import kept_log_probs
from trl_steady.sampling.kept import KeptTokens

__all__ = ["KeptModel"]

_Answer = Callable[[Any], tuple[Tensor, Any, Any, Any, Any]]


class KeptModel:
    """A model with TRL's fused LM head, which scores each token among those that were kept when it was sampled.

    Args:
        model: What is called, with `places`, and answers with `log_probs`.
        kept: Sets of some positions.
        index: (B, L) of the whole batch, which set each token was sampled from; -1 for none, whose log-prob is that
            of the model as it is.
        scored_by: Context in which something else answers for the model's head.
        with_entropy: Whether the entropy is asked for, which is that of the whole vocabulary. Without it the
            vocabulary is left out where all tokens have sets.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        kept: KeptTokens,
        index: Tensor,
        scored_by: Callable[[_Answer], AbstractContextManager[None]],
        *,
        with_entropy: bool,
    ) -> None:
        self._model, self._kept, self._index, self._scored_by = model, kept, index.flatten(), scored_by
        self._with_entropy = with_entropy
        self.kept_mass = torch.zeros(2, dtype=torch.float64)
        """Of the parts so far: the sum of the model's probabilities on the sets, and their number. With entropy."""

    def __call__(self, *, places: Tensor, labels: Tensor, **batch: Any) -> Any:
        """What the model answers; `places` are the indices of its tokens in the flattened batch."""
        index = self._index[places][:, 1:]
        has_label = labels[:, 1:] != -100

        def answer(head: Any) -> tuple[Tensor, Any, Any, Any, Any]:
            is_all = len(head.targets) == has_label.numel()
            own = index.where(has_label, -1).flatten() if is_all else index[has_label]
            is_asked = has_label.flatten() if is_all else torch.ones_like(own, dtype=torch.bool)
            device = head.hidden.device  # of a model in parts, the last one's
            return self._score(head, self._kept.take(own).to(device), is_asked.to(device))

        with self._scored_by(answer):
            return self._model(places=places, labels=labels, **batch)

    def _score(self, head: Any, kept: KeptTokens, is_asked: Tensor) -> tuple[Tensor, Any, Any, Any, Any]:
        has_set = kept.counts > 0
        if not has_set.any():
            return head.own()
        log_probs = kept_log_probs(
            head.hidden,
            head.weight,
            head.bias,
            head.targets,
            kept,
            temperature=head.temperature,
            logit_scale=head.logit_scale,
            softcap=head.softcap,
        )
        is_left = is_asked & ~has_set
        if not self._with_entropy and not is_left.any():
            return log_probs, None, None, None, None
        whole, *others = head.own()
        if self._with_entropy:
            masses = (whole.detach() - log_probs.detach())[has_set].double().exp()
            self.kept_mass += torch.stack([masses.sum(), has_set.sum()]).cpu()
        return (log_probs.where(has_set, whole) if is_left.any() else log_probs, *others)
