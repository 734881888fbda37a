"""Wrapper that makes a model return log-probs among the candidates."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trl_steady.core.types import ModelCall
from trl_steady.features.sampling_mask.candidates import CandidateSets
from trl_steady.features.sampling_mask.log_probs import candidate_log_probs
from trl_steady.trl_bridge.lm_head import Head, HeadOutputs, replace_head


@dataclass(eq=False)
class SamplingMaskModel:
    """Wrapper that computes the log-prob of each token among its candidates, for a model with TRL's fused LM head."""

    model: ModelCall  # takes `token_indices`, returns `log_probs`
    candidates: CandidateSets  # of some positions
    index: Tensor
    """(B, L) position of the candidates of each token. A token with -1 gets the log-prob of the model."""
    with_entropy: bool
    """True to compute the entropy of the whole vocabulary. Otherwise, TRL's head runs only if a token has no set."""
    kept_mass: Tensor
    """(2,) sum of the model's probabilities of the sets so far, and number of sets. Needs `with_entropy`."""

    def __call__(self, *, token_indices: Tensor, labels: Tensor, **batch: object) -> Any:
        """Return the model's outputs. `token_indices` index the flattened batch."""
        has_label = labels[:, 1:] != -100
        index = self.index.flatten()[token_indices][:, 1:].where(has_label, -1).flatten()
        is_needed = has_label.flatten()

        def compute(head: Head) -> HeadOutputs:
            if len(head.targets) < len(index):  # the head gets tokens with labels only, whose number is known then
                with_label_first = (~is_needed).int().argsort(stable=True)
                candidates = self.candidates.take(index[with_label_first[: len(head.targets)]])  # the only wait
                is_left = candidates.sizes == 0
            else:
                candidates = self.candidates.take(index)  # the only wait
                is_left = is_needed & (candidates.counts == 0)
            candidates = candidates.to(head.hidden.device)  # it may be on another device
            return self._compute(head, candidates, bool(is_left.any()))

        with replace_head(compute):
            return self.model(token_indices=token_indices, labels=labels, **batch)

    def _compute(self, head: Head, candidates: CandidateSets, is_left: bool) -> HeadOutputs:
        has_set = candidates.counts > 0
        if not len(candidates.ids):
            return head.trl_outputs()
        log_probs = candidate_log_probs(head, candidates)
        if not self.with_entropy and not is_left:
            return log_probs, None, None, None, None
        outputs = head.trl_outputs()
        trl_log_probs = outputs[0]
        if self.with_entropy:
            masses = (trl_log_probs.detach() - log_probs.detach()).double().exp().where(has_set, 0)
            self.kept_mass = self.kept_mass.to(masses.device) + torch.stack([masses.sum(), has_set.sum()])
        if is_left:
            log_probs = log_probs.where(has_set, trl_log_probs)
        return (log_probs, *outputs[1:])
