"""Recording which experts the routers of a model choose, and making them choose recorded ones.

A router decides by `topk` over the scores of all experts. That one call is watched, or its result replaced: indices by
recorded ones, values by the live scores at these. What the router makes of them (normalising, scaling) stays its own,
so that gate weights and their gradients are those of the live router.
"""

# pyright: reportUnknownMemberType=false
# torch's annotations are partial

import functools
import re
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from trl_steady.routing.finding import find_routers
from trl_steady.routing.routes import dtype_of, is_route

__all__ = ["Recording", "Replay", "Routers"]

_TOPK = (torch.topk, torch.Tensor.topk)
_MASKED_FILL = (torch.masked_fill, torch.Tensor.masked_fill)


class _Use:
    """What the routers of a model are being used for."""

    def __init__(self, names: Sequence[str], calls: dict[int, int]) -> None:
        self.names = names
        self._calls = calls
        """Of a layer: how often its router calls topk, the last time to decide; known once it has run."""
        self._fired = [0] * len(names)

    def check(self) -> None:
        """Hold that in one pass of the model, just ended, each router has run once.

        Raises:
            RuntimeError: naming the first that has not.
        """
        for name, times in zip(self.names, self._fired, strict=True):
            if times != 1:
                raise RuntimeError(
                    f"the router {name} ran {times} times in one pass of the model, where routes are of one. Another "
                    "implementation may stand in for its layer, or the layer is used more than once."
                )

    def _decided(self, layer: int, watch: "_Watch") -> Tensor:
        if watch.indices is None:
            raise RuntimeError(f"the router {self.names[layer]} chose experts without calling topk.")
        self._calls[layer] = watch.calls
        return watch.indices


class Recording(_Use):
    """What routers have chosen, in one pass of the model or in several."""

    def __init__(self, names: Sequence[str], calls: dict[int, int]) -> None:
        super().__init__(names, calls)
        self._chosen: list[list[Tensor]] = [[] for _ in names]

    def route(self, layer: int, forward: Callable[[], Any]) -> Any:
        """Run the router of a layer, and keep what it chooses."""
        self._fired[layer] += 1
        with _Watch() as watch:
            result = forward()
        chosen = self._decided(layer, watch).detach()
        self._chosen[layer].append(chosen.flatten(0, -2).to(dtype_of(watch.width)))
        return result

    def routes(self) -> Tensor:
        """(N, L, K) of the N tokens of a single pass.

        Raises:
            RuntimeError: a router that has not run exactly once; layers that choose different numbers of experts.
        """
        self.check()
        return self._stacked([chosen for (chosen,) in self._chosen])

    def routes_of_generation(self, sequences: int) -> Tensor:
        """(B, T, L, K) of a prefill and the steps of decoding that followed, T tokens for each of B sequences.

        Without a cache, each step runs all tokens so far again; then a token has the routes of its first time.

        Raises:
            RuntimeError: routers that have not run equally often; passes that do not continue one another.
        """
        return self._stacked([_continued(chosen, sequences) for chosen in self._chosen])

    def _stacked(self, layers: Sequence[Tensor]) -> Tensor:
        shapes = {name: tuple(chosen.shape) for name, chosen in zip(self.names, layers, strict=True)}
        if len(set(shapes.values())) > 1:
            raise RuntimeError(f"the routers of different layers have chosen different numbers of experts: {shapes}.")
        return torch.stack(list(layers), dim=-2)


