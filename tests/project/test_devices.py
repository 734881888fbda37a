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
FINE: dict[str, Callable[[Tensor, Tensor], object]] = {
    "with a number": lambda own, other: own + other[0],
    "copied into": lambda own, other: own[:2].copy_(other[:2]),
    "assigned to a slice": lambda own, other: own.__setitem__(slice(None, 2), other[:2]),
    "moved": lambda own, other: own + other.to(own.device) + other.to(own) + other.cuda(),
    "at an index on the CPU": lambda own, other: own[other.argsort()],
    "with one made there": lambda own, other: own + torch.arange(4, device=own.device) + own.new_zeros(4),
    "on the CPU": lambda own, other: own.cpu() + other + own.to("cpu", torch.float64),
}


@pytest.mark.parametrize("name", MIXED)
def test_mixed_devices_are_refused(name: str) -> None:
    with pretended_gpu(), pytest.raises(RuntimeError, match="same device"):
        MIXED[name](torch.arange(4.0, device=CUDA), torch.arange(4.0))


@pytest.mark.parametrize("name", FINE)
def test_the_rest_is_as_on_the_cpu(name: str) -> None:
    expected = FINE[name](torch.arange(4.0), torch.arange(4.0)) if name != "moved" else torch.arange(4.0) * 4
    with pretended_gpu():
        result = FINE[name](torch.arange(4.0, device="cuda"), torch.arange(4.0))
        if isinstance(expected, Tensor):
            assert isinstance(result, Tensor) and result.device == (
                CUDA if name != "on the CPU" else result.cpu().device
            )
            assert result.tolist() == expected.tolist()


def test_values_gradients_and_waits() -> None:
    with pretended_gpu() as gpu:
        weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=CUDA).requires_grad_()
        own = torch.tensor([0.0, 5.0], device=CUDA)
        (weight @ own).sum().backward()
        assert weight.grad is not None and weight.grad.device == CUDA and weight.grad.tolist() == [[0, 5], [0, 5]]
        assert gpu.waits == ["tolist"]
        assert int(own.nonzero()) == 1 and bool((own > 1).any()) and own[own > 1].cpu().tolist() == [5.0]
        assert len(gpu.waits) == 6
        view = own[1:]
        view += 1
        assert own.tolist() == [0.0, 6.0]


def test_bytes_held_are_those_of_whole_storages_once() -> None:
    large, small = torch.zeros(100), torch.zeros(10)
    assert bytes_held({"a": [large[3:4]]}, (large[:1], small[:1].clone())) == 404
    with pretended_gpu():
        moved = large.to(CUDA)
        assert bytes_held([moved[:, None][0], moved[:2]]) == 400
