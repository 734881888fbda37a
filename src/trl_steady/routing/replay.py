"""Recording which experts the routers of a model choose, and making them choose recorded ones.

A router decides by `topk` over the scores of all experts. That one call is watched, or its result replaced: indices by
recorded ones, values by the live scores at these. What the router makes of them (normalising, scaling) stays its own,
so that gate weights and their gradients are those of the live router.
"""

# pyright: reportUnknownMemberType=false
# torch's annotations are partial

import functools
import re
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from trl_steady.routing.finding import find_routers, topk_sites
from trl_steady.routing.routes import dtype_of, is_route

__all__ = ["Recording", "Replay", "Routers", "RoutingError", "continued"]

_TOPK = (torch.topk, torch.Tensor.topk)
_MASKED_FILL = (torch.masked_fill, torch.Tensor.masked_fill)


class RoutingError(RuntimeError):
    """Routers ran in a way that leaves no route, or more than one, for a token."""


class _Use:
    """What the routers of a model are being used for."""

    def __init__(self, names: Sequence[str], calls: dict[int, int]) -> None:
        self.names = names
        self._calls = calls
        """Of a layer: how often its router calls topk, the last time to decide; known once it has run."""
        self._fired = [0] * len(names)
        self.is_over = False
        """Whether the pass has ended: from then on only what backward runs again is of it."""

    def check(self) -> None:
        """Hold that in one pass of the model, which ends here, each router has run once.

        Raises:
            RoutingError: naming the first that has not.
        """
        for name, times in zip(self.names, self._fired, strict=True):
            if times != 1:
                raise RoutingError(
                    f"the router {name} ran {times} times in one pass of the model, where routes are of one. Another "
                    "implementation may stand in for its layer, or the layer is used more than once."
                )
        self.is_over = True

    def _decided(self, layer: int, watch: "_Watch") -> Tensor:
        if watch.indices is None:
            raise RoutingError(f"the router {self.names[layer]} chose experts without calling topk.")
        self._calls[layer] = watch.calls
        return watch.indices


