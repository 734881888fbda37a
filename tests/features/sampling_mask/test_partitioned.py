"""A head that ZeRO-3 partitions is gathered equally often, whichever tokens of this process have sets."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import trl.trainer.utils
from torch import Tensor

from tests.features.sampling_mask.test_model import batch, build, call

KINDS = ["all", "some", "none"]


class Partitioned:
    """A stand-in for ZeRO-3: the head is empty except inside of gathers, which are counted."""

    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.whole = {
            parameter: parameter.detach().clone() for parameter in model.get_output_embeddings().parameters()
        }
        self.gathers = {"forward": 0, "backward": 0}
        for number, parameter in enumerate(self.whole):
            parameter.ds_id = number
        self.empty()
        monkeypatch.setattr(trl.trainer.utils, "maybe_gather_lm_head_ctx", self.gathering)

    def empty(self) -> None:
        for parameter in self.whole:
            parameter.data = torch.empty(0)

    @contextmanager
    def gathering(self, *parameters: Tensor | None) -> Iterator[None]:
        """A gather, or nothing inside of another one, as with TRL's."""
        assert {id(parameter) for parameter in parameters if parameter is not None} == set(map(id, self.whole))
        if all(parameter.numel() for parameter in self.whole):
            yield
            return
        self.gathers["forward" if torch._C._current_graph_task_id() == -1 else "backward"] += 1
        for parameter, value in self.whole.items():
            parameter.data = value.clone()
        try:
            yield
        finally:
            self.empty()


def loss_of(out: Any, bonus: float) -> Tensor:
    loss = (out.log_probs * torch.linspace(-1, 1, out.log_probs.numel()).view_as(out.log_probs)).sum()
    return loss + bonus * out.entropy.sum() if bonus else loss


@pytest.mark.parametrize(("with_entropy", "bonus"), [(True, 0.0), (True, 0.1), (False, 0.0)])
@pytest.mark.parametrize("family", ["plain", "biased"])
@pytest.mark.parametrize("trained", ["everything", "all but the head"])
def test_each_pass_gathers_the_head_once_forward_and_once_backward(
    monkeypatch: pytest.MonkeyPatch, with_entropy: bool, bonus: float, family: str, trained: str
) -> None:
    gathers = {}
    for kind in KINDS:
        data, model = batch(kind), build(family)
        model.get_output_embeddings().requires_grad_(trained == "everything")
        parameters = [each for each in model.parameters() if each.requires_grad]
        expected = call(model, data, with_entropy=with_entropy)
        gradients = torch.autograd.grad(loss_of(expected, bonus), parameters)
        with monkeypatch.context() as patch:
            partitioned = Partitioned(model, patch)
            got = call(model, data, with_entropy=with_entropy)
            assert torch.equal(got.log_probs, expected.log_probs)
            assert torch.equal(got.kept_mass, expected.kept_mass)
            assert all(map(torch.equal, torch.autograd.grad(loss_of(got, bonus), parameters), gradients))
        gathers[kind] = partitioned.gathers
    assert gathers == {kind: {"forward": 1, "backward": 1} for kind in KINDS}


class WithoutGradient(torch.autograd.Function):
    """Hand None back where a gradient is expected."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        return None


def test_a_backward_without_gradients_gathers_the_head_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """On another rank there may be gradients, and it would wait for this one."""
    model = build()
    partitioned = Partitioned(model, monkeypatch)
    out = call(model, batch(), with_entropy=False)
    WithoutGradient.apply(out.log_probs).sum().backward()
    assert partitioned.gathers == {"forward": 1, "backward": 1}
    assert model.get_output_embeddings().weight.grad is None
