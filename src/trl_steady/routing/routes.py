"""Routes as data: which experts of each layer each token goes through.

A tensor of shape (..., L, K) for L layers with routers and K experts a token, in the smallest integer dtype that has
all experts and one value more, "no route": a token without one is left to the live router. Expert 0 is an expert, and
never a filler. Cutting, padding and joining are a tensor's own.
"""

# pyright: reportUnknownMemberType=false
# torch's annotations are partial

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

__all__ = [
    "Routed",
    "aligned",
    "dtype_of",
    "from_engine",
    "is_route",
    "no_route",
    "no_routes",
    "shared",
    "stitched",
    "to_engine",
]


class Routed(NamedTuple):
    """Tokens that an engine has had, with their routes."""

    ids: list[int]
    """(T,) of a prompt and what was generated for it."""
    routes: Tensor
    """(T - 1, L, K), since the last token was sampled and not yet fed, or (T, L, K)."""


def dtype_of(num_experts: int) -> torch.dtype:
    """The smallest integer dtype for routes among so many experts: uint8 up to 255 of them."""
    if num_experts <= 255:
        return torch.uint8
    return torch.int16 if num_experts <= 2**15 else torch.int32


def no_route(dtype: torch.dtype) -> int:
    """What stands for "no route": 255 in uint8, else -1."""
    return 255 if dtype == torch.uint8 else -1


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


def _widened(routes: Tensor, dtype: torch.dtype) -> Tensor:
    return routes.to(dtype).where(is_route(routes).unsqueeze(-1), no_route(dtype))


def to_engine(routes: Tensor) -> Tensor:
    """The same in int32 with -1 where there is no route."""
    return routes.to(torch.int32).where(is_route(routes).unsqueeze(-1), -1)


def stitched(turns: Sequence[Sequence[Routed]]) -> list[Routed]:
    """One sequence for each of the first turn, with what later turns went on with.

    A token has the routes of the turn in which it first had some: a sampled token those under which it was sampled,
    the last of a turn those of the next turn, which fed it.

    Args:
        turns: of the first turn all sequences; of a later one those that went on, in the same order, each beginning
            with all tokens that it had before.

    Raises:
        ValueError: a sequence that goes on with none of those before it.
    """
    sequences = [Routed(list(each.ids), _of_all(each)) for each in turns[0]]
    for number, turn in enumerate(turns[1:], start=2):
        owners = _owners([each.ids for each in sequences], [each.ids for each in turn])
        if owners is None:
            raise ValueError(
                f"turn {number} of a rollout has sequences that begin with none of those before it, so that their "
                "routes cannot be put together."
            )
        for own, later in zip(owners, turn, strict=True):
            routes, known = _of_all(later), sequences[own].routes
            dtype = max(routes.dtype, known.dtype, key=lambda each: each.itemsize)
            routes, known = _widened(routes, dtype), _widened(known, dtype)
            routes[: len(known)] = known.where(is_route(known).unsqueeze(-1), routes[: len(known)])
            sequences[own] = Routed(list(later.ids), routes)
    return sequences


def _owners(before: Sequence[list[int]], later: Sequence[list[int]]) -> list[int] | None:
    """Which sequence each later one goes on with, in order: those ways of all that share the most tokens.

    None if there is none.
    """
    best: list[tuple[int, list[int]] | None] = [(0, []) for _ in range(len(before) + 1)]
    for ids in later:  # best[i]: of what has been placed so far, among the first i
        following: list[tuple[int, list[int]] | None] = [None]
        for i, own in enumerate(before):
            ways = [following[i]]
            rest = best[i]
            if rest is not None and ids[: len(own)] == own:
                ways.append((rest[0] + len(own), [*rest[1], i]))
            known = [way for way in ways if way is not None]
            following.append(max(known, key=lambda way: way[0]) if known else None)
        best = following
    return None if best[-1] is None else best[-1][1]


def _of_all(routed: Routed) -> Tensor:
    """(T, L, K): with a row for the last token."""
    tokens, rows = len(routed.ids), len(routed.routes)
    if rows not in (tokens - 1, tokens):
        raise ValueError(
            f"the engine returned routes of {rows} tokens of a sequence of {tokens}; the last alone may have none."
        )
    routes = no_routes((tokens, *routed.routes.shape[1:]), routed.routes.dtype, routed.routes.device)
    routes[:rows] = routed.routes
    return routes


def aligned(sequences: Sequence[Routed], input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Routes of a padded batch, whose tokens the sequences are, perhaps cut off at their ends.

    Args:
        sequences: B, in the order of the rows; of those that began alike either may have gone on.
        input_ids: (B, T), padded on either side or both.
        attention_mask: (B, T), not 0 = token.

    Returns:
        (B, T, L, K) on the device of `input_ids`; padding has no route, nor has a last token without a row.

    Raises:
        ValueError: another number of sequences, or a row of other tokens than any of them.
    """
    if len(sequences) != len(input_ids):
        raise ValueError(f"{len(sequences)} sequences have routes, and the batch has {len(input_ids)}.")
    mask = attention_mask.bool().cpu()
    tokens = [cast(list[int], ids[own].tolist()) for ids, own in zip(input_ids.cpu(), mask, strict=True)]
    dtype = max((routed.routes.dtype for routed in sequences), key=lambda each: each.itemsize)
    batch = no_routes((*input_ids.shape, *sequences[0].routes.shape[1:]), dtype)
    free = dict(enumerate(sequences))
    for row in sorted(free, key=lambda row: -len(tokens[row])):
        own = tokens[row]
        fitting = next((i for i in (row, *free) if i in free and free[i].ids[: len(own)] == own), None)
        if fitting is None:
            raise ValueError(
                f"sequence {row} of the rollout has other tokens than the engine routed: a subclass or a tool may "
                "have changed them after they were sampled. router_replay='R2' does not need the engine's routes."
            )
        routes = _of_all(free.pop(fitting))[: len(own)]
        batch[row, mask[row].nonzero().squeeze(-1)] = _widened(routes.cpu(), dtype)
    return batch.to(input_ids.device)


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
