"""Record which experts the routers of a model choose, and make them choose recorded ones.

A router chooses by `topk` over the scores of all experts. Recording reads the result of this call, and replay replaces
it: the indices become the recorded ones, and the values become the live scores at these indices. The router's own code
then normalises and scales the values, so gate weights and their gradients are those of the live router.
"""

# pyright: reportUnknownMemberType=false
# torch's annotations are partial

import functools
import itertools
import re
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from trl_steady.host.names import overridden
from trl_steady.routing.finding import find_routers
from trl_steady.routing.routes import dtype_of, is_route

_TOPK = (torch.topk, torch.Tensor.topk)
_MASKED_FILL = (torch.masked_fill, torch.Tensor.masked_fill)

Forward = Callable[..., object]


class RoutingError(ValueError):
    """Error for a model whose routes cannot be recorded or replayed. The message names the option."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"router_replay: {problem} Leave router_replay unset.")


class _Use:
    """The current use of the routers of a model."""

    def __init__(self, names: Sequence[str], calls: dict[int, int]) -> None:
        self.names = names
        self._calls = calls
        """Layer -> number of calls of topk in its router, of which the last decides. Known after a first run."""

    def _check_calls(self, layer: int, calls: int) -> None:
        """Raise if a router has not called topk, or another number of times than in its first run."""
        if calls == 0 or calls != self._calls.setdefault(layer, calls):
            raise RoutingError(
                f"the router {self.names[layer]} called topk {calls} times instead of {self._calls.get(layer, 1)}, so "
                "its choice is unknown. It may choose by other means, or differently in training."
            )


class RouteRecording(_Use):
    """The experts that routers chose in one pass of the model, or in several."""

    def __init__(self, names: Sequence[str], calls: dict[int, int]) -> None:
        super().__init__(names, calls)
        self._chosen: list[list[Tensor]] = [[] for _ in names]

    def route(
        self, layer: int, forward: Forward, arguments: tuple[object, ...], keywords: dict[str, object]
    ) -> object:
        """Run the router of a layer, and record its choice."""
        with _TopkWatch() as watch:
            result = forward(*arguments, **keywords)
        self._check_calls(layer, watch.calls)
        assert watch.indices is not None
        self._chosen[layer].append(watch.indices.detach().flatten(0, -2).to(dtype_of(watch.width)))
        return result

    def routes(self) -> Tensor:
        """Return the routes (N, L, K) of the N tokens of a single pass, as many as the first router saw."""
        return self.routes_of_passes([sum(map(len, self._chosen[0][:1]))])[0]

    def routes_of_passes(self, tokens: Sequence[int]) -> list[Tensor]:
        """Return the routes (N, L, K) of each pass. `tokens` are the numbers of tokens in each.

        Raises:
            RoutingError: a router did not run once for each token, or layers chose different numbers of experts.
        """
        experts = {chosen.size(-1) for chosen in self._chosen[0]}
        for name, chosen in zip(self.names, self._chosen, strict=True):
            if [len(part) for part in chosen] != list(tokens) or {part.size(-1) for part in chosen} != experts:
                raise RoutingError(
                    f"the router {name} chose experts of shapes {[tuple(part.shape) for part in chosen]} in passes of "
                    f"{list(tokens)} tokens, {sorted(experts)} for each. A kernel may replace its layer, text and "
                    "images may go through different routers, or the model may use the layer more than once."
                )
        device = self._chosen[0][0].device
        return [torch.stack([part.to(device) for part in parts], 1) for parts in zip(*self._chosen, strict=True)]


class Replay(_Use):
    """The experts that routers are made to choose, and how many of these choices differ from their own."""

    def __init__(self, names: Sequence[str], calls: dict[int, int], routes: Tensor) -> None:
        super().__init__(names, calls)
        self.is_over = False
        """True after the end of the pass. From then on, only layers that backward recomputes belong to it."""
        self._fired = [0] * len(names)
        self._routes = routes
        self._has_route = is_route(routes)
        self._highest = int(routes.where(self._has_route.unsqueeze(-1), 0).max()) if routes.numel() else 0
        self.changed = routes.new_zeros(len(names), dtype=torch.long)
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
        for name, times in zip(self.names, self._fired, strict=True):
            if times != 1:
                raise RoutingError(
                    f"the router {name} ran {times} times in one pass of the model, and must run once. Another "
                    "implementation may replace its layer, or the model may use the layer more than once."
                )
        self.is_over = True

    def route(
        self, layer: int, forward: Forward, arguments: tuple[object, ...], keywords: dict[str, object]
    ) -> object:
        """Run the router of a layer, and replace its choice."""
        self._fired[layer] += 1
        if layer not in self._calls:
            # a run in advance tells which call of topk decides
            with _leaving_no_trace(self._routes.device), _TopkWatch() as watch:
                copies, named_copies = tree_map_only(Tensor, torch.clone, (arguments, keywords))
                forward(*copies, **named_copies)
            self._check_calls(layer, watch.calls)
        choose = functools.partial(self._choose, layer)
        with _Replace(self._calls[layer], choose, self._has_route[:, layer]) as mode:
            result = forward(*arguments, **keywords)
        self._check_calls(layer, mode.calls)
        return result

    def _choose(self, layer: int, scores: Tensor, live: Tensor) -> Tensor:
        routes, has_route = self._routes[:, layer].to(live.device), self._has_route[:, layer].to(live.device)
        of_live = live.flatten(0, -2)
        fitting = (len(of_live), len(self.names), of_live.size(-1))
        # shapes would broadcast, and on a GPU an index beyond the experts would end the process
        if self._routes.shape != fitting or self._highest >= scores.size(-1):
            raise RoutingError(
                f"routes of shape {tuple(self._routes.shape)} with experts up to {self._highest} do not fit the "
                f"router {self.names[layer]}: it needs (tokens, layers, experts per token) = {fitting}, and has "
                f"{scores.size(-1)} experts, counted from 0. The routes are of another model or of other tokens."
            )
        chosen = torch.where(has_route.unsqueeze(-1), routes.long(), of_live)
        if self._fired[layer] == 1:  # not if gradient checkpointing recomputes the layer
            self.changed[layer] = (chosen.unsqueeze(-1) != of_live.unsqueeze(-2)).all(-1).sum()
        return chosen.view(live.shape)


_Used = TypeVar("_Used", RouteRecording, Replay)


class Routers:
    """The routers of a model, one for each layer that has one, to record from or to replay on.

    Use them from one thread at a time. Gradient checkpointing may recompute routers in autograd's threads.

    Raises:
        RoutingError: the model has no routers, or some of them do not see the same tokens.
    """

    def __init__(self, model: nn.Module) -> None:
        found = find_routers(model)
        if not found:
            raise RoutingError(f"{type(model).__name__} has no routers: it is not a mixture of experts.")
        self.names = list(found)
        """Names of the routers, in the order of their layers."""
        # stack of layers, number of the layer, block of the layer
        paths = [[*re.split(r"\.(\d+)\.?", name, maxsplit=1), "0", ""][:3] for name in self.names]
        for i, j in itertools.combinations(range(len(paths)), 2):
            in_one_block = paths[i][1] == paths[j][1] and paths[i][2].split(".")[0] == paths[j][2].split(".")[0]
            if paths[i][0] != paths[j][0] or in_one_block:
                raise RoutingError(
                    f"{type(model).__name__} has the routers {self.names[i]} and {self.names[j]}, in two stacks of "
                    "layers or in one block, which do not see the same tokens."
                )
        self.decoder_layers = [int(number) for _, number, _ in paths]
        """Number of the layer of each router in its stack of layers, counted from 0."""
        self._model = weakref.ref(model)
        self._modules = _listed(found)
        self._calls: dict[int, int] = {}
        self._use: RouteRecording | Replay | None = None

    def are_of(self, model: nn.Module) -> bool:
        """Return True if the model still has these routers. Adapters may have added or replaced some."""
        return self._modules == _listed(find_routers(model))

    def recording(self) -> AbstractContextManager[RouteRecording]:
        """Record which experts the routers choose, in one pass of the model or in several."""
        return self._used_for(RouteRecording(self.names, self._calls))

    def replaying(self, routes: Tensor) -> AbstractContextManager[Replay]:
        """Make the routers choose given experts in one pass of the model.

        `routes` are (N, L, K) for the N tokens that the model gets, row by row. Tokens without a route are left to the
        live router. With gradient checkpointing, keep this context open until backward ends. `Replay.check` ends the
        pass. After that, only layers that backward recomputes are replayed. A replay inside another takes its place.

        Raises:
            RuntimeError: another pass still waits for a backward that will recompute its layers.
        """
        return self._used_for(Replay(self.names, self._calls, routes))

    @contextmanager
    def _used_for(self, use: _Used) -> Generator[_Used]:
        before = self._use
        is_second = isinstance(use, Replay) and isinstance(before, Replay) and before.awaits_backward
        if is_second and torch.is_grad_enabled() and self._checkpoints():
            raise RuntimeError(
                "a replayed pass began before the backward of an earlier one. Gradient checkpointing would recompute "
                "the layers of both with the routes of the later one. Run backward first, or switch gradient "
                "checkpointing off."
            )
        self._use = use
        with ExitStack() as patches:
            # on the modules, as a mode around the model is thread-local, and backward has threads of its own
            for layer, module in self._modules if before is None else []:
                forward = functools.partial(self._forward, layer, module.forward)
                patches.enter_context(overridden(module, {"forward": forward}))
            try:
                yield use
            finally:
                self._use = before

    def _forward(self, layer: int, forward: Forward, *arguments: object, **keywords: object) -> object:
        use = self._use
        if use is None or (isinstance(use, Replay) and use.is_over and not _is_backward()):
            return forward(*arguments, **keywords)
        return use.route(layer, forward, arguments, keywords)

    def _checkpoints(self) -> bool:
        model = self._model()
        return model is not None and any(
            getattr(module, "gradient_checkpointing", False) is True or type(module).__name__ == "CheckpointWrapper"
            for module in model.modules()
        )


def _listed(found: Mapping[str, Sequence[nn.Module]]) -> list[tuple[int, nn.Module]]:
    return [(layer, module) for layer, same in enumerate(found.values()) for module in same]


def _is_backward() -> bool:
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage]


class _TopkWatch(TorchFunctionMode):
    """Observe the calls of topk in a router."""

    calls = 0
    width = 0
    """Width of the scores in the last call, which is the number of experts."""
    indices: Tensor | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _TOPK:
            self.calls += 1
            self.width, self.indices = _first(args, kwargs).size(-1), result.indices
        return result


class _Replace(_TopkWatch):
    """Replace the result of one call of topk.

    A router may mask the scores of some groups of experts before topk. The experts of a route may be in masked groups.
    For tokens with a route, the values are therefore taken from the scores before the mask.
    """

    def __init__(self, call: int, choose: Callable[[Tensor, Tensor], Tensor], has_route: Tensor) -> None:
        super().__init__()
        self._call, self._choose, self._has_route = call, choose, has_route
        self._masked: tuple[Tensor, Tensor] | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        if func in _MASKED_FILL:
            self._masked = result, _first(args, kwargs)
        if func not in _TOPK or self.calls != self._call:
            return result
        scores = _first(args, kwargs)
        indices = self._choose(scores, result.indices)
        if self._masked is not None and scores is self._masked[0]:
            scores = self._masked[1]
        has_route = self._has_route.to(indices.device).view(*indices.shape[:-1], 1)
        values = torch.where(has_route, scores.gather(-1, indices), result.values)
        return torch.return_types.topk((values, indices))


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


def _first(args: Sequence[Any], kwargs: dict[str, Any] | None) -> Tensor:
    return args[0] if args else (kwargs or {})["input"]


def continued(passes: Sequence[Tensor], sequences: int) -> Tensor:
    """Join the values (B * n, *) of passes, each of n more tokens of B sequences, to (B, T, *).

    Without a KV cache, each decoding step runs all earlier tokens again. A token keeps the value of its first run.
    """
    parts: list[Tensor] = []
    known = 0
    for values in passes:
        part = values.view(sequences, -1, *values.shape[1:])
        if parts and part.size(1) == known + 1:
            part = part[:, -1:]
        parts.append(part)
        known += part.size(1)
    return torch.cat(parts, dim=1)
