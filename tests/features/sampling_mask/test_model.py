"""Log-probs of TRL's fused head among candidates, beside the oracle on hidden states and plain logits."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
import trl.trainer.utils
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from tests.oracles import sampling as oracle
from tests.tools import later_trl, tiny
from tests.tools.headroom import within
from tests.tools.sets import candidate_sets
from trl_steady.features.sampling_mask.model import SamplingMaskModel

EPS = torch.finfo(torch.float32).eps
TEMPERATURE = 0.8
VOCABULARY = tiny.SIZES["vocab_size"]
BATCH, WIDTH, PROMPT = 3, 8, 3
INDICES = torch.arange(BATCH * WIDTH).view(BATCH, WIDTH)

# What each family does to its logits, by hand.
FAMILIES: dict[str, tuple[PretrainedConfig, dict[str, float]]] = {
    "plain": (tiny.CONFIGS["dense"], {}),
    "tied": (transformers.Qwen2Config(**tiny.SIZES, tie_word_embeddings=True), {}),
    "softcapped": (transformers.Gemma2Config(**tiny.SIZES, head_dim=8, final_logit_softcapping=3.0), {"softcap": 3.0}),
    "scaled": (transformers.CohereConfig(**tiny.SIZES, logit_scale=0.3), {"logit_scale": 0.3}),
    "divided": (transformers.GraniteConfig(**tiny.SIZES, logits_scaling=4.0), {"logit_scale": 0.25}),
    "biased": (transformers.PhiConfig(**tiny.SIZES, resid_pdrop=0.0), {}),
}


def build(
    family: str = "plain",
    dtype: torch.dtype = torch.float32,
    outputs: Sequence[str] = ("log_probs", "entropy"),
    **head: Any,
) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family][0]).to(dtype)
    bias = model.get_output_embeddings().bias
    assert (bias is not None) == (family == "biased")
    if bias is not None:
        torch.nn.init.normal_(bias)
    trl.trainer.utils.add_fused_lm_head(model, TEMPERATURE, outputs=tuple(outputs), **head)
    return model


@dataclasses.dataclass
class Batch:
    """Completions of unequal length, some of whose tokens have sets; which set is by number, in no order."""

    input_ids: Tensor
    labels: Tensor
    sets: list[list[int]]
    index: Tensor

    @property
    def set_of(self) -> list[list[int]]:
        """Of each of the B * (L - 1) tokens that have a log-prob."""
        numbers = self.index[:, 1:].where(self.has_label, -1).flatten().tolist()
        return [self.sets[number] if number >= 0 else [] for number in numbers]

    @property
    def has_label(self) -> Tensor:
        return self.labels[:, 1:] != -100

    @property
    def has_set(self) -> Tensor:
        return torch.tensor([len(each) > 0 for each in self.set_of]).view(BATCH, -1)


def batch(kind: str = "some") -> Batch:
    """With sets for some tokens, for all of them, or for none; a number that leads to an empty set and one to none."""
    generator = torch.Generator().manual_seed(2)
    draw = lambda *shape: torch.randint(VOCABULARY, shape, generator=generator)
    input_ids = draw(BATCH, WIDTH)
    input_ids[0, 5] = 0  # which also stands in for a missing label
    labels = input_ids.clone()
    labels[:, :PROMPT] = -100
    labels[1, 6:] = -100
    sizes = [1, 2, 5, 40, VOCABULARY - 1] * (BATCH * WIDTH)
    order = torch.randperm(BATCH * WIDTH, generator=generator)
    index = order.argsort().view(BATCH, WIDTH)
    sets = []
    for place, size in zip(order.tolist(), sizes, strict=False):
        target = int(input_ids.flatten()[place])
        others = [token for token in torch.randperm(VOCABULARY, generator=generator).tolist() if token != target]
        sets.append([*others[: size // 2], target, *others[size // 2 : size - 1]])
    if kind == "some":
        index[0, 4], index[2, 7] = -1, -1
        sets[index[1, 3]], sets[index[0, 6]] = [], []
    if kind == "none":
        sets = [each if i % 2 else list(range(VOCABULARY)) for i, each in enumerate(sets)]
        sets = [each if len(each) == VOCABULARY else [] for each in sets]
    return Batch(input_ids, labels, sets, index)


def wrap(model: Callable[..., Any], data: Batch, *, with_entropy: bool = True) -> SamplingMaskModel:
    sets = candidate_sets(data.sets).without_large(VOCABULARY)
    bare = lambda *, token_indices, **batch: model(**batch, fused_lm_head=True)
    return SamplingMaskModel(bare, sets, data.index, with_entropy, torch.zeros(2, dtype=torch.float64))


def call(model: Callable[..., Any], data: Batch, *, with_entropy: bool = True, **others: Any) -> Any:
    wrapped = wrap(model, data, with_entropy=with_entropy)
    out = wrapped(token_indices=INDICES, input_ids=data.input_ids, labels=data.labels, **others)
    return SimpleNamespace(log_probs=out.log_probs, entropy=out.entropy, kept_mass=wrapped.kept_mass)


def plain(model: PreTrainedModel, data: Batch, **others: Any) -> Any:
    """TRL's, of the whole vocabulary."""
    return model(input_ids=data.input_ids, labels=data.labels, fused_lm_head=True, **others)


