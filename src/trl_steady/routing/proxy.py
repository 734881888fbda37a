"""Wrappers that record or replay the routes of a model."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from trl_steady.routing.replay import Replay, Routers, RoutingError
from trl_steady.routing.routes import no_routes

__all__ = ["RecordedModel", "ReplayedModel"]


@dataclass(eq=False)
class RecordedModel:
    """Wrapper that records the routes of a model for a batch that comes in parts."""

    needs_places: ClassVar = True
    model: Callable[..., Any]
    """The model to call, with `places`."""
    routers: Routers
    shape: Sequence[int]
    """(B, T) of the whole batch."""
    routes: Tensor | None = None
    """(B, T, L, K), or None before the first part. Tokens that have not gone through the model have no route."""

    def __call__(self, *, places: Tensor, **batch: Any) -> Any:
        """Return the model's outputs, and record routes. `places` are the token indices in the flattened batch.

        Raises:
            RoutingError: the routers did not run once for each token.
        """
        with self.routers.recording() as recording:
            outputs = self.model(places=places, **batch)
        own = recording.routes()
        if len(own) != places.numel():
            raise RoutingError(
                f"the router {self.routers.names[0]} and the others chose experts for {len(own)} tokens in a pass of "
                f"{places.numel()} tokens."
            )
        if self.routes is None:
            self.routes = no_routes((*self.shape, *own.shape[1:]), own.dtype, own.device)
        self.routes.flatten(0, 1)[places.flatten()] = own
        return outputs


@dataclass(eq=False)
class ReplayedModel:
    """Wrapper that makes a model use given routes."""

    needs_places: ClassVar = True
    model: Callable[..., Any]
    """The model to call, with `places`."""
    routers: Routers
    routes: Tensor
    """(B, T, L, K) of the whole batch."""
    lasting: Callable[[AbstractContextManager[Replay]], AbstractContextManager[Replay]]
    """Keeps a context active as long as layers of the model may be recomputed."""
    replays: list[Replay] = field(default_factory=list[Replay])
    """The replays of the parts so far."""

    def __call__(self, *, places: Tensor, **batch: Any) -> Any:
        """Return the model's outputs on the given routes. `places` are the token indices in the flattened batch.

        Raises:
            RoutingError: the routers did not run once for each token.
            ValueError: a route leads to an expert that the model does not have.
        """
        with self.lasting(self.routers.replaying(self.routes.flatten(0, 1)[places.flatten()])) as replay:
            outputs = self.model(places=places, **batch)
            replay.check()
        self.replays.append(replay)
        return outputs
