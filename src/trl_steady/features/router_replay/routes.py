"""Routes as data: the experts of each layer that each token goes through.

Routes are a tensor of shape (..., M, K) for M layers with routers and K experts a token. Its dtype is the smallest
integer dtype that has a value for each expert and one more value, "nothing": such a token is left to the live router.
Expert 0 is always an expert, never padding. Tensor operations cut, pad and join routes.
"""

import base64
import io
import itertools
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from trl_steady.core.token_record import nothing

_NUMPY_DTYPES = {torch.uint8: np.uint8, torch.int16: np.int16, torch.int32: np.int32}


def route_dtype(num_experts: int) -> torch.dtype:
    """Return the smallest integer dtype for routes among this number of experts: uint8 for up to 255."""
    if num_experts <= 255:
        return torch.uint8
    return torch.int16 if num_experts <= 2**15 else torch.int32


def is_route(routes: Tensor) -> Tensor:
    """Return (..., M) bool for routes (..., M, K), True where there is a route."""
    return routes[..., 0] != nothing(routes.dtype)


def from_engine(array: object, layers: Sequence[int]) -> Tensor:
    """Convert the integers (T, M, K) of an engine to routes. A server sends them as a NumPy file in base64.

    A row of -1 means that a token has no route. `layers` are the (M,) numbers of the decoder layers that have routers,
    counted from 0. The engine may also return rows for all decoder layers.

    Raises:
        ValueError: a row has -1 beside experts, or the same expert twice, which happens if the engine has not filled
            it in.
    """
    if isinstance(array, str):
        array = np.load(io.BytesIO(base64.b64decode(array)))
    routes = np.asarray(array)
    if routes.shape[1] != len(layers):
        routes = routes[:, list(layers)]
    dtype = route_dtype(int(routes.max(initial=0)) + 1)
    if routes.min(initial=0) < -1:
        routes = routes.clip(min=-1)
    result = routes.astype(_NUMPY_DTYPES[dtype])  # which makes -1 "nothing"
    wrong = _are_wrong(result, nothing(dtype))
    if wrong.any():
        token, layer = np.argwhere(wrong)[0].tolist()
        raise ValueError(
            f"the engine's routes of token {token} in layer {layer} are {routes[token, layer].tolist()}, and must be "
            "different experts. The engine has not captured them; it may capture routes in some of its layers only."
        )
    return torch.from_numpy(result)


def _are_wrong(routes: np.ndarray, missing: int) -> np.ndarray:
    """Return (T, M) bool, True for the routes (T, M, K) with an expert twice or with `missing` beside experts.

    Comparing contiguous columns takes a tenth of the time of sorting rows.
    """
    columns = np.ascontiguousarray(routes.reshape(-1, routes.shape[-1]).T)
    has_twice = np.zeros(columns.shape[1], dtype=bool)
    for one, other in itertools.combinations(columns, 2):
        has_twice |= one == other
    is_missing = columns == missing
    wrong = (has_twice | is_missing.any(0)) & ~is_missing.all(0)
    return wrong.reshape(routes.shape[:-1])


def share_prefix_routes(routes: Tensor, prefixes: Tensor) -> Tensor:
    """Give sequences with the same prefix the same routes (B, T, M, K) for it.

    `prefixes` (B, P) are the tokens of the first P columns, with a number that is no token id in place of padding.
    Rows with equal prefixes form a group. In each column, a group has the routes of its first row that has some.
    """
    count, width = prefixes.shape
    result = routes.clone()
    group_of_row = cast(Tensor, prefixes.unique(dim=0, return_inverse=True)[1])
    groups = group_of_row.unsqueeze(1).expand_as(prefixes)
    rows = torch.arange(count, device=routes.device).unsqueeze(1)
    known = rows.where(is_route(routes[:, :width]).any(-1), count)
    first = torch.full_like(groups, count).scatter_reduce(0, groups, known, "amin").gather(0, groups)
    result[:, :width] = routes[first.where(first < count, rows), torch.arange(width, device=routes.device)]
    return result