def scores(model: PreTrainedModel, data: Batch, **scaling: float) -> Tensor:
    """(B * (L - 1), V), in float64 from the hidden states."""
    with torch.no_grad():
        hidden = model.model(input_ids=data.input_ids, use_cache=False).last_hidden_state[:, :-1]
    head = model.get_output_embeddings()
    return oracle.scores(hidden.flatten(0, 1), head.weight, head.bias, temperature=TEMPERATURE, **scaling).detach()


def expected(z: Tensor, data: Batch) -> Tensor:
    """(B, L - 1) log-probs, 0 without a label."""
    targets = data.input_ids[:, 1:].flatten()
    return oracle.log_probs(z, targets, data.set_of).view(BATCH, -1).where(data.has_label, 0)


def loss_of(out: Any) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    loss = (out.log_probs * torch.randn(out.log_probs.shape, generator=generator)).sum()
    return loss if out.entropy is None else loss + 0.1 * out.entropy.sum()


def gradients(model: PreTrainedModel, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.fixture(params=["all positions", "compact"])
def compact(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """As on a GPU, where only positions with a label go to the head; TRL's own head does not look at this one."""
    if request.param == "compact":
        monkeypatch.setattr(trl.trainer.utils, "_use_triton", lambda _: True)
    return request.param == "compact"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["some", "all"])
def test_log_probs_are_the_oracles_on_hidden_states(family: str, kind: str, compact: bool) -> None:
    model, data, scaling = build(family), batch(kind), FAMILIES[family][1]
    z = scores(model, data, **scaling)
    # the control: by hand the scores are those of the model's own logits
    logits = model(input_ids=data.input_ids).logits[:, :-1].detach().flatten(0, 1) / TEMPERATURE
    # float32: the 16 products that add up in a score, and a few steps more, half an eps each; two scores in a log-prob
    with torch.no_grad():
        hidden = model.model(input_ids=data.input_ids, use_cache=False).last_hidden_state.float()
    largest = float((hidden.abs() @ model.get_output_embeddings().weight.detach().abs().T).max())
    tolerance = 16 * EPS * largest * scaling.get("logit_scale", 1.0) / TEMPERATURE
    assert within((logits.double() - z).abs(), tolerance)
    trls, got, short = plain(model, data), call(model, data), call(model, data, with_entropy=False)
    for out in (got, short):
        assert within((out.log_probs.double() - expected(z, data)).abs(), tolerance)
        assert out.log_probs[~data.has_label].count_nonzero() == 0
        unset = data.has_label & ~data.has_set
        assert torch.equal(out.log_probs[unset], trls.log_probs[unset])
    assert bool(unset.any()) == (kind == "some")
    assert torch.equal(got.entropy, trls.entropy)
    assert kind == "some" or short.entropy is None
    # of the vocabulary they are far off
    assert ((got.log_probs - trls.log_probs)[data.has_set] > 1e-2).float().mean() > 0.5
    mass = oracle.kept_mass(z, data.set_of)[data.has_set.flatten()]
    assert got.kept_mass[1] == data.has_set.sum()
    assert within((got.kept_mass[0] - mass.sum()).abs(), tolerance * len(mass))
    assert short.kept_mass.tolist() == [0, 0]
    assert not got.kept_mass.requires_grad  # or it would hold on to every pass


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("kind", "with_entropy"), [("some", True), ("all", True), ("all", False)])
def test_gradients_of_all_parameters_are_those_through_plain_logits(
    family: str, kind: str, with_entropy: bool, compact: bool
) -> None:
    model, data = build(family, torch.float64), batch(kind)
    got = gradients(model, loss_of(call(model, data, with_entropy=with_entropy)))
    logits = model(input_ids=data.input_ids).logits[:, :-1] / TEMPERATURE
    is_candidate = torch.zeros_like(logits, dtype=torch.bool).flatten(0, 1)
    for row, each in enumerate(data.set_of):
        is_candidate[row, each or slice(None)] = True
    targets = data.input_ids[:, 1:].unsqueeze(-1)
    log_probs = logits.masked_fill(~is_candidate.view_as(logits), -torch.inf).log_softmax(-1).gather(-1, targets)
    whole = logits.log_softmax(-1)
    out = SimpleNamespace(
        log_probs=log_probs.squeeze(-1).masked_fill(~data.has_label, 0),
        entropy=-(whole.exp() * whole).sum(-1).masked_fill(~data.has_label, 0) if with_entropy else None,
    )
    exact = gradients(model, loss_of(out))
    assert got.keys() == exact.keys() == dict(model.named_parameters()).keys()
    # hundreds of numbers are added up, in two orders; TRL's own head rounds to float32, whatever the model
    noise = (100 * EPS) if with_entropy else 10 * torch.finfo(torch.float64).eps
    for name, gradient in exact.items():
        assert within((got[name] - gradient).abs(), 16 * noise * gradient.abs().max()), name


