"""One scoring pass: TRL's method calls the model in parts, and proxies need to know which tokens they get."""

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from trl_steady.host import loss
from trl_steady.host.names import overridden
from trl_steady.host.part import Part, Rollout, ScoringPass

__all__ = ["PlacedModel", "Scores", "needs_places", "policy_log_probs", "scored"]

_ORDER = (
    "keep_sampling_mask and router_replay need each row once and in order. Score whole batches with TRL's own method, "
    "or switch both options off."
)


Scores = tuple[Tensor, Tensor | None, Tensor | None]
"""(B, T) log-probs, (B, T) entropies of the whole vocabulary, and the scalar load-balancing loss."""


class PlacedModel:
    """Proxy that tells another proxy, whose `needs_places` is True, which tokens of a batch it gets.

    TRL passes the batch in parts, row after row.

    Args:
        model: The model to call, with `places` (b, l) beside `input_ids` (b, l): indices in the flattened batch.
        places: (B, L) of the whole batch.
    """

    def __init__(self, model: Callable[..., Any], places: Tensor) -> None:
        self._model, self._places, self._passed = model, places, 0

    def __call__(self, *, input_ids: Tensor, **others: Any) -> Any:
        """Return the model's outputs for the next rows.

        Raises:
            RuntimeError: more rows than the batch has, or rows of another width.
        """
        own = self._places[self._passed : self._passed + len(input_ids)]
        if own.shape != input_ids.shape:
            raise RuntimeError(
                f"the model got input_ids of shape {tuple(input_ids.shape)} after {self._passed} of the "
                f"{len(self._places)} rows of a batch of width {self._places.size(1)}. {_ORDER}"
            )
        self._passed += len(input_ids)
        return self._model(input_ids=input_ids, places=own, **others)

    def refuse_rest(self) -> None:
        """Raise a RuntimeError if rows are left over. Call this after the last part."""
        if self._passed != len(self._places):
            raise RuntimeError(f"the model got {self._passed} of the {len(self._places)} rows of a batch. {_ORDER}")


def scored(scoring: ScoringPass, parts: Sequence[Part], own: Callable[..., Any]) -> Scores:
    """Run a scoring pass with `own`, TRL's method, on the models of the parts and in their batches."""
    ids, mask = scoring.input_ids, scoring.attention_mask
    asked = {"compute_entropy": scoring.with_entropy, "compute_aux_loss": scoring.with_aux_loss, **scoring.of_samples}
    trls = functools.partial(own, logits_to_keep=scoring.width, **asked)

    def alone(*, places: Any = None, **batch: Any) -> Any:  # the model, which knows no places
        return scoring.model(**batch)

    with ExitStack() as stack:
        model: Callable[..., Any] = alone
        for part in parts:
            model = stack.enter_context(part.scoring(scoring, model))
        if model is alone:  # no part acts in this pass
            return trls(scoring.model, ids, mask, batch_size=scoring.batch_size)
        places = torch.arange(ids.numel(), device=ids.device).view_as(ids)

        def score(rows: Any, batch_size: int | None = None) -> Scores:
            placed = PlacedModel(model, places[rows]) if needs_places(model) else None
            scores = trls(placed or model, ids[rows], mask[rows], batch_size=batch_size)
            if placed is not None:
                placed.refuse_rest()
            return scores

        batches = [rows for part in parts for rows in part.batches(scoring)]
        if not batches:
            return score(slice(None), scoring.batch_size)
        logps, entropies, _ = zip(*map(score, batches), strict=True)
        back = torch.cat(batches).argsort()
        return torch.cat(logps)[back], torch.cat(entropies)[back] if scoring.with_entropy else None, None


def policy_log_probs(trainer: Any, rollout: Rollout) -> Tensor:
    """Return the policy's log-probs (B, T) of a complete rollout. The random state stays as without this pass."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    tokens, of_model = loss.scored(rollout.samples), loss.forwarded(rollout.samples)
    with torch.no_grad(), torch.random.fork_rng(devices), overridden(trainer, {"_rollout": rollout}):
        return trainer.log_probs(trainer.model, *tokens, trainer.args.per_device_train_batch_size, **of_model)[0]


def needs_places(model: Callable[..., Any]) -> bool:
    """Return True if a proxy must get `places`, or one inside it."""
    return getattr(model, "needs_places", False)
