"""Wrapper that makes a model return log-probs among the kept tokens."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from trl_steady.features.sampling_mask.candidates import CandidateSets
from trl_steady.features.sampling_mask.log_probs import kept_log_probs
from trl_steady.trl_bridge.lm_head import Head, Scores, scored_by


@dataclass(eq=False)
class KeptModel:
    """Wrapper that scores each token among those kept when it was sampled, for a model with TRL's fused LM head."""

    needs_token_indices: ClassVar = True
    model: Callable[..., object]  # takes `token_indices`, returns `log_probs`
    kept: CandidateSets  # of some positions
    index: Tensor
    """(B, L) number of the set that each token was sampled from. A token with -1 keeps the log-prob of the model."""
    with_entropy: bool
    """True to compute the entropy of the whole vocabulary. Otherwise, TRL's head runs only if a token has no set."""
    kept_mass: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.float64), init=False)
    """(2,) sum of the model's probabilities on the sets so far, and number of sets. Needs `with_entropy`."""

    def __call__(self, *, token_indices: Tensor, labels: Tensor, **batch: object) -> object:
        """Return the model's outputs. `token_indices` index the flattened batch."""
        has_label = labels[:, 1:] != -100
        index = self.index.flatten()[token_indices][:, 1:].where(has_label, -1).flatten()
        is_needed = has_label.flatten()

        def score_head(head: Head) -> Scores:
            is_compact = len(head.targets) < len(index)
            at = is_needed.nonzero().squeeze(1) if is_compact else slice(None)
            device = head.hidden.device  # the last one, if the model is split over devices
            return self._score(head, self.kept.take(index[at]).to(device), is_needed[at].to(device))

        with scored_by(score_head):
            return self.model(token_indices=token_indices, labels=labels, **batch)

    def _score(self, head: Head, kept: CandidateSets, is_needed: Tensor) -> Scores:
        has_set = kept.counts > 0
        if not has_set.any():
            return head.trl_scores()
        log_probs = kept_log_probs(head, kept)
        is_left = is_needed & ~has_set
        if not self.with_entropy and not is_left.any():
            return log_probs, None, None, None, None
        scores = head.trl_scores()
        whole = scores[0]
        if self.with_entropy:
            masses = (whole.detach() - log_probs.detach())[has_set].double().exp()
            self.kept_mass = self.kept_mass.to(masses.device) + torch.stack([masses.sum(), has_set.sum()])
        return (log_probs.where(has_set, whole) if is_left.any() else log_probs, *scores[1:])