@pytest.mark.parametrize(
    "parts",
    [
        [INDICES[:1], INDICES[1:]],
        [INDICES[:, 2:]],
        [INDICES[[2, 0]], INDICES[1:2, 1:7]],
        [INDICES[[1, 2, 0]].view(1, -1)],
    ],
    ids=["in two", "without a margin", "in another order", "end to end"],
)
def test_a_part_of_the_batch_has_the_sets_at_its_indices(parts: list[Tensor], compact: bool) -> None:
    """In a model without layers, which makes of each token the same in whatever company."""
    data = batch()
    model = AutoModelForCausalLM.from_config(transformers.Qwen2Config(**(tiny.SIZES | {"num_hidden_layers": 0})))
    trl.trainer.utils.add_fused_lm_head(model, TEMPERATURE, outputs=("log_probs", "entropy"))
    whole, wrapped = call(model, data), wrap(model, data)
    log_probs = torch.nn.functional.pad(whole.log_probs, (1, 0)).flatten()
    for token_indices in parts:
        tokens = {"input_ids": data.input_ids.flatten()[token_indices], "labels": data.labels.flatten()[token_indices]}
        out = wrapped(token_indices=token_indices, **tokens)
        # sums of products below 20, a few roundings of each, in other shapes
        assert within((out.log_probs - log_probs[token_indices[:, 1:]]).abs(), 100 * EPS)
    assert wrapped.kept_mass[1] == whole.kept_mass[1] > 0
    assert within((wrapped.kept_mass[0] - whole.kept_mass[0]).abs(), 100 * EPS * whole.kept_mass[1])


