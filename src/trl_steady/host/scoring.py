"""One scoring pass: TRL's method calls the model in parts, and proxies need to know which tokens they get.

This file knows the arguments of TRL's scoring method, and no part.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from trl_steady.host import loss
from trl_steady.host.names import overridden
from trl_steady.host.part import Part, Rollout, ScoringPass, Trainer

Scores = tuple[Tensor, Tensor | None, Tensor | None]
"""(B, T) log-probs, (B, T) entropies of the whole vocabulary, and the scalar load-balancing loss."""


class IndexedModel:
    """Proxy that tells another proxy, whose `needs_token_indices` is True, which tokens of a batch (B, L) it gets.

    TRL passes the batch in parts, row after row.
    """

    def __init__(self, model: Callable[..., Any], token_indices: Tensor) -> None:
        self._model, self._token_indices, self._passed = model, token_indices, 0

    def __call__(self, *, input_ids: Tensor, **others: object) -> Any:
        """Return the model's outputs for the next rows. Raise a RuntimeError if the batch has no such rows."""
        token_indices = self._token_indices[self._passed : self._passed + len(input_ids)]
        self._passed += len(input_ids)
        self._refuse_unless(token_indices.shape == input_ids.shape)
        return self._model(input_ids=input_ids, token_indices=token_indices, **others)

    def refuse_rest(self) -> None:
        """Raise a RuntimeError if rows are left over. Call this after the last part."""
        self._refuse_unless(self._passed == len(self._token_indices))

    def _refuse_unless(self, is_in_order: bool) -> None:
        if not is_in_order:
            raise RuntimeError(
                f"the model got {self._passed} rows of a batch of shape {tuple(self._token_indices.shape)}, or rows "
                "of another width. keep_sampling_mask and router_replay need each row once and in order. Score whole "
                "batches with TRL's own method, or switch both options off."
            )


def scored(scoring: ScoringPass, parts: Sequence[Part], method: Callable[..., Any]) -> Scores:
    """Run a scoring pass with TRL's method on the models of the parts and in their batches."""
    ids, mask = scoring.input_ids, scoring.attention_mask
    asked = {"compute_entropy": scoring.with_entropy, "compute_aux_loss": scoring.with_aux_loss, **scoring.of_samples}
    trls = functools.partial(method, logits_to_keep=scoring.width, **asked)

    def bare(*, token_indices: object = None, **batch: object) -> Any:
        return scoring.model(**batch)

    with ExitStack() as stack:
        model: Callable[..., Any] = bare
        for part in parts:
            model = stack.enter_context(part.scoring(scoring, model))
        if model is bare:  # no part acts in this pass
            return trls(scoring.model, ids, mask, batch_size=scoring.batch_size)
        token_indices = torch.arange(ids.numel(), device=ids.device).view_as(ids)

        def score(rows: Tensor | slice, batch_size: int | None = None) -> Scores:
            indexed = IndexedModel(model, token_indices[rows]) if needs_token_indices(model) else None
            scores = trls(indexed or model, ids[rows], mask[rows], batch_size=batch_size)
            if indexed is not None:
                indexed.refuse_rest()
            return scores

        batches = [rows for part in parts for rows in part.batches(scoring)]
        if not batches:
            return score(slice(None), scoring.batch_size)
        logps, entropies, _ = zip(*map(score, batches), strict=True)
        back = torch.cat(batches).argsort()
        return torch.cat(logps)[back], torch.cat(entropies)[back] if scoring.with_entropy else None, None


def policy_log_probs(trainer: Trainer, rollout: Rollout) -> Tensor:
    """Return the policy's log-probs (B, T) of a complete rollout. The random state stays as without this pass."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    asked = {"batch_size": trainer.args.per_device_train_batch_size, **loss.forwarded(rollout.samples)}
    with torch.no_grad(), torch.random.fork_rng(devices), overridden(trainer, {"_rollout": rollout}):
        return trainer.log_probs(trainer.model, *loss.scored(rollout.samples), **asked)[0]


def needs_token_indices(model: Callable[..., Any]) -> bool:
    """Return True if a proxy must get `token_indices`, or one inside it."""
    return getattr(model, "needs_token_indices", False)
