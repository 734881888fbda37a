"""Wrappers that record or replay the routes of a model."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from trl_steady.routing.replay import Replay, Routers, RoutingError
from trl_steady.routing.routes import no_routes

__all__ = ["RecordedModel", "ReplayedModel"]


class RecordedModel:
    """Wrapper that records the routes of a model for a batch that comes in parts.

    Args:
        model: The model to call, with `places`.
        routers: The routers of the model.
        shape: (B, T) of the whole batch.
    """

    needs_places = True

    def __init__(self, model: Callable[..., Any], routers: Routers, shape: tuple[int, int]) -> None:
        self._model, self._routers, self._shape = model, routers, shape
        self.routes: Tensor | None = None
        """(B, T, L, K), or None before the first part. Tokens that have not gone through the model have no route."""

    def __call__(self, *, places: Tensor, **batch: Any) -> Any:
        """Return the model's outputs, and record routes. `places` are the token indices in the flattened batch.

        Raises:
            RoutingError: the routers did not run once for each token.
        """
        with self._routers.recording() as recording:
            outputs = self._model(places=places, **batch)
        own = recording.routes()
        if len(own) != places.numel():
            raise RoutingError(
                f"the router {self._routers.names[0]} and the others chose experts for {len(own)} tokens in a pass of "
                f"{places.numel()} tokens."
            )
        if self.routes is None:
            self.routes = no_routes((*self._shape, *own.shape[1:]), own.dtype, own.device)
        self.routes.flatten(0, 1)[places.flatten()] = own
        return outputs


class ReplayedModel:
    """Wrapper that makes a model use given routes.

    Args:
        model: The model to call, with `places`.
        routers: The routers of the model.
        routes: (B, T, L, K) of the whole batch.
        lasting: Keeps a context active as long as layers of the model may be recomputed.
    """

    needs_places = True

    def __init__(
        self,
        model: Callable[..., Any],
        routers: Routers,
        routes: Tensor,
        lasting: Callable[[AbstractContextManager[Replay]], AbstractContextManager[Replay]],
    ) -> None:
        self._model, self._routers, self._routes, self._lasting = model, routers, routes, lasting
        self.replays: list[Replay] = []
        """The replays of the parts so far."""

    def __call__(self, *, places: Tensor, **batch: Any) -> Any:
        """Return the model's outputs on the given routes. `places` are the token indices in the flattened batch.

        Raises:
            RoutingError: the routers did not run once for each token.
            ValueError: a route leads to an expert that the model does not have.
        """
        with self._lasting(self._routers.replaying(self._routes.flatten(0, 1)[places.flatten()])) as replay:
            outputs = self._model(places=places, **batch)
            replay.check()
        self.replays.append(replay)
        return outputs
