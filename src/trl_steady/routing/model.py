"""What stands in for a model while its routes are recorded or replayed."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from trl_steady.routing.replay import Replay, Routers, RoutingError
from trl_steady.routing.routes import no_routes

__all__ = ["RecordedModel", "ReplayedModel"]


class RecordedModel:
    """A model whose routes are kept, of batches that come in parts.

    Args:
        model: What is called.
        routers: Of the model.
        shape: (B, T) of the whole batch.
    """

    def __init__(self, model: Callable[..., Any], routers: Routers, shape: tuple[int, int]) -> None:
        self._model, self._routers, self._shape = model, routers, shape
        self.routes: Tensor | None = None
        """(B, T, L, K) so far; a token that has not gone through the model has no route."""

    def __call__(self, *, places: Tensor, **batch: Any) -> Any:
        """What the model answers; `places` are the indices of its tokens in the flattened batch."""
        with self._routers.recording() as recording:
            outputs = self._model(**batch)
        own = recording.routes()
        if len(own) != places.numel():
            raise RoutingError(
                f"the routers {self._routers.names[0]} and so on chose experts for {len(own)} of the {places.numel()} "
                "tokens of a pass."
            )
        if self.routes is None:
            self.routes = no_routes((*self._shape, *own.shape[1:]), own.dtype, own.device)
        self.routes.flatten(0, 1)[places.flatten()] = own
        return outputs


class ReplayedModel:
    """A model that is made to take given routes.

    Args:
        model: What is called.
        routers: Of the model.
        routes: (B, T, L, K) of the whole batch.
        lasting: What keeps a context for as long as the model may run layers again.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        routers: Routers,
        routes: Tensor,
        lasting: Callable[[AbstractContextManager[Replay]], AbstractContextManager[Replay]],
    ) -> None:
        self._model, self._routers, self._routes, self._lasting = model, routers, routes, lasting
        self.replays: list[Replay] = []
        """Of the parts so far."""

    def __call__(self, *, places: Tensor, **batch: Any) -> Any:
        """What the model answers; `places` are the indices of its tokens in the flattened batch."""
        with self._lasting(self._routers.replaying(self._routes.flatten(0, 1)[places.flatten()])) as replay:
            outputs = self._model(**batch)
            replay.check()
        self.replays.append(replay)
        return outputs
