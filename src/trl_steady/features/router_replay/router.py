"""Find the routers of a mixture of experts, and read or replace the choice that one makes.

A router chooses by `topk` over the scores of all experts, so that its choice is the result of this call.
"""

import functools
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

_TOPK = (torch.topk, torch.Tensor.topk)
_MASKED_FILL = (torch.masked_fill, torch.Tensor.masked_fill)

# Modules that wrap another one, or several of which one is used
_WRAPPERS = re.compile(
    r"\.(base_layer|original_module|modules_to_save\.[^.]+|_checkpoint_wrapped_module|_fsdp_wrapped_module|_orig_mod)"
    r"(?=\.|$)"
)
# transformers names all its routers so, in `_can_record_outputs` of its models too; the experts are their neighbours
_ROUTER = re.compile("Router$|Gate$|Gating$")
# Routers that choose by a fixed table of tokens, and leave nothing to replay
_FIXED = re.compile("HashRouter$")
# Routers that return scores, from which the module that holds them chooses
_SCORES_ONLY = re.compile("^DbrxRouter$")


def find_routers(model: nn.Module) -> dict[str, list[nn.Module]]:
    """Return the routers of a model in the order of its layers.

    A router stands beside experts and has the class name of one. If experts have no such neighbour, then the module
    that holds them is their router, as in models that route by a linear layer. A run of a router that never calls
    `topk` raises an error, so that an unknown way to choose is not missed.

    Returns:
        Name without wrappers -> modules. A name has several modules if one of them is used at a time (PEFT's
        `modules_to_save`).
    """
    named = dict(cast("Iterator[tuple[str, nn.Module]]", model.named_modules()))
    plain = {name: _WRAPPERS.sub("", name) for name in named}  # names without wrappers

    holders: set[str | None] = set()  # modules that hold experts
    for name, module in named.items():
        parent, _, last_part = name.rpartition(".")
        holder = plain.get(parent)
        if holder != plain[name] and _are_experts(last_part, module):
            holders.add(holder)

    choosing: set[str] = set()  # routers beside experts
    alone = set(holders)  # holders without such a router
    for name, module in named.items():
        kind = type(module).__name__
        holder = plain[name].rpartition(".")[0]
        if holder in holders and _ROUTER.search(kind) and not _SCORES_ONLY.search(kind):
            choosing.add(name)
            alone -= _with_parents(plain[name])

    routers: dict[str, list[nn.Module]] = {}
    for name, module in named.items():
        is_fixed = _FIXED.search(type(module).__name__) is not None
        if plain[name] in alone or (name in choosing and not is_fixed):
            routers.setdefault(plain[name], []).append(module)
    return routers


def _with_parents(name: str) -> set[str]:
    """Return the name of a module and those of all modules that hold it, but for the model itself."""
    names: set[str] = set()
    while name:
        names.add(name)
        name = name.rpartition(".")[0]
    return names


def _are_experts(name: str, module: nn.Module) -> bool:
    return ("experts" in name and "shared" not in name) or "Experts" in type(module).__name__


class RoutingError(ValueError):
    """Error for a model whose routes cannot be recorded or replayed. The message names the option."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"router_replay: {problem} Leave router_replay unset.")


class Router:
    """The router of one layer, and the call of topk by which it chooses.

    Some routers call topk several times, for example over groups of experts first. The last call decides.
    """

    def __init__(self, name: str, modules: Sequence[nn.Module]) -> None:
        self.name, self.modules = name, modules
        self._calls: int | None = None  # of topk in each run; known after the first

    @property
    def decoder_layer(self) -> int:
        """Number of the router's layer in its stack of layers, counted from 0."""
        numbers = re.findall(r"\.(\d+)", self.name)
        return int(numbers[0]) if numbers else 0

    def watch(self, run: functools.partial[Any]) -> tuple[Any, Tensor, int]:
        """Run the router, and return its result, the experts (..., K) that it chose, and the number of all experts."""
        with _TopkCalls() as topk:
            result = run()
        self._check(topk.count)
        assert topk.indices is not None
        return result, topk.indices, topk.width

    def choose(self, run: functools.partial[Any], replace: Callable[..., object], device: torch.device) -> Any:
        """Run the router with `replace(scores, topk's result)` as its choice, and return its result.

        A router that has not run before runs twice, the first time only to tell which call of topk decides.
        """
        if self._calls is None:
            with _leave_no_trace(device):
                copies, named_copies = tree_map_only(Tensor, torch.clone, (run.args, run.keywords))
                self.watch(functools.partial(run.func, *copies, **named_copies))
        assert self._calls is not None
        with _TopkCalls(self._calls, replace) as topk:
            result = run()
        self._check(topk.count)
        return result

    def _check(self, calls: int) -> None:
        """Raise if the router has not called topk, or another number of times than in its first run."""
        if self._calls is None and calls:
            self._calls = calls
        if calls == 0 or calls != self._calls:
            raise RoutingError(
                f"the router {self.name} called topk {calls} times instead of {self._calls or 1}. It may choose by "
                "other means, or differently in training."
            )


class _TopkCalls(TorchFunctionMode):
    """Observe the calls of topk in a router, and let `replace` change the result of one of them.

    A router may mask the scores of some groups of experts before topk. The experts of a route may be in masked groups,
    so `replace` gets the scores before the mask.
    """

    count = 0
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
        scores = args[0]
        self.count += 1
        self.width = scores.size(-1)
        self.indices = result.indices
        if self._replace is None or self.count != self._call:
            return result
        if self._masked is not None and scores is self._masked[0]:
            scores = self._masked[1]
        return self._replace(scores, result)


@contextmanager
def _leave_no_trace(device: torch.device) -> Generator[None]:
    """Run a module in advance without side effects: no graph, no change of the random state, no cached weights."""
    # PEFT's LoRA on parameters computes its weights inside this cache
    cached = cast(int, parametrize._cache_enabled)
    parametrize._cache_enabled = 0
    devices: list[torch.device] = []
    if device.type == "cuda" and torch.cuda.is_available():
        devices.append(device)
    try:
        forked = cast("AbstractContextManager[None]", torch.random.fork_rng(devices))
        with torch.no_grad(), forked:
            yield
    finally:
        parametrize._cache_enabled = cached
        torch.clear_autocast_cache()
