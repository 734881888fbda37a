"""Count what makes processes wait for one another, or a CPU for its GPU, and who causes it."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# operators whose result, or its shape, the CPU has to wait for
_WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "bincount", "equal")
_COLLECTIVES = ("gather", "reduce", "gather_for_metrics", "pad_across_processes")


def _caller() -> str:
    """The package whose code is innermost, of these three; "" for none."""
    frame = sys._getframe(2)
    while frame is not None:
        package = frame.f_globals.get("__name__", "").split(".")[0]
        if package in ("trl_steady", "trl", "transformers"):
            return package
        frame = frame.f_back  # type: ignore[assignment]
    return ""


class Syncs(TorchDispatchMode):
    """Counts by package; for a GPU's transfers, what would be one if the tensors were there."""

    def __init__(self) -> None:
        super().__init__()
        self.transfers: Counter[str] = Counter()
        self.collectives: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "index_put_") and any(
            isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1]
        )
        to_cpu = name == "_to_copy" and str((kwargs or {}).get("device")) == "cpu"
        if name in _WAITS or by_mask or to_cpu:
            self.transfers[_caller()] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[Syncs]:
    """Count inside this context."""
    own = {name: getattr(Accelerator, name) for name in _COLLECTIVES}
    with Syncs() as syncs:

        def counting(name: str) -> Any:
            def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
                syncs.collectives[_caller()] += 1
                return own[name](self, *arguments, **keywords)

            return call

        def listed(tensor: Tensor) -> Any:  # no operator does it
            syncs.transfers[_caller()] += 1
            return tolist(tensor)

        tolist, Tensor.tolist = Tensor.tolist, listed
        for name in own:
            setattr(Accelerator, name, counting(name))
        try:
            yield syncs
        finally:
            Tensor.tolist = tolist
            for name, method in own.items():
                setattr(Accelerator, name, method)
