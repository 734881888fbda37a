"""Record which experts the routers of a model choose, and make them choose recorded ones.

A router chooses by `topk` over the scores of all experts. Recording reads the result of this call, and replay replaces
it: the indices become the recorded ones, and the values become the live scores at these indices. The router's own code
then normalises and scales the values, so gate weights and their gradients are those of the live router.
"""

# pyright: reportUnknownMemberType=false
# torch's annotations are partial

import functools
import re
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from trl_steady.routing.finding import find_routers, topk_sites
from trl_steady.routing.routes import dtype_of, is_route

__all__ = ["Replay", "RouteRecording", "Routers", "RoutingError", "continued"]

_TOPK = (torch.topk, torch.Tensor.topk)
_MASKED_FILL = (torch.masked_fill, torch.Tensor.masked_fill)


class RoutingError(RuntimeError):
    """Error for a run of the routers that gives a token no route, or more than one."""


class _Use:
    """The current use of the routers of a model."""

    def __init__(self, names: Sequence[str], calls: dict[int, int]) -> None:
        self.names = names
        self._calls = calls
        """Layer -> number of calls of topk in its router, of which the last decides. Known after a first run."""
        self._fired = [0] * len(names)
        self.is_over = False
        """True after the end of the pass. From then on, only layers that backward recomputes belong to it."""

    def check(self) -> None:
        """End the pass of the model, and check that each router has run once in it.

        Raises:
            RoutingError: a router has not. The message names the first one.
        """
        for name, times in zip(self.names, self._fired, strict=True):
            if times != 1:
                raise RoutingError(
                    f"the router {name} ran {times} times in one pass of the model, and must run once. Another "
                    "implementation may replace its layer, or the model may use the layer more than once."
                )
        self.is_over = True

    def _decided(self, layer: int, watch: "_TopkWatch") -> Tensor:
        if watch.indices is None:
            raise RoutingError(f"the router {self.names[layer]} chose experts without calling topk.")
        self._calls[layer] = watch.calls
        return watch.indices


class RouteRecording(_Use):
    """The experts that routers chose in one pass of the model, or in several."""

    def __init__(self, names: Sequence[str], calls: dict[int, int]) -> None:
        super().__init__(names, calls)
        self._chosen: list[list[Tensor]] = [[] for _ in names]

    def route(self, layer: int, forward: Callable[..., Any], arguments: Any, keywords: Any) -> Any:
        """Run the router of a layer, and record its choice.

        Raises:
            RoutingError: the router did not call topk.
        """
        self._fired[layer] += 1
        with _TopkWatch() as watch:
            result = forward(*arguments, **keywords)
        chosen = self._decided(layer, watch).detach()
        self._chosen[layer].append(chosen.flatten(0, -2).to(dtype_of(watch.width)))
        return result

    def routes(self) -> Tensor:
        """Return the routes (N, L, K) of the N tokens of a single pass.

        Raises:
            RoutingError: a router did not run exactly once, or layers chose different numbers of experts.
        """
        self.check()
        return self._stacked([chosen for (chosen,) in self._chosen])

    def routes_of_generation(self, sequences: int) -> Tensor:
        """Return the routes (B, T, L, K) of a prefill and the decoding steps after it, for B sequences of T tokens.

        Raises:
            RoutingError: a router did not run for every token, or layers chose different numbers of experts.
        """
        for name, chosen in zip(self.names, self._chosen, strict=True):
            if not chosen or any(len(own) % sequences for own in chosen):
                raise RoutingError(
                    f"the router {name} has not run for every token of a generation of {sequences} sequences. The "
                    "model may send text and images through different routers, or replace the layer by a kernel."
                )
        return self._stacked([continued(chosen, sequences) for chosen in self._chosen])

    def _stacked(self, layers: Sequence[Tensor]) -> Tensor:
        shapes = {name: tuple(chosen.shape) for name, chosen in zip(self.names, layers, strict=True)}
        if len(set(shapes.values())) > 1:
            raise RoutingError(f"the routers of different layers have chosen different numbers of experts: {shapes}.")
        return torch.stack([chosen.to(layers[0].device) for chosen in layers], dim=-2)