class Recording(_Use):
    """What routers have chosen, in one pass of the model or in several."""

    def __init__(self, names: Sequence[str], calls: dict[int, int]) -> None:
        super().__init__(names, calls)
        self._chosen: list[list[Tensor]] = [[] for _ in names]

    def route(self, layer: int, forward: Callable[..., Any], arguments: Any, keywords: Any) -> Any:
        """Run the router of a layer, and keep what it chooses.

        Raises:
            RoutingError: it has called no topk.
        """
        self._fired[layer] += 1
        with _Watch() as watch:
            result = forward(*arguments, **keywords)
        chosen = self._decided(layer, watch).detach()
        self._chosen[layer].append(chosen.flatten(0, -2).to(dtype_of(watch.width)))
        return result

    def routes(self) -> Tensor:
        """(N, L, K) of the N tokens of a single pass.

        Raises:
            RoutingError: a router that has not run exactly once; layers that choose different numbers of experts.
        """
        self.check()
        return self._stacked([chosen for (chosen,) in self._chosen])

    def routes_of_generation(self, sequences: int) -> Tensor:
        """(B, T, L, K) of a prefill and the steps of decoding that followed, T tokens for each of B sequences.

        Raises:
            RoutingError: a router that has not run for every token; layers that choose different numbers of experts.
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
    """What routers are made to choose, and how far that is from what they would have chosen."""

    def __init__(self, names: Sequence[str], calls: dict[int, int], routes: Tensor) -> None:
        super().__init__(names, calls)
        self._routes = routes
        self._has_route = is_route(routes)
        self._highest = int(routes.where(self._has_route.unsqueeze(-1), 0).max()) if routes.numel() else 0
        self._changed: list[Tensor | None] = [None for _ in names]
        self._has_gradient = torch.is_grad_enabled()

    @property
    def awaits_backward(self) -> bool:
        """Whether this is of a pass with gradient, none of whose layers has been run again."""
        return self._has_gradient and max(self._fired) < 2

    @property
    def changed(self) -> Tensor:
        """(L,) of the replayed choices those that the live router would not have made, in the first pass."""
        none = self._routes.new_zeros((), dtype=torch.long)
        return torch.stack([none if number is None else number.to(none.device) for number in self._changed])

    @property
    def replayed(self) -> Tensor:
        """(L,) how many choices are replayed."""
        return self._has_route.sum(0) * self._routes.size(-1)

    def route(self, layer: int, forward: Callable[..., Any], arguments: Any, keywords: Any) -> Any:
        """Run the router of a layer, with its choice replaced.

        Raises:
            RoutingError: it chooses for other tokens, or in another way than before.
            ValueError: a route leads to an expert that there is not.
        """
        self._fired[layer] += 1
        if layer not in self._calls:
            with _leaving_no_trace(self._routes.device), _Watch() as watch:
                copied = tree_map_only(Tensor, torch.clone, (arguments, keywords))
                forward(*copied[0], **copied[1])
            self._decided(layer, watch)
        call = self._calls[layer]
        with _Replace(call, functools.partial(self._choose, layer), self._has_route[:, layer]) as mode:
            result = forward(*arguments, **keywords)
        if mode.calls != call:
            raise RoutingError(
                f"the router {self.names[layer]} called topk {mode.calls} times in place of {call}, so that its "
                "choice cannot be told: it chooses otherwise in training, or for other inputs."
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
                f"{scores.size(-1)}, counted from 0: the routes are of another model."
            )
        chosen = torch.where(has_route.unsqueeze(-1), routes.long(), of_live)
        if self._changed[layer] is None:  # not when gradient checkpointing runs the layer again
            kept = (chosen.unsqueeze(-1) == of_live.unsqueeze(-2)).any(-1)
            self._changed[layer] = (~kept).sum()
        return chosen.view(live.shape)


class Routers:
    """The routers of a model, one a layer, and what they are being used for.

    Not for several threads at a time; gradient checkpointing, which runs routers again in autograd's threads, is fine.

    Raises:
        ValueError: no routers, routers in several stacks of layers, two in one block (as for text and for images), or
            experts that are not chosen by `topk`.
    """

    def __init__(self, model: nn.Module) -> None:
        found = find_routers(model)
        if not found:
            raise ValueError(f"{type(model).__name__} has no routers: it is not a mixture of experts.")
        self.names = list(found)
        """Of the layers with routers, in order."""
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
        """Which of the layers of their stack these are, counted from 0."""
        self._model = weakref.ref(model)
        self._modules = _listed(found)
        # where the code calls topk in one place, that is it; else the first run tells
        sites = {layer: topk_sites(type(module)) for layer, module in self._modules if "forward" not in vars(module)}
        self._calls = {layer: 1 for layer, count in sites.items() if count == 1}
        self._use: Recording | Replay | None = None

    def are_of(self, model: nn.Module) -> bool:
        """Whether they still are the model's, which adapters may have changed."""
        return self._modules == _listed(find_routers(model))

    @contextmanager
    def recording(self) -> "Generator[Recording]":
        """Record what routers choose, in one pass of the model or in several."""
        with self._used_for(Recording(self.names, self._calls)) as recording:
            yield recording

    @contextmanager
    def replaying(self, routes: Tensor) -> "Generator[Replay]":
        """Make routers choose given experts, in one pass of the model.

        Must last until the end of backward where gradient checkpointing runs layers again. After the replay's `check`,
        which ends the pass, only what backward runs again is replayed. Inside of another replay it takes its place.

        Args:
            routes: (N, L, K) of the N tokens that the model gets, row by row; tokens without a route choose as ever.

        Raises:
            ValueError: routes of another number of layers.
            RuntimeError: another pass still waits for a backward that will run its layers again.
        """
        if routes.dim() != 3 or routes.size(1) != len(self.names):
            raise ValueError(
                f"routes of shape {tuple(routes.shape)} for {len(self.names)} layers with routers ({self.names[0]} "
                f"to {self.names[-1]}): they must have shape (tokens, layers, experts per token)."
            )
        with self._used_for(Replay(self.names, self._calls, routes)) as replay:
            yield replay

    @contextmanager
    def _used_for(self, use: Any) -> Generator[Any]:
        before = self._use
        with_gradient = isinstance(use, Replay) and torch.is_grad_enabled()
        if with_gradient and isinstance(before, Replay) and before.awaits_backward and self._checkpoints():
            raise RuntimeError(
                "a pass with routes replayed while the backward of another is still to come: gradient checkpointing "
                "would run the layers of both again, and on the routes of this one. Go backward first, or switch "
                "gradient checkpointing off."
            )
        self._use = use
        attributes = [(vars(module), vars(module).get("forward")) for _, module in self._modules]
        if before is None:
            for layer, module in self._modules:
                vars(module)["forward"] = functools.partial(self._forward, layer, module.forward)
        try:
            yield use
        finally:
            self._use = before
            if before is None:
                for of_module, forward in attributes:
                    if forward is None:
                        del of_module["forward"]
                    else:
                        of_module["forward"] = forward

    def _forward(self, layer: int, forward: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        use = self._use
        if use is None or (use.is_over and not (isinstance(use, Replay) and _is_backward())):
            return forward(*arguments, **keywords)
        return use.route(layer, forward, arguments, keywords)

    def _checkpoints(self) -> bool:
        model = self._model()
        modules = [] if model is None else list(model.modules())
        return any(
            getattr(module, "gradient_checkpointing", False) is True or type(module).__name__ == "CheckpointWrapper"
            for module in modules
        )


def _listed(found: Mapping[str, Sequence[nn.Module]]) -> list[tuple[int, nn.Module]]:
    return [(layer, module) for layer, same in enumerate(found.values()) for module in same]


def _is_backward() -> bool:
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage]


class _Watch(TorchFunctionMode):
    """Sees the calls of topk in a router."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.width = 0
        """Of the scores in the last one: how many experts there are."""
        self.indices: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _TOPK:
            self.calls += 1
            self.width, self.indices = _first(args, kwargs).size(-1), result.indices
        return result


class _Replace(TorchFunctionMode):
    """Replaces what one call of topk chooses.

    Scores may have been masked before, so that topk shall not choose them (groups of experts). Where there is a route,
    values are taken from what they were: the live groups need not hold its experts.
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
    """For a run of a module before the one that counts: no graph, no random numbers drawn, no weights cached."""
    # PEFT's LoRA on parameters computes these inside of a cache
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
    """(B, T, K) of passes of (B * n, K), each of n tokens more of B sequences.

    Without a cache, each step of decoding runs all tokens so far again; then a token has what it had the first time.
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
