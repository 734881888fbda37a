"""The devices that the tests of `tests/gpu` run on: CUDA in `make test-gpu`, the CPU in `make test` on other machines.

A test gets a `Place` and asks it for its device, its sizes, and its attention kernels. On the CPU, the kernels of
`tests/oracles/kernels.py` compute what a GPU's kernels compute.
"""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar
from unittest.mock import patch

import pytest
import torch

from tests.oracles import kernels
from trl_steady.features.padding_free import attention

KERNELS = ("sdpa", "flash_attention_2")
_BF16 = (8, 0)  # the first compute capability whose matrix units take bf16
_T = TypeVar("_T")


class Place(NamedTuple):
    """A device and what a test needs to know about it."""

    name: str

    @property
    def is_cuda(self) -> bool:
        """Return whether this is a real GPU."""
        return self.name == "cuda"

    @property
    def device(self) -> torch.device:
        """Return the device of tensors."""
        return torch.device("cuda", 0) if self.is_cuda else torch.device("cpu")

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the options of a trainer that trains here, in float32."""
        return {"use_cpu": not self.is_cuda, "bf16": False}

    @property
    def has_varlen(self) -> bool:
        """Return whether "sdpa" has a call for all sequences of a packed row, inside `kernel`: on a GPU with bf16."""
        return not self.is_cuda or (attention.varlen_attn is not None and torch.cuda.get_device_capability() >= _BF16)

    def choose(self, cpu: _T, cuda: _T) -> _T:
        """Return the size for this device."""
        return cuda if self.is_cuda else cpu

    def need_bf16(self) -> None:
        """Skip the test on a GPU that only emulates bf16."""
        if self.is_cuda and torch.cuda.get_device_capability() < _BF16:
            pytest.skip(f"bf16 needs compute capability 8.0, this GPU has {torch.cuda.get_device_capability()}")

    def need_kernel(self, name: str) -> None:
        """Skip the test where a kernel is missing."""
        self.need_bf16()
        if self.is_cuda and name == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
            pytest.skip("flash_attn is not installed")

    @contextmanager
    def kernel(self, name: str, *models: Any) -> Iterator[None]:
        """Let models attend with a kernel; on the CPU with what stands for it."""
        self.need_kernel(name)
        for model in models:
            model.set_attn_implementation(name) if self.is_cuda else kernels.use(model, name)
        with kernels.varlen_before_gqa() if self.is_cuda else kernels.KERNELS[name]():
            yield

    @contextmanager
    def counted_varlen(self) -> Iterator[Any]:
        """Count the calls of torch's function for a packed row; None where there is none, or another stands for it."""
        if self.is_cuda and attention.varlen_attn is not None:
            with patch.object(attention, "varlen_attn", wraps=attention.varlen_attn) as calls:
                yield calls
        else:
            yield None


def everywhere(test: Callable[..., None] | None = None, *, slow: bool = False) -> Any:
    """Run a test on both places. `slow`: its run on the CPU is for `make test-slow`."""
    on_cpu = [pytest.mark.skipif(torch.cuda.is_available(), reason="make test-gpu runs this on CUDA")]
    on_cuda = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
    mark = pytest.mark.parametrize(
        "place",
        [
            pytest.param(Place("cpu"), id="cpu", marks=[*on_cpu, *([pytest.mark.slow] if slow else [])]),
            pytest.param(Place("cuda"), id="cuda", marks=on_cuda),
        ],
    )
    return mark if test is None else mark(test)
