"""Record which experts the routers of a model choose, and make them choose recorded ones.

Replay replaces the result of a router's topk: the indices become the recorded ones, and the values become the live
scores at these indices. The router's own code then normalises and scales the values, so gate weights and their
gradients are those of the live router.

The life of a replay:

1. `Routers.replay(routes)` swaps the forward of each router, and gives a `Replay`.
2. In the pass of the model, each router runs once and chooses the given experts.
3. `Replay.check()` ends the pass. From here on, routers in other passes choose for themselves.
4. In backward, routers in layers that gradient checkpointing recomputes choose the given experts again, uncounted.
5. The end of the context restores the forwards.
"""

import functools
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from trl_steady.features.router_replay.router import Router, RoutingError, find_routers
from trl_steady.features.router_replay.routes import is_route, route_dtype
from trl_steady.trl_bridge.patching import patched


class RouteRecording:
    """The experts that routers chose in one pass of the model, or in several."""

    def __init__(self, routers: Sequence[Router]) -> None:
        self._routers = routers
        self._chosen: list[list[Tensor]] = [[] for _ in routers]

    def run(self, layer: int, forward: functools.partial[Any]) -> Any:
        """Run the router of a layer, and record its choice."""
        result, experts, count = self._routers[layer].watch(forward)
        self._chosen[layer].append(experts.detach().flatten(0, -2).to(route_dtype(count)))
        return result

    def routes(self) -> Tensor:
        """Return the routes (N, M, K) of the N tokens of a single pass, as many as the first router saw."""
        tokens = list(map(len, self._chosen[0][:1]))
        return self.routes_of_passes(tokens)[0]

    def routes_of_passes(self, tokens: Sequence[int]) -> list[Tensor]:
        """Return the routes (N, M, K) of each pass. `tokens` are the numbers of tokens in each.

        Raises:
            RoutingError: a router did not run once for each token.
        """
        for router, chosen in zip(self._routers, self._chosen, strict=True):
            seen = list(map(len, chosen))
            if seen != list(tokens):
                raise RoutingError(
                    f"the router {router.name} chose experts for {seen} tokens in passes of {list(tokens)}. A kernel "
                    "may replace its layer, images may have other routers, or the model may use the layer more than "
                    "once."
                )
        device = self._chosen[0][0].device
        routes: list[Tensor] = []
        for number in range(len(tokens)):
            experts = [chosen[number].to(device) for chosen in self._chosen]  # of each router in this pass
            routes.append(torch.stack(experts, 1))
        return routes


class Replay:
    """The experts that routers are made to choose, and how many of these choices differ from their own."""

    def __init__(self, routers: Sequence[Router], routes: Tensor) -> None:
        self._routers, self._routes = routers, routes
        self._has_route = is_route(routes)
        self._has_gradient = torch.is_grad_enabled()
        self._is_over = False
        self._runs = [0] * len(routers)  # 1 in the pass, and more if backward recomputes the layer
        self.changed = routes.new_zeros(len(routers), dtype=torch.long)
        """(M,) number of replayed choices that the live router would not have made, not counting recomputed layers."""

    @property
    def awaits_backward(self) -> bool:
        """True if the pass has gradients and none of its layers has been recomputed yet."""
        return self._has_gradient and max(self._runs) < 2

    @property
    def replayed(self) -> Tensor:
        """(M,) number of replayed choices."""
        return self._has_route.sum(0) * self._routes.size(-1)

    def check(self) -> None:
        """End the pass of the model. Raise a `RoutingError` if a router has not run once in it."""
        for router, times in zip(self._routers, self._runs, strict=True):
            if times != 1:
                raise RoutingError(
                    f"the router {router.name} ran {times} times in one pass of the model, and must run once. A "
                    "kernel may replace its layer, or the model may use the layer more than once."
                )
        self._is_over = True

    def run(self, layer: int, forward: functools.partial[Any]) -> Any:
        """Run the router of a layer, and replace its choice in the pass and where backward recomputes the layer."""
        is_backward = torch._C._current_graph_task_id() != -1
        if self._is_over and not is_backward:
            return forward()
        self._runs[layer] += 1
        replace = functools.partial(self._replaced, layer)
        return self._routers[layer].choose(forward, replace, self._routes.device)

    def _replaced(self, layer: int, scores: Tensor, live: torch.return_types.topk) -> torch.return_types.topk:
        indices = live.indices
        routes = self._routes[:, layer].to(indices.device)
        has_route = self._has_route[:, layer].to(indices.device)
        live_experts = indices.flatten(0, -2)
        fitting = (len(live_experts), len(self._routers), live_experts.size(-1))
        if self._routes.shape != fitting:  # they would broadcast
            raise RoutingError(
                f"routes of shape {tuple(self._routes.shape)} do not fit the router {self._routers[layer].name}: it "
                f"needs (tokens, layers, experts per token) = {fitting}. The routes are of another model or of other "
                "tokens."
            )
        chosen = torch.where(has_route.unsqueeze(-1), routes.long(), live_experts)
        if self._runs[layer] == 1:  # not if gradient checkpointing recomputes the layer
            self.changed[layer] = (chosen.unsqueeze(-1) != live_experts.unsqueeze(-2)).all(-1).sum()
        chosen = chosen.view(indices.shape)
        has_route = has_route.view(indices.shape[:-1]).unsqueeze(-1)
        values = torch.where(has_route, scores.gather(-1, chosen), live.values)
        return torch.return_types.topk((values, chosen))


