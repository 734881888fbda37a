"""The memory of a host beside that of a device: arrays of numpy, which torch does not count."""

import weakref
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import modeling_utils


class Host(torch.autograd.graph.saved_tensors_hooks):
    """Stands in place of torch's `save_on_cpu`, which would not move the tensors of a CPU."""

    held: ClassVar[int] = 0
    """Bytes that graphs hold."""
    most: ClassVar[int] = 0
    taken: ClassVar[int] = 0
    """Number of tensors so far."""

    def __init__(self, **_: Any) -> None:
        super().__init__(self._pack, self._unpack)

    @staticmethod
    def _pack(tensor: Tensor) -> tuple[Any, torch.dtype]:
        array = np.array(tensor.detach().contiguous().view(torch.uint8), copy=True)
        Host.taken += 1
        Host.held += array.nbytes
        Host.most = max(Host.most, Host.held)
        weakref.finalize(array, Host._release, array.nbytes)
        return array, tensor.dtype

    @staticmethod
    def _unpack(packed: tuple[Any, torch.dtype]) -> Tensor:
        array, dtype = packed
        return torch.from_numpy(array).clone().view(dtype)

    @staticmethod
    def _release(size: int) -> None:
        Host.held -= size


def give(monkeypatch: pytest.MonkeyPatch) -> type[Host]:
    """Let `offload` find a device whose tensors this host can take."""
    for name in ("held", "most", "taken"):
        monkeypatch.setattr(Host, name, 0)
    monkeypatch.setattr(modeling_utils, "save_on_cpu", Host)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    return Host
