"""A head that ZeRO-3 partitions is gathered equally often, whichever tokens of this process have sets."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import trl.trainer.utils
from torch import Tensor

from tests.sampling.test_model import batch, build, call
from trl_steady.host.head import Head, scored_by

KINDS = ["all", "some", "none"]


class Partitioned:
    """A stand-in for ZeRO-3: the head is empty except inside of gathers, which are counted."""

    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.whole = {own: own.detach().clone() for own in model.get_output_embeddings().parameters()}
        self.gathers = {"forward": 0, "backward": 0}
        for number, own in enumerate(self.whole):
            own.ds_id = number
        self.empty()
        monkeypatch.setattr(trl.trainer.utils, "maybe_gather_lm_head_ctx", self.gathering)

    def empty(self) -> None:
        for own in self.whole:
            own.data = torch.empty(0)

    @contextmanager
    def gathering(self, *parameters: Tensor | None) -> Iterator[None]:
        """A gather, or nothing inside of another one, as with TRL's."""
        assert {id(own) for own in parameters if own is not None} == set(map(id, self.whole))
        if all(own.numel() for own in self.whole):
            yield
            return
        self.gathers["forward" if torch._C._current_graph_task_id() == -1 else "backward"] += 1
        for own, value in self.whole.items():
            own.data = value.clone()
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
        own, model = batch(kind), build(family)
        model.get_output_embeddings().requires_grad_(trained == "everything")
        parameters = [each for each in model.parameters() if each.requires_grad]
        expected = call(model, own, with_entropy=with_entropy)
        gradients = torch.autograd.grad(loss_of(expected, bonus), parameters)
        with monkeypatch.context() as patch:
            partitioned = Partitioned(model, patch)
            got = call(model, own, with_entropy=with_entropy)
            assert torch.equal(got.log_probs, expected.log_probs)
            assert torch.equal(got.kept_mass, expected.kept_mass)
            assert all(map(torch.equal, torch.autograd.grad(loss_of(got, bonus), parameters), gradients))
        gathers[kind] = partitioned.gathers
    assert gathers == {kind: {"forward": 1, "backward": 1} for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_without_gradient_gathers_the_head_once(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    model = build()
    partitioned = Partitioned(model, monkeypatch)
    with torch.no_grad():
        assert not call(model, batch(kind), with_entropy=False).log_probs.requires_grad
    assert partitioned.gathers == {"forward": 1, "backward": 0}


def test_a_partitioned_head_goes_backward_as_often_as_the_graph_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    partitioned = Partitioned(model, monkeypatch)
    loss = loss_of(call(model, batch()), 0.1)
    parameters = list(model.parameters())
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(loss, parameters)))
    assert partitioned.gathers == {"forward": 1, "backward": 2}


def test_an_answer_of_the_model_s_own_head_is_gathered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs without a gradient among them."""
    model = build(outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
    own = dataclasses.replace(batch(), sets=[])
    expected = model(input_ids=own.input_ids, labels=own.labels, fused_lm_head=True)
    partitioned = Partitioned(model, monkeypatch)
    with scored_by(Head.own):
        got = model(input_ids=own.input_ids, labels=own.labels, fused_lm_head=True)
    for name in ("log_probs", "entropy", "mean_logits", "is_top1"):
        assert torch.equal(got[name], expected[name])
        assert got[name].requires_grad == expected[name].requires_grad
    got.log_probs.sum().backward(inputs=[model.model.norm.weight])
    assert partitioned.gathers == {"forward": 1, "backward": 1}
