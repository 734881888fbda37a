"""Routes as data: which experts of each layer each token goes through.

A tensor of shape (..., L, K) for L layers with routers and K experts a token, in the smallest integer dtype that has
all experts and one value more, "no route": a token without one is left to the live router. Expert 0 is an expert, and
never a filler. Cutting, padding and joining are a tensor's own.
"""

# pyright: reportUnknownMemberType=false
# torch's annotations are partial

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from trl_steady.turns import nothing

__all__ = [
    "dtype_of",
    "from_engine",
    "is_route",
    "no_route",
    "no_routes",
    "shared",
    "to_engine",
]


def dtype_of(num_experts: int) -> torch.dtype:
    """The smallest integer dtype for routes among so many experts: uint8 up to 255 of them."""
    if num_experts <= 255:
        return torch.uint8
    return torch.int16 if num_experts <= 2**15 else torch.int32


def no_route(dtype: torch.dtype) -> int:
    """What stands for "no route": 255 in uint8, else -1."""
    return nothing(dtype)


def no_routes(shape: Sequence[int], dtype: torch.dtype, device: Any = None) -> Tensor:
    """Routes of tokens that have none."""
    return torch.full(tuple(shape), no_route(dtype), dtype=dtype, device=device)


def is_route(routes: Tensor) -> Tensor:
    """(..., L) bool of (..., L, K): where there is a route."""
    return routes[..., 0] != no_route(routes.dtype)


def from_engine(array: Any, *, layers: Sequence[int] | None = None) -> Tensor:
    """Routes of an engine's integers, where a row of -1 says that a token has none.

    Args:
        array: (T, L, K) NumPy array, tensor or nested lists.
        layers: (L,) which decoder layers have routers, counted from 0, for an engine that may return rows for all.

    Raises:
        ValueError: another shape; other layers; a row with an expert twice, as in rows that nobody has filled in, or
            with -1 beside experts.
    """
    routes = torch.as_tensor(array)
    if routes.dtype in (torch.uint16, torch.uint32, torch.uint64):  # which torch does not compare
        routes = routes.long()
    if routes.dim() != 3 or routes.is_floating_point():
        raise ValueError(
            f"routes must be integers of shape (tokens, layers, experts per token), not {routes.dtype} of shape "
            f"{tuple(routes.shape)}."
        )
    if layers is not None and routes.size(1) != len(layers):
        if routes.size(1) <= max(layers) or len(set(layers)) < len(layers):
            raise ValueError(
                f"the engine returned routes of {routes.size(1)} layers, and the model has routers in its decoder "
                f"layers {', '.join(map(str, layers))}, counted from 0: it serves another model."
            )
        routes = routes[:, list(layers)]
    missing = routes < 0
    wrong = missing.any(-1) & ~missing.all(-1)
    for distance in range(1, routes.size(-1)):
        wrong |= (routes[..., distance:] == routes[..., :-distance]).any(-1) & ~missing.all(-1)
    if wrong.any():
        token, layer = cast(list[int], wrong.nonzero()[0].tolist())
        raise ValueError(
            f"the engine's routes of token {token} in layer {layer} are {routes[token, layer].tolist()}: a token goes "
            "through different experts. The engine has not captured them; it may do so in part of its layers only."
        )
    dtype = dtype_of(int(routes.max()) + 1 if routes.numel() else 1)
    return routes.to(dtype).where(~missing, no_route(dtype))


def to_engine(routes: Tensor) -> Tensor:
    """The same in int32 with -1 where there is no route."""
    return routes.to(torch.int32).where(is_route(routes).unsqueeze(-1), -1)


def shared(routes: Tensor, prefixes: Tensor) -> Tensor:
    """Routes in which sequences that begin alike have, for that beginning, the routes of one of them.

    Args:
        routes: (B, T, L, K).
        prefixes: (B, P) the first P tokens of each, with a number that is no token in the place of padding.

    Returns:
        (B, T, L, K); in each column of a group of like prefixes the routes of the first row that has some there.
    """
    result, width = routes.clone(), prefixes.size(1)
    columns = torch.arange(width, device=routes.device)
    groups = cast(Tensor, prefixes.unique(dim=0, return_inverse=True)[1])
    for group in range(int(groups.max()) + 1):
        rows = groups == group
        own = routes[rows, :width]
        first = is_route(own).any(-1).int().argmax(0)
        result[rows, :width] = own[first, columns]
    return result