class Replay(_Use):
    """The experts that routers are made to choose, and how many of these choices differ from their own."""

    def __init__(self, names: Sequence[str], calls: dict[int, int], routes: Tensor) -> None:
        super().__init__(names, calls)
        self._routes = routes
        self._has_route = is_route(routes)
        self._highest = int(routes.where(self._has_route.unsqueeze(-1), 0).max()) if routes.numel() else 0
        self._changed: dict[int, Tensor] = {}
        self._has_gradient = torch.is_grad_enabled()

    @property
    def awaits_backward(self) -> bool:
        """True if the pass has gradients and none of its layers has been recomputed yet."""
        return self._has_gradient and max(self._fired) < 2

    @property
    def changed(self) -> Tensor:
        """(L,) number of replayed choices that the live router would not have made, not counting recomputed layers."""
        none = self._routes.new_zeros((), dtype=torch.long)
        return torch.stack([self._changed.get(layer, none).to(none.device) for layer in range(len(self.names))])

    @property
    def replayed(self) -> Tensor:
        """(L,) number of replayed choices."""
        return self._has_route.sum(0) * self._routes.size(-1)

    def route(self, layer: int, forward: Callable[..., Any], arguments: Any, keywords: Any) -> Any:
        """Run the router of a layer, and replace its choice.

        Raises:
            RoutingError: the router chooses for other tokens, or calls topk another number of times than before.
            ValueError: a route leads to an expert that the model does not have.
        """
        self._fired[layer] += 1
        if layer not in self._calls:
            with _leaving_no_trace(self._routes.device), _TopkWatch() as watch:
                copies, named_copies = tree_map_only(Tensor, torch.clone, (arguments, keywords))
                forward(*copies, **named_copies)
            self._decided(layer, watch)
        call = self._calls[layer]
        with _Replace(call, functools.partial(self._choose, layer), self._has_route[:, layer]) as mode:
            result = forward(*arguments, **keywords)
        if mode.calls != call:
            raise RoutingError(
                f"the router {self.names[layer]} called topk {mode.calls} times instead of {call}, so its choice is "
                "unknown. It may choose in another way in training, or for other inputs."
            )
        return result

    def _choose(self, layer: int, scores: Tensor, live: Tensor) -> Tensor:
        routes, has_route = self._routes[:, layer].to(live.device), self._has_route[:, layer].to(live.device)
        of_live = live.flatten(0, -2)
        if of_live.shape != routes.shape:
            raise RoutingError(
                f"the router {self.names[layer]} chooses experts for (tokens, experts per token) = "
                f"{tuple(of_live.shape)}, and the routes are for {tuple(routes.shape)}."
            )
        if self._highest >= scores.size(-1):
            raise ValueError(
                f"a route leads to expert {self._highest}, and the router {self.names[layer]} has "
                f"{scores.size(-1)} experts, counted from 0. The routes come from another model."
            )
        chosen = torch.where(has_route.unsqueeze(-1), routes.long(), of_live)
        if layer not in self._changed:  # not if gradient checkpointing recomputes the layer
            kept = (chosen.unsqueeze(-1) == of_live.unsqueeze(-2)).any(-1)
            self._changed[layer] = (~kept).sum()
        return chosen.view(live.shape)


_Used = TypeVar("_Used", RouteRecording, Replay)