class Replay(_Use):
    """What routers are made to choose, and how far that is from what they would have chosen."""

    def __init__(self, names: Sequence[str], calls: dict[int, int], routes: Tensor) -> None:
        super().__init__(names, calls)
        self._routes = routes
        self._has_route = is_route(routes)
        self._highest = int(routes.where(self._has_route.unsqueeze(-1), 0).max()) if routes.numel() else 0
        self._changed: list[Tensor | None] = [None for _ in names]

    @property
    def changed(self) -> Tensor:
        """(L,) of the replayed choices those that the live router would not have made, in the first pass."""
        return torch.stack([self._routes.new_zeros((), dtype=torch.long) if n is None else n for n in self._changed])

    @property
    def replayed(self) -> Tensor:
        """(L,) how many choices are replayed."""
        return self._has_route.sum(0) * self._routes.size(-1)

    def route(self, layer: int, forward: Callable[[], Any]) -> Any:
        """Run the router of a layer, with its choice replaced."""
        self._fired[layer] += 1
        if layer not in self._calls:
            with _leaving_no_trace(self._routes.device), _Watch() as watch:
                forward()
            self._decided(layer, watch)
        call = self._calls[layer]
        with _Replace(call, functools.partial(self._choose, layer), self._has_route[:, layer]) as mode:
            result = forward()
        if mode.calls != call:
            raise RuntimeError(
                f"the router {self.names[layer]} called topk {mode.calls} times, and {call} times when it was first "
                "seen, so that its choice cannot be told: it chooses otherwise in training, or for other inputs."
            )
        return result

    def _choose(self, layer: int, scores: Tensor, live: Tensor) -> Tensor:
        routes, has_route = self._routes[:, layer], self._has_route[:, layer]
        of_live = live.flatten(0, -2)
        if of_live.shape != routes.shape:
            raise RuntimeError(
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
        ValueError: no routers, or experts that are not chosen by `topk`.
    """

    def __init__(self, model: nn.Module) -> None:
        found = find_routers(model)
        if not found:
            raise ValueError(f"{type(model).__name__} has no routers: it is not a mixture of experts.")
        self.names = list(found)
        """Of the layers with routers, in order."""
        numbers = [re.findall(r"\.(\d+)\.", f".{name}.") for name in self.names]
        self.decoder_layers = [int(number[0]) if number else -1 for number in numbers]
        """Which of all layers these are, counted from 0, by the first number in their names."""
        self._modules = [(layer, module) for layer, same in enumerate(found.values()) for module in same]
        self._calls: dict[int, int] = {}
        self._use: Recording | Replay | None = None

    @contextmanager
    def recording(self) -> "Generator[Recording]":
        """Record what routers choose, in one pass of the model or in several."""
        with self._used_for(Recording(self.names, self._calls)) as recording:
            yield recording

    @contextmanager
    def replaying(self, routes: Tensor) -> "Generator[Replay]":
        """Make routers choose given experts.

        Must last until the end of backward where gradient checkpointing runs layers again.

        Args:
            routes: (N, L, K) of the N tokens that the model gets, row by row; tokens without a route choose as ever.

        Raises:
            ValueError: routes of another number of layers, tokens or experts a token; an expert that there is not.
        """
        if routes.dim() != 3 or routes.size(1) != len(self.names):
            raise ValueError(
                f"routes of shape {tuple(routes.shape)} for {len(self.names)} layers with routers ({self.names[0]} "
                "to " + f"{self.names[-1]}): they must have shape (tokens, layers, experts per token)."
            )
        with self._used_for(Replay(self.names, self._calls, routes)) as replay:
            yield replay

    @contextmanager
    def _used_for(self, use: Any) -> Generator[Any]:
        before, self._use = self._use, use
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
        assert self._use is not None
        return self._use.route(layer, functools.partial(forward, *arguments, **keywords))


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
        has_route = self._has_route.view(*indices.shape[:-1], 1)
        values = torch.where(has_route, scores.gather(-1, indices), result.values)
        return torch.return_types.topk((values, indices))


@contextmanager
def _leaving_no_trace(device: torch.device) -> Generator[None]:
    """For a run of a module before the one that counts: no graph, no random numbers drawn, no weights cached."""
    # PEFT's LoRA on parameters computes these inside of a cache
    cached = cast(int, parametrize._cache_enabled)  # pyright: ignore[reportPrivateUsage]
    parametrize._cache_enabled = 0  # pyright: ignore[reportPrivateUsage]
    devices = [] if device.type == "cpu" else [device]
    try:
        kind = device.type if devices else "cuda"
        forked = cast("AbstractContextManager[None]", torch.random.fork_rng(devices, device_type=kind))
        with torch.no_grad(), forked:
            yield
    finally:
        parametrize._cache_enabled = cached  # pyright: ignore[reportPrivateUsage]
        torch.clear_autocast_cache()


def _first(args: Any, kwargs: Any) -> Tensor:
    return args[0] if args else kwargs["input"]


def _continued(passes: Sequence[Tensor], sequences: int) -> Tensor:
    """(B, T, K) of passes of (B * n, K)."""
    parts: list[Tensor] = []
    known = 0
    for chosen in passes:
        part = chosen.view(sequences, -1, chosen.size(-1))
        if parts and part.size(1) == known + 1:
            part = part[:, -1:]
        parts.append(part)
        known += part.size(1)
    return torch.cat(parts, dim=1)
