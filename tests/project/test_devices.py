"""The pretended GPU refuses what CUDA refuses, and nothing else."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.tools.devices import CUDA, bytes_held, pretended_gpu

MIXED: dict[str, Callable[[Tensor, Tensor], object]] = {
    "joined": lambda own, other: torch.cat([other, own]),
    "an empty one joined": lambda own, other: torch.cat([other[:0], own]),
    "added": lambda own, other: own + other,
    "compared": lambda own, other: other == own,
    "a CPU tensor at an index on the GPU": lambda own, other: other[own.long()],
    "put at an index": lambda own, other: own.index_put_((torch.tensor([0, 1, 2, 3]),), other),
    "chosen": lambda own, other: torch.where(own > 0, own, other),
}


@pytest.mark.parametrize("name", MIXED)
def test_mixed_devices_are_refused(name: str) -> None:
    with pretended_gpu(), pytest.raises(RuntimeError, match="same device"):
        MIXED[name](torch.arange(4.0, device=CUDA), torch.arange(4.0))


def test_bytes_held_are_those_of_whole_storages_once() -> None:
    large, small = torch.zeros(100), torch.zeros(10)
    assert bytes_held({"a": [large[3:4]]}, (large[:1], small[:1].clone())) == 404
    with pretended_gpu():
        moved = large.to(CUDA)
        assert bytes_held([moved[:, None][0], moved[:2]]) == 400