class Routers:
    """The routers of a model, one for each layer that has one, to record from or to replay on.

    Use them from one thread at a time. Gradient checkpointing may recompute routers in autograd's threads.

    Raises:
        ValueError: the model has no routers, or its experts are not chosen by `topk`. Or it has routers in several
            stacks of layers, or two routers in one block, for example for text and for images.
    """

    def __init__(self, model: nn.Module) -> None:
        found = find_routers(model)
        if not found:
            raise ValueError(f"{type(model).__name__} has no routers: it is not a mixture of experts.")
        self.names = list(found)
        """Names of the routers, in the order of their layers."""
        places = [re.split(r"\.(\d+)\.", name, maxsplit=1) for name in self.names]
        stacks = sorted({place[0] for place in places})
        if len(stacks) > 1:
            raise ValueError(
                f"{type(model).__name__} has routers in several stacks of layers, {' and '.join(stacks)}, which do "
                "not see the same tokens."
            )
        blocks: dict[str, str] = {}
        for name in self.names:
            block = re.sub(r"(\.\d+\.[^.]+)\..*", r"\1", name, count=1)
            other = blocks.setdefault(block, name)
            if other != name:
                raise ValueError(
                    f"{type(model).__name__} has two routers in one block, {other} and {name}, which do not see the "
                    "same tokens."
                )
        self.decoder_layers = [int(place[1]) if len(place) > 1 else 0 for place in places]
        """Number of the layer of each router in its stack of layers, counted from 0."""
        self._model = weakref.ref(model)
        self._modules = _listed(found)
        # If the code has one call of topk, this call decides. Otherwise the first run finds the last one.
        sites = {layer: topk_sites(type(module)) for layer, module in self._modules if "forward" not in vars(module)}
        self._calls = {layer: 1 for layer, count in sites.items() if count == 1}
        self._use: RouteRecording | Replay | None = None

    def are_of(self, model: nn.Module) -> bool:
        """Return True if the model still has these routers. Adapters may have added or replaced some."""
        return self._modules == _listed(find_routers(model))

    def recording(self) -> AbstractContextManager[RouteRecording]:
        """Record which experts the routers choose, in one pass of the model or in several."""
        return self._used_for(RouteRecording(self.names, self._calls))

    def replaying(self, routes: Tensor) -> AbstractContextManager[Replay]:
        """Make the routers choose given experts in one pass of the model.

        With gradient checkpointing, keep this context open until backward ends. `Replay.check` ends the pass. After
        that, only layers that backward recomputes are replayed. A replay inside another one takes its place.

        Args:
            routes: (N, L, K) of the N tokens that the model gets, row by row. Tokens without a route are left to the
                live router.

        Raises:
            ValueError: the routes have another number of layers.
            RuntimeError: another pass still waits for a backward that will recompute its layers.
        """
        if routes.dim() != 3 or routes.size(1) != len(self.names):
            raise ValueError(
                f"routes of shape {tuple(routes.shape)} for {len(self.names)} layers with routers ({self.names[0]} "
                f"to {self.names[-1]}) do not fit. Their shape must be (tokens, layers, experts per token)."
            )
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
        patched = self._modules if before is None else []
        replaced = [(vars(module), vars(module).get("forward")) for _, module in patched]
        for layer, module in patched:
            vars(module)["forward"] = functools.partial(self._forward, layer, module.forward)
        try:
            yield use
        finally:
            self._use = before
            for attributes, forward in replaced:
                if forward is None:
                    del attributes["forward"]
                else:
                    attributes["forward"] = forward

    def _forward(self, layer: int, forward: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        use = self._use
        if use is None or (use.is_over and not (isinstance(use, Replay) and _is_backward())):
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

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _TOPK:
            self.calls += 1
            self.width, self.indices = _first(args, kwargs).size(-1), result.indices
        return result


class _Replace(TorchFunctionMode):
    """Replace the result of one call of topk.

    A router may mask the scores of some groups of experts before topk. The experts of a route may be in masked groups.
    For tokens with a route, the values are therefore taken from the scores before the mask.
    """

    def __init__(self, call: int, choose: Callable[[Tensor, Tensor], Tensor], has_route: Tensor) -> None:
        super().__init__()
        self._call, self._choose, self._has_route = call, choose, has_route
        self._masked: tuple[Tensor, Tensor] | None = None
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _MASKED_FILL:
            self._masked = result, _first(args, kwargs)
        if func not in _TOPK:
            return result
        self.calls += 1
        if self.calls != self._call:
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
    devices = [device] if device.type == "cuda" else []
    try:
        forked = cast("AbstractContextManager[None]", torch.random.fork_rng(devices))
        with torch.no_grad(), forked:
            yield
    finally:
        parametrize._cache_enabled = cached  # pyright: ignore[reportPrivateUsage]
        torch.clear_autocast_cache()


def _first(args: Any, kwargs: Any) -> Tensor:
    return args[0] if args else kwargs["input"]


def continued(passes: Sequence[Tensor], sequences: int) -> Tensor:
    """Join the values (B * n, K) of passes, each of n more tokens of B sequences, to (B, T, K).

    Without a KV cache, each decoding step runs all earlier tokens again. A token keeps the value of its first run.
    """
    parts: list[Tensor] = []
    known = 0
    for chosen in passes:
        part = chosen.view(sequences, -1, chosen.size(-1))
        if parts and part.size(1) == known + 1:
            part = part[:, -1:]
        parts.append(part)
        known += part.size(1)
    return torch.cat(parts, dim=1)