# A head that ZeRO-3 partitions is gathered equally often, whichever tokens of this process have sets.


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


@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("family", ["plain", "biased"])
@pytest.mark.parametrize("trained", ["everything", "all but the head"])
def test_each_pass_gathers_the_head_once_forward_and_once_backward(
    monkeypatch: pytest.MonkeyPatch, with_entropy: bool, family: str, trained: str
) -> None:
    gathers = {}
    for kind in ("all", "some", "none"):
        data, model = batch(kind), build(family)
        model.get_output_embeddings().requires_grad_(trained == "everything")
        parameters = [each for each in model.parameters() if each.requires_grad]
        expected = call(model, data, with_entropy=with_entropy)
        gradients = torch.autograd.grad(loss_of(expected), parameters)
        with monkeypatch.context() as patch:
            partitioned = Partitioned(model, patch)
            got = call(model, data, with_entropy=with_entropy)
            assert torch.equal(got.log_probs, expected.log_probs)
            assert torch.equal(got.kept_mass, expected.kept_mass)
            assert all(map(torch.equal, torch.autograd.grad(loss_of(got), parameters), gradients))
        gathers[kind] = partitioned.gathers
    assert gathers == {kind: {"forward": 1, "backward": 1} for kind in gathers}


def test_a_backward_without_gradients_gathers_the_head_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """On another rank there may be gradients, and it would wait for this one."""

    class WithoutGradient(torch.autograd.Function):
        """Hand None back where a gradient is expected."""

        @staticmethod
        def forward(ctx: Any, values: Tensor) -> Tensor:
            return values.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> None:
            return None

    model = build()
    partitioned = Partitioned(model, monkeypatch)
    out = call(model, batch(), with_entropy=False)
    WithoutGradient.apply(out.log_probs).sum().backward()
    assert partitioned.gathers == {"forward": 1, "backward": 1}
    assert model.get_output_embeddings().weight.grad is None


# TRL after 1.16 may give its function a set of tokens for each position.


@pytest.mark.parametrize("form", later_trl.ARGUMENTS)
@pytest.mark.parametrize("is_partitioned", [False, True])
@pytest.mark.parametrize("kind", ["some", "none"])
def test_our_sets_come_before_those_of_a_later_trl(
    monkeypatch: pytest.MonkeyPatch, kind: str, form: str, is_partitioned: bool, compact: bool
) -> None:
    """Tokens without a set of ours, and the entropy, are over what TRL gives, and else as today."""
    data = batch(kind)
    support = torch.stack([data.input_ids, (data.input_ids + 1) % VOCABULARY, (data.input_ids + 9) % VOCABULARY], -1)

    def scored(compute: Callable[..., Any], model: PreTrainedModel, **others: Any) -> tuple[Any, list[Tensor]]:
        out = compute(model, data, **others)
        return out, list(torch.autograd.grad(loss_of(out), [*model.parameters()]))

    today, gradients_today = scored(call, build("biased"))
    later_trl.install(monkeypatch, form)
    model = build("biased")
    theirs, their_gradients = scored(plain, model, support_ids=support)
    assert (theirs.entropy <= math.log(3) + EPS).all() and (theirs.log_probs >= plain(model, data).log_probs).all()
    if is_partitioned:
        Partitioned(model, monkeypatch)
    got, got_gradients = scored(call, model, support_ids=None)
    assert torch.equal(got.log_probs, today.log_probs) and torch.equal(got.entropy, today.entropy)
    assert all(map(torch.equal, got_gradients, gradients_today))
    got, got_gradients = scored(call, model, support_ids=support)
    has_set = data.has_set & (kind == "some")
    assert torch.equal(got.log_probs, today.log_probs.where(has_set, theirs.log_probs))
    assert torch.equal(got.entropy, theirs.entropy)
    if kind == "none":
        assert all(map(torch.equal, got_gradients, their_gradients))