_Use = TypeVar("_Use", RouteRecording, Replay)


class Routers:
    """The routers of a model, one for each layer that has one, to record from or to replay on.

    Use them from one thread at a time. Gradient checkpointing may recompute routers in autograd's threads.

    Raises:
        RoutingError: the model has no routers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._routers = [Router(name, modules) for name, modules in find_routers(model).items()]
        if not self._routers:
            raise RoutingError(f"{type(model).__name__} has no routers: it is not a mixture of experts.")
        self._use: RouteRecording | Replay | None = None

    @property
    def names(self) -> list[str]:
        """Names of the routers, in the order of their layers."""
        return [router.name for router in self._routers]

    @property
    def decoder_layers(self) -> list[int]:
        """Number of the layer of each router in its stack of layers, counted from 0."""
        return [router.decoder_layer for router in self._routers]

    def record(self) -> AbstractContextManager[RouteRecording]:
        """Record which experts the routers choose, in one pass of the model or in several."""
        return self._used_by(RouteRecording(self._routers))

    def replay(self, routes: Tensor) -> AbstractContextManager[Replay]:
        """Make the routers choose given experts in one pass of the model.

        `routes` are (N, M, K) for the N tokens that the model gets, row by row. Tokens without a route are left to the
        live router. With gradient checkpointing, keep this context open until backward ends. `Replay.check` ends the
        pass. After that, only layers that backward recomputes are replayed. A replay inside another takes its place.

        Raises:
            RuntimeError: another pass still waits for a backward that will recompute its layers.
        """
        return self._used_by(Replay(self._routers, routes))

    @contextmanager
    def _used_by(self, use: _Use) -> Generator[_Use]:
        before = self._use
        is_second = isinstance(use, Replay) and isinstance(before, Replay) and before.awaits_backward
        if is_second and torch.is_grad_enabled() and self._recomputes:
            raise RuntimeError(
                "a replayed pass began before the backward of an earlier one, whose recomputed layers would take its "
                "routes. Run backward first, or switch gradient checkpointing off."
            )
        self._use = use
        with ExitStack() as patches:
            if before is None:
                self._patch_forwards(patches)
            try:
                yield use
            finally:
                self._use = before

    def _patch_forwards(self, patches: ExitStack) -> None:
        # on the modules, because a mode around the model is thread-local, and backward has threads of its own
        for layer, router in enumerate(self._routers):
            for module in router.modules:
                forward = functools.partial(self._forward, layer, module.forward)
                patches.enter_context(patched(module, {"forward": forward}))

    @property
    def _recomputes(self) -> bool:
        for module in self._model.modules():
            if getattr(module, "gradient_checkpointing", False) is True:
                return True
            if type(module).__name__ == "CheckpointWrapper":
                return True
        return False

    def _forward(self, layer: int, forward: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        run = functools.partial(forward, *arguments, **keywords)
        if self._use is None:
            return run()
        return self._use.run(layer, run)
