"""Wrappers that record or replay the routes of a model in a pass whose batch comes in parts."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from trl_steady.core.types import ModelCall
from trl_steady.features.router_replay.replay import Replay, Routers
from trl_steady.functional.turns import nothing


class RecordedModel:
    """Wrapper that records the routes of a model.

    `shape` is (B, L), that of the whole batch. Each part says by `token_indices` which tokens of the flattened batch
    it has.
    """

    needs_token_indices = True
    model: ModelCall

    def __init__(self, routers: Routers, shape: Sequence[int]) -> None:
        self._routers, self._shape = routers, shape
        self.routes: Tensor | None = None
        """(B, L, M, K), or None before the first part. Tokens that have not gone through the model have no route."""

    def wrap(self, model: ModelCall) -> ModelCall:
        """Wrap a model. See `ForwardPass.wrap_model`."""
        self.model = model
        return self

    def __call__(self, *, token_indices: Tensor, **batch: Any) -> Any:
        """Return the model's outputs, and record routes."""
        with self._routers.record() as recording:
            outputs = self.model(token_indices=token_indices, **batch)
        (routes,) = recording.routes_of_passes([token_indices.numel()])
        if self.routes is None:
            self.routes = routes.new_full((*self._shape, *routes.shape[1:]), nothing(routes.dtype))
        self.routes.flatten(0, 1)[token_indices.flatten()] = routes
        return outputs


class ReplayedModel:
    """Wrapper that makes a model use given routes (B, L, M, K).

    `hold` keeps a context active as long as layers of the model may be recomputed.
    """

    needs_token_indices = True
    model: ModelCall

    def __init__(
        self,
        routers: Routers,
        routes: Tensor,
        hold: Callable[[AbstractContextManager[Replay]], AbstractContextManager[Replay]],
    ) -> None:
        self._routers, self._routes, self._hold = routers, routes, hold
        self.replays: list[Replay] = []
        """The replays of the parts so far."""

    def wrap(self, model: ModelCall) -> ModelCall:
        """Wrap a model. See `ForwardPass.wrap_model`."""
        self.model = model
        return self

    def __call__(self, *, token_indices: Tensor, **batch: Any) -> Any:
        """Return the model's outputs on the given routes."""
        routes = self._routes.flatten(0, 1)[token_indices.flatten()]
        with self._hold(self._routers.replay(routes)) as replay:
            outputs = self.model(token_indices=token_indices, **batch)
            replay.check()
        self.replays.append(replay)
        return outputs
