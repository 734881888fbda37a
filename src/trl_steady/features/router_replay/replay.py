"""Record which experts the routers of a model choose, and make them choose recorded ones.

A router chooses by `topk` over the scores of all experts. Recording reads the result of this call, and replay replaces
it: the indices become the recorded ones, and the values become the live scores at these indices. The router's own code
then normalises and scales the values, so gate weights and their gradients are those of the live router.
"""

# pyright: reportUnknownMemberType=false
# torch's annotations are partial

import functools
import re
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from trl_steady.features.router_replay.routers import find_routers
from trl_steady.features.router_replay.routes import dtype_of, is_route
from trl_steady.trl_bridge.private import patched

_TOPK = (torch.topk, torch.Tensor.topk)
_MASKED_FILL = (torch.masked_fill, torch.Tensor.masked_fill)

Forward = Callable[..., object]


class RoutingError(ValueError):
    """Error for a model whose routes cannot be recorded or replayed. The message names the option."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"router_replay: {problem} Leave router_replay unset.")


class RouteRecording:
    """The experts that routers chose in one pass of the model, or in several."""

    def __init__(self, routers: "Routers") -> None:
        self._routers = routers
        self._chosen: list[list[Tensor]] = [[] for _ in routers.names]

    def route(self, layer: int, forward: Forward, arguments: Sequence[object], keywords: dict[str, object]) -> object:
        """Run the router of a layer, and record its choice."""
        with _Topk() as watch:
            result = forward(*arguments, **keywords)
        self._routers.check_calls(layer, watch.calls)
        assert watch.indices is not None
        self._chosen[layer].append(watch.indices.detach().flatten(0, -2).to(dtype_of(watch.width)))
        return result

    def routes(self) -> Tensor:
        """Return the routes (N, L, K) of the N tokens of a single pass, as many as the first router saw."""
        return self.routes_of_passes([*map(len, self._chosen[0][:1])])[0]

    def routes_of_passes(self, tokens: Sequence[int]) -> list[Tensor]:
        """Return the routes (N, L, K) of each pass. `tokens` are the numbers of tokens in each.

        Raises:
            RoutingError: a router did not run once for each token.
        """
        for name, chosen in zip(self._routers.names, self._chosen, strict=True):
            seen = [len(part) for part in chosen]
            if seen != list(tokens):
                raise RoutingError(
                    f"the router {name} chose experts for {seen} tokens in passes of {list(tokens)}. A kernel may "
                    "replace its layer, images may have other routers, or the model may use the layer more than once."
                )
        device = self._chosen[0][0].device
        return [torch.stack([part.to(device) for part in parts], 1) for parts in zip(*self._chosen, strict=True)]


class Replay:
    """The experts that routers are made to choose, and how many of these choices differ from their own."""

    def __init__(self, routers: "Routers", routes: Tensor) -> None:
        self._routers = routers
        self.is_over = False
        """True after the end of the pass. From then on, only layers that backward recomputes belong to it."""
        self._fired = [0] * len(routers.names)
        self._routes = routes
        self._has_route = is_route(routes)
        self.changed = routes.new_zeros(len(routers.names), dtype=torch.long)
        """(L,) number of replayed choices that the live router would not have made, not counting recomputed layers."""
        self._has_gradient = torch.is_grad_enabled()

    @property
    def awaits_backward(self) -> bool:
        """True if the pass has gradients and none of its layers has been recomputed yet."""
        return self._has_gradient and max(self._fired) < 2

    @property
    def replayed(self) -> Tensor:
        """(L,) number of replayed choices."""
        return self._has_route.sum(0) * self._routes.size(-1)

    def check(self) -> None:
        """End the pass of the model. Raise a `RoutingError` if a router has not run once in it."""
        for name, times in zip(self._routers.names, self._fired, strict=True):
            if times != 1:
                raise RoutingError(
                    f"the router {name} ran {times} times in one pass of the model, and must run once. A kernel may "
                    "replace its layer, or the model may use the layer more than once."
                )
        self.is_over = True

    def route(self, layer: int, forward: Forward, arguments: Sequence[object], keywords: dict[str, object]) -> object:
        """Run the router of a layer, and replace its choice."""
        self._fired[layer] += 1
        calls = self._routers.calls
        if layer not in calls:
            # a run in advance tells which call of topk decides
            with _leaving_no_trace(self._routes.device), _Topk() as watch:
                copies, named_copies = tree_map_only(Tensor, torch.clone, (arguments, keywords))
                forward(*copies, **named_copies)
            self._routers.check_calls(layer, watch.calls)
        with _Topk(calls[layer], functools.partial(self._replaced, layer)) as mode:
            result = forward(*arguments, **keywords)
        self._routers.check_calls(layer, mode.calls)
        return result

    def _replaced(self, layer: int, scores: Tensor, live: torch.return_types.topk) -> torch.return_types.topk:
        indices, names = live.indices, self._routers.names
        routes, has_route = (each[:, layer].to(indices.device) for each in (self._routes, self._has_route))
        of_live = indices.flatten(0, -2)
        fitting = (len(of_live), len(names), of_live.size(-1))
        if self._routes.shape != fitting:  # which would broadcast
            raise RoutingError(
                f"routes of shape {tuple(self._routes.shape)} do not fit the router {names[layer]}: it needs "
                f"(tokens, layers, experts per token) = {fitting}. The routes are of another model or of other tokens."
            )
        chosen = torch.where(has_route.unsqueeze(-1), routes.long(), of_live)
        if self._fired[layer] == 1:  # not if gradient checkpointing recomputes the layer
            self.changed[layer] = (chosen.unsqueeze(-1) != of_live.unsqueeze(-2)).all(-1).sum()
        chosen, has_route = chosen.view(indices.shape), has_route.view(*indices.shape[:-1], 1)
        return torch.return_types.topk((torch.where(has_route, scores.gather(-1, chosen), live.values), chosen))


_Used = TypeVar("_Used", RouteRecording, Replay)


class Routers:
    """The routers of a model, one for each layer that has one, to record from or to replay on.

    Use them from one thread at a time. Gradient checkpointing may recompute routers in autograd's threads.

    Raises:
        RoutingError: the model has no routers.
    """

    def __init__(self, model: nn.Module) -> None:
        found = find_routers(model)
        if not found:
            raise RoutingError(f"{type(model).__name__} has no routers: it is not a mixture of experts.")
        self.names = list(found)
        """Names of the routers, in the order of their layers."""
        self.decoder_layers = [int((re.findall(r"\.(\d+)", name) or [0])[0]) for name in self.names]
        """Number of the layer of each router in its stack of layers, counted from 0."""
        self._model = model
        self._modules = [(layer, module) for layer, same in enumerate(found.values()) for module in same]
        self.calls: dict[int, int] = {}
        """Layer -> number of calls of topk in its router, of which the last decides. Known after a first run."""
        self._use: RouteRecording | Replay | None = None

    def check_calls(self, layer: int, calls: int) -> None:
        """Raise if a router has not called topk, or another number of times than in its first run."""
        if calls == 0 or calls != self.calls.setdefault(layer, calls):
            raise RoutingError(
                f"the router {self.names[layer]} called topk {calls} times instead of {self.calls.get(layer, 1)}. It "
                "may choose by other means, or differently in training."
            )

    def recording(self) -> AbstractContextManager[RouteRecording]:
        """Record which experts the routers choose, in one pass of the model or in several."""
        return self._used_for(RouteRecording(self))

    def replaying(self, routes: Tensor) -> AbstractContextManager[Replay]:
        """Make the routers choose given experts in one pass of the model.

        `routes` are (N, L, K) for the N tokens that the model gets, row by row. Tokens without a route are left to the
        live router. With gradient checkpointing, keep this context open until backward ends. `Replay.check` ends the
        pass. After that, only layers that backward recomputes are replayed. A replay inside another takes its place.

        Raises:
            RuntimeError: another pass still waits for a backward that will recompute its layers.
        """
        return self._used_for(Replay(self, routes))

    @contextmanager
    def _used_for(self, use: _Used) -> Generator[_Used]:
        before = self._use
        is_second = isinstance(use, Replay) and isinstance(before, Replay) and before.awaits_backward
        checkpoints = (
            getattr(module, "gradient_checkpointing", False) is True or type(module).__name__ == "CheckpointWrapper"
            for module in self._model.modules()
        )
        if is_second and torch.is_grad_enabled() and any(checkpoints):
            raise RuntimeError(
                "a replayed pass began before the backward of an earlier one, whose recomputed layers would take its "
                "routes. Run backward first, or switch gradient checkpointing off."
            )
        self._use = use
        with ExitStack() as patches:
            # on the modules, as a mode around the model is thread-local, and backward has threads of its own
            for layer, module in self._modules if before is None else []:
                forward = functools.partial(self._forward, layer, module.forward)
                patches.enter_context(patched(module, {"forward": forward}))
            try:
                yield use
            finally:
                self._use = before

    def _forward(self, layer: int, forward: Forward, *arguments: object, **keywords: object) -> object:
        use = self._use
        is_backward = torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage]
        if use is None or (isinstance(use, Replay) and use.is_over and not is_backward):
            return forward(*arguments, **keywords)
        return use.route(layer, forward, arguments, keywords)


class _Topk(TorchFunctionMode):
    """Observe the calls of topk in a router, and let `replace` change the result of one of them.

    A router may mask the scores of some groups of experts before topk. The experts of a route may be in masked groups,
    so `replace` gets the scores before the mask.
    """

    calls = 0
    width = 0
    """Width of the scores in the last call, which is the number of experts."""
    indices: Tensor | None = None

    def __init__(self, call: int = 0, replace: Callable[..., object] | None = None) -> None:
        super().__init__()
        self._call, self._replace = call, replace
        self._masked: tuple[object, Tensor] | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if func in _MASKED_FILL:
            self._masked = result, args[0]
        if func not in _TOPK:
            return result
        scores, self.calls = args[0], self.calls + 1
        self.width, self.indices = scores.size(-1), result.indices
        if self._replace is None or self.calls != self._call:
            return result
        if self._masked is not None and scores is self._masked[0]:
            scores = self._masked[1]
        return self._replace(scores, result)


@contextmanager
def _leaving_no_trace(device: torch.device) -> Generator[None]:
    """Run a module in advance without side effects: no graph, no change of the random state, no cached weights."""
    # PEFT's LoRA on parameters computes its weights inside this cache
    cached = cast(int, parametrize._cache_enabled)  # pyright: ignore[reportPrivateUsage]
    parametrize._cache_enabled = 0  # pyright: ignore[reportPrivateUsage]
    devices = [device] if device.type == "cuda" and torch.cuda.is_available() else []
    try:
        forked = cast("AbstractContextManager[None]", torch.random.fork_rng(devices))
        with torch.no_grad(), forked:
            yield
    finally:
        parametrize._cache_enabled = cached  # pyright: ignore[reportPrivateUsage]
        torch.clear_autocast_cache()
