"""Wrappers that record or replay the routes of a model."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from trl_steady.features.router_replay.replay import Replay, Routers
from trl_steady.functional.turns import nothing


@dataclass(eq=False)
class RecordedModel:
    """Wrapper that records the routes of a model for a batch that comes in parts."""

    needs_token_indices: ClassVar = True
    model: Callable[..., object]  # takes `token_indices`
    routers: Routers
    shape: Sequence[int]  # (B, T) of the whole batch
    routes: Tensor | None = None
    """(B, T, L, K), or None before the first part. Tokens that have not gone through the model have no route."""

    def __call__(self, *, token_indices: Tensor, **batch: object) -> object:
        """Return the model's outputs, and record routes. `token_indices` are those in the flattened batch."""
        with self.routers.recording() as recording:
            outputs = self.model(token_indices=token_indices, **batch)
        (routes,) = recording.routes_of_passes([token_indices.numel()])
        if self.routes is None:
            self.routes = routes.new_full((*self.shape, *routes.shape[1:]), nothing(routes.dtype))
        self.routes.flatten(0, 1)[token_indices.flatten()] = routes
        return outputs


@dataclass(eq=False)
class ReplayedModel:
    """Wrapper that makes a model use given routes."""

    needs_token_indices: ClassVar = True
    model: Callable[..., object]  # takes `token_indices`
    routers: Routers
    routes: Tensor  # (B, T, L, K) of the whole batch
    lasting: Callable[[AbstractContextManager[Replay]], AbstractContextManager[Replay]]
    """Keeps a context active as long as layers of the model may be recomputed."""
    replays: list[Replay] = field(default_factory=list[Replay])
    """The replays of the parts so far."""

    def __call__(self, *, token_indices: Tensor, **batch: object) -> object:
        """Return the model's outputs on the given routes. `token_indices` index the flattened batch."""
        with self.lasting(self.routers.replaying(self.routes.flatten(0, 1)[token_indices.flatten()])) as replay:
            outputs = self.model(token_indices=token_indices, **batch)
            replay.check()
        self.replays.append(replay)
        return outputs
