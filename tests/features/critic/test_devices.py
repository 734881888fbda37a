"""A critic computes on the device of the hidden states, wherever its head was made."""

from types import SimpleNamespace

import pytest
import torch

from tests.tools.devices import CUDA, pretended_gpu
from trl_steady.features.critic.feature import Critic
from trl_steady.features.scalar_head import feature as scalar_head
from trl_steady.features.scalar_head.model import ScalarHeadModel


def test_a_critic_computes_where_the_hidden_states_are() -> None:
    """A model that is split over GPUs may have its last layer on another one than the head."""
    model = object.__new__(ScalarHeadModel)
    model.head = torch.nn.Linear(3, 1, bias=False)
    hidden = torch.arange(6.0).view(1, 2, 3)
    expected = model._values(hidden)
    with pretended_gpu():
        found = model._values(hidden.to(CUDA))
        assert found.device == CUDA
        values = found.tolist()
    assert values == expected.tolist()


def test_a_critic_on_the_cpu_is_sent_by_way_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed moves a model to the GPU after the trainer is built, and NCCL sends no tensor of the CPU."""
    gpu, sent = torch.device("meta"), []

    def broadcast(tensor: torch.Tensor) -> torch.Tensor:
        sent.append(tensor.device)
        return torch.ones(tensor.shape)

    monkeypatch.setattr(scalar_head, "broadcast", broadcast)
    feature = object.__new__(Critic)
    accelerator = SimpleNamespace(device=gpu)
    feature.trainer = SimpleNamespace(accelerator=accelerator, is_fsdp_enabled=False)  # type: ignore[assignment]
    head, adapter = torch.nn.Linear(3, 1, bias=False), torch.nn.Parameter(torch.zeros(3))
    feature.adopt(SimpleNamespace(head=head, parameters=[adapter, head.weight]))  # type: ignore[arg-type]
    assert sent == [gpu, gpu] and head.weight.device == gpu
    assert adapter.device.type == "cpu" and adapter.tolist() == [1, 1, 1] and not adapter.requires_grad
