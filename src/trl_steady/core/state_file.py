"""Files of a checkpoint that hold a script's own objects: what is saved can be loaded, and runs no foreign code."""

from collections.abc import Mapping, Sequence, Set
from numbers import Number
from pathlib import Path, PosixPath, WindowsPath
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from trl_steady.core.user_warning import warn_user

_NUMBERS_AND_TEXT: list[Any] = [int, float, complex, str, bytes]
_KEPT = {type(None), bool, *_NUMBERS_AND_TEXT, bytearray, PosixPath, WindowsPath}
# what pickles of paths, arrays and NumPy's numbers call
_CALLED: list[Any] = [
    PosixPath,
    WindowsPath,
    np.ndarray,
    np.dtype,
    np.ones(1).__reduce__()[0],
    np.float64(0).__reduce__()[0],
]
_CALLED.extend({type(np.dtype(kind)) for kind in np.sctypeDict.values()})


def write_state(state: object, file: Path) -> None:
    """Write tensors, arrays, numbers, text and paths, in any containers. Other objects become their text."""
    torch.save(_loadable(state), file)


def read_state(file: Path, device: str) -> Any:
    """Return what `write_state` has written, with tensors on `device`."""
    with torch.serialization.safe_globals(_CALLED):
        return torch.load(file, map_location=device, weights_only=True)


def _loadable(value: object) -> object:
    """Return a value in types that `read_state` takes, such as a dict for any mapping."""
    if type(value) in _KEPT:
        return value
    if isinstance(value, Tensor):
        value = value.detach()
        if value.layout != torch.strided:
            value = value.to_dense()
        return value.as_subclass(Tensor)
    if isinstance(value, (np.ndarray, np.generic)):
        if value.dtype.hasobject or value.dtype.names:  # records become tuples
            return _loadable(value.tolist())
        return value if isinstance(value, np.generic) else np.asarray(value)
    for kind in _NUMBERS_AND_TEXT:
        if isinstance(value, kind):  # an enum, for example
            return kind(*kind.__getnewargs__(value))
    if isinstance(value, Number):  # as Decimal and Fraction, of which TRL's metrics take a mean
        return float(cast(Any, value))
    if isinstance(value, Mapping):
        return {_hashable(key): _loadable(item) for key, item in value.items()}
    if isinstance(value, Set) and not isinstance(value, Sequence):  # an ordered set stays in order
        return {_hashable(item) for item in value}
    for kind, container in ((tuple, tuple), (Sequence, list)):
        if isinstance(value, kind):
            return container(map(_loadable, value))
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    warn_user(f"a checkpoint holds a {name} of a rollout as text. Use numbers or text.")
    return str(value)


def _hashable(value: object) -> object:
    """Return a key of a dict, or a member of a set: it must stay hashable, so a set in a set becomes a tuple."""
    is_text = isinstance(value, (str, bytes))
    if isinstance(value, (Set, Sequence)) and not is_text:
        return tuple(map(_hashable, value))
    return _loadable(value)
