"""Log-probs among kept tokens beside the oracle, TRL's own head, and what a set says that they must be."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from trl.kernels import ChunkedLogProbFunction

from tests.oracles import sampling as oracle
from tests.tools.headroom import within
from trl_steady.sampling import log_probs as head
from trl_steady.sampling.kept import KeptTokens
from trl_steady.sampling.log_probs import kept_log_probs

VOCABULARY, WIDTH = 23, 5
SIZES = [2, 0, 7, 1, 22, 3, 1, 0, 2, 12, 5, 3]
SCALINGS = [
    dict(zip(("temperature", "logit_scale", "softcap"), each, strict=True))
    for each in itertools.product((1.0, 0.6), (1.0, 1.7), (None, 2.5))
]


class Case(NamedTuple):
    hidden: Tensor
    weight: Tensor
    bias: Tensor
    targets: Tensor
    sets: list[list[int]]

    def log_probs(self, **options: Any) -> Tensor:
        return kept_log_probs(*self[:4], KeptTokens.of(self.sets), **options)

    def gradients(self, of_loss: Tensor, **options: Any) -> list[Tensor]:
        """With respect to hidden states, weight and bias."""
        log_probs = self.log_probs(**options)
        return list(torch.autograd.grad(log_probs, self[:3], of_loss.to(log_probs.dtype)))


def case(seed: int = 0, dtype: torch.dtype = torch.float64, sizes: list[int] = SIZES) -> Case:
    """Every fifth target is token 0, with which rows of smaller sets are filled up."""
    generator = torch.Generator().manual_seed(seed)
    random = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    sets = [torch.randperm(VOCABULARY, generator=generator)[:size].tolist() for size in sizes]
    sets[::5] = [[0 if token == max(each) and 0 not in each else token for token in each] for each in sets[::5]]
    targets = torch.tensor([each[len(each) // 2] if each else 4 for each in sets])
    targets[::5] = 0
    return Case(random(len(sizes), WIDTH), random(VOCABULARY, WIDTH), random(VOCABULARY), targets, sets)


def expected(own: Case, of_loss: Tensor, **scaling: Any) -> tuple[Tensor, list[Tensor], float]:
    """The oracle's log-probs, 0 for an empty set, the gradients, and the largest score with all its terms positive."""
    leaves = [leaf.detach().double().requires_grad_() for leaf in own[:3]]
    z = oracle.scores(*leaves, **scaling)
    has_set = torch.tensor([len(each) > 0 for each in own.sets])
    log_probs = oracle.log_probs(z, own.targets, own.sets).where(has_set, 0)
    scale = scaling.get("logit_scale", 1.0) / scaling.get("temperature", 1.0)
    hidden, weight, bias = (leaf.detach().abs() for leaf in leaves)
    largest = scale * float((hidden @ weight.T + bias).max())
    return log_probs, list(torch.autograd.grad(log_probs, leaves, of_loss.double())), largest


def weights(own: Case) -> Tensor:
    return torch.randn(len(own.sets), generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def gap(got: list[Tensor], others: list[Tensor]) -> float:
    return max(
        float((x.detach().double() - y.detach().double()).abs().max()) for x, y in zip(got, others, strict=True)
    )


# Values and gradients


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_oracle_has_the_same_values_and_gradients(dtype: torch.dtype, scaling: dict[str, Any]) -> None:
    for seed, has_bias in itertools.product(range(3), (True, False)):
        own = case(seed, dtype)
        own = own if has_bias else own._replace(bias=torch.zeros_like(own.bias).requires_grad_())
        of_loss = weights(own)
        log_probs, gradients, largest = expected(own, of_loss, **scaling)
        got = (own if has_bias else own._replace(bias=None)).log_probs(**scaling)
        assert got.dtype == dtype
        # a score is a sum of 6 terms, rounded in up to 10 steps and then in logsumexp; a step rounds by half an eps
        eps = torch.finfo(dtype).eps
        assert within(gap([got], [log_probs]), 8 * eps * max(1, largest))
        own_gradients = torch.autograd.grad(got, own[: 2 + has_bias], of_loss.to(dtype))
        # a score's error is its probability's, times a loss and a hidden state below 3
        assert within(gap(list(own_gradients), gradients[: 2 + has_bias]), 9 * 8 * eps * max(1, largest))


@pytest.mark.parametrize("scaling", [SCALINGS[0], SCALINGS[-1]], ids=str)
def test_gradcheck(scaling: dict[str, Any]) -> None:
    own = case(sizes=[3, 0, 1, 6])
    kept = KeptTokens.of(own.sets)
    assert torch.autograd.gradcheck(lambda *leaves: kept_log_probs(*leaves, own.targets, kept, **scaling), own[:3])


def test_large_scores_do_not_overflow() -> None:
    own = case(1, torch.float32)
    large = own._replace(hidden=(own.hidden.detach() * 500).requires_grad_())  # of the scores, exp is inf
    log_probs, _, largest = expected(large, weights(own))
    assert largest > 2000
    assert within(gap([large.log_probs()], [log_probs]), 4 * torch.finfo(torch.float32).eps * largest)
    assert all(gradient.isfinite().all() for gradient in large.gradients(weights(own)))


@pytest.mark.parametrize("scaling", [SCALINGS[0], SCALINGS[-1]], ids=str)
def test_a_single_token_has_log_prob_0_and_no_gradient(scaling: dict[str, Any]) -> None:
    own = case(sizes=[1, 1, 0, 1])
    assert own.log_probs(**scaling).tolist() == [0.0] * 4
    assert [int(gradient.count_nonzero()) for gradient in own.gradients(weights(own), **scaling)] == [0, 0, 0]


@pytest.mark.parametrize("softcap", [None, 2.5])
def test_no_gradient_outside_of_the_set_and_none_in_sum_within(softcap: float | None) -> None:
    """Of the scores, which the identity makes of hidden states; where they are bent, of these before."""
    own = case()
    logits = torch.randn(len(SIZES), VOCABULARY, dtype=torch.float64).requires_grad_()
    own = own._replace(hidden=logits, weight=torch.eye(VOCABULARY, dtype=torch.float64).requires_grad_())
    to_logits, to_weight, to_bias = own.gradients(weights(own), softcap=softcap)
    is_kept = torch.zeros_like(logits, dtype=torch.bool)
    for row, each in enumerate(own.sets):
        is_kept[row, each] = True
    assert to_logits[~is_kept].count_nonzero() == 0
    assert to_logits[torch.tensor(SIZES) > 1].abs().sum(-1).min() > 1e-3
    if softcap is not None:
        to_logits = to_logits / (1 - (((logits + own.bias) / softcap).tanh() ** 2))
    assert within(to_logits.sum(-1).abs(), 1e-14)  # 22 numbers below 3, each rounded to 4e-16 or less
    own = case(sizes=[2, 1, 0, 5])
    _, to_weight, to_bias = own.gradients(torch.ones(4))
    with_choice = {*own.sets[0], *own.sets[3]}
    for token in range(VOCABULARY):
        assert (to_weight[token].count_nonzero() > 0) == (to_bias[token] != 0) == (token in with_choice)


def test_the_order_within_a_set_changes_roundings_at_most() -> None:
    for seed in range(10):
        own = case(seed)
        backwards = own._replace(sets=[each[::-1] for each in own.sets])
        # not bit for bit: logsumexp adds in another order
        tolerance = 4 * torch.finfo(torch.float64).eps * expected(own, weights(own))[2]
        assert within(gap([backwards.log_probs()], [own.log_probs()]), tolerance)
        assert within(gap(backwards.gradients(weights(own)), own.gradients(weights(own))), 4 * tolerance)


# Parts


@pytest.mark.parametrize("chunk", [1, 15, 60, 61, 200, 22 * 5, 10**9])
def test_parts_are_no_larger_than_a_chunk_and_change_nothing(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    own = case()
    whole, gradients = own.log_probs(softcap=2.5), own.gradients(weights(own), softcap=2.5)
    monkeypatch.setattr(head, "_CHUNK", chunk)
    parts = list(head._parts(KeptTokens.of(own.sets), WIDTH))
    assert sorted(torch.cat([part.positions for part in parts]).tolist()) == [i for i, n in enumerate(SIZES) if n > 1]
    assert all(part.ids.numel() * WIDTH <= chunk or len(part.positions) == 1 for part in parts)
    together = [a for a, b in itertools.pairwise(parts) if (len(a.ids) + 1) * a.ids.size(1) * WIDTH <= chunk]
    assert together == []  # no part could have held one position more
    for positions, ids, is_kept in parts:
        for position, row, mask in zip(positions.tolist(), ids, is_kept, strict=True):
            assert row[mask].tolist() == own.sets[position]
    # other shapes of the products, hence other roundings of 5 summands below 10
    assert within(gap([own.log_probs(softcap=2.5)], [whole]), 1e-14)
    assert within(gap(own.gradients(weights(own), softcap=2.5), gradients), 1e-14)


class Allocated(TorchDispatchMode):
    """The sizes of all tensors that are made meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.shapes += [
            tuple(x.shape) for x in (out if isinstance(out, tuple | list) else [out]) if torch.is_tensor(x)
        ]
        return out

    def above(self, numbers: int) -> set[tuple[int, ...]]:
        return {shape for shape in self.shapes if torch.Size(shape).numel() > numbers}


def test_nothing_of_the_size_of_the_logits_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    n, vocabulary, width, size, chunk = 64, 1000, 4, 8, 512
    hidden, weight = torch.randn(n, width).requires_grad_(), torch.randn(vocabulary, width).requires_grad_()
    bias = torch.randn(vocabulary).requires_grad_()
    sets = [torch.randperm(vocabulary)[: size - i % 3].tolist() for i in range(n)]
    targets = torch.tensor([each[0] for each in sets])
    monkeypatch.setattr(head, "_CHUNK", chunk)
    kept = KeptTokens.of(sets)
    with Allocated() as forward:
        log_probs = kept_log_probs(hidden, weight, bias, targets, kept)
    with Allocated() as backward:
        log_probs.sum().backward()
    assert forward.above(chunk) == set()  # the sets themselves have fewer
    assert backward.above(chunk) == {(vocabulary, width), (vocabulary,)}
    with Allocated() as control:
        loss = (hidden @ weight.T).log_softmax(-1).sum()
    assert (n, vocabulary) in control.above(chunk)
    with Allocated() as control:
        loss.backward()
    assert (n, vocabulary) in control.above(chunk)


# Beside TRL's own head, and in fewer bits


@contextmanager
def autocast() -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16):
        yield


NARROW: dict[str, tuple[torch.dtype, Callable[[], AbstractContextManager[None]]]] = {
    "float32": (torch.float32, nullcontext),
    "bfloat16": (torch.bfloat16, nullcontext),
    "autocast": (torch.float32, autocast),
}
EPS = torch.finfo(torch.float32).eps


def coarse(dtype: torch.dtype) -> Case:
    """All tokens but one without a chance. Products are exact in float32, whatever the order, and not in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randint(-32, 33, shape, generator=generator) / 16
    hidden, weight, bias = draw(len(SIZES), WIDTH), draw(VOCABULARY, WIDTH), draw(VOCABULARY)
    hidden[:, 0], weight[9] = 2, torch.tensor([-512.0, 0, 0, 0, 0])
    sets = [[token for token in range(VOCABULARY) if token != 9]] * len(SIZES)
    leaves = [leaf.to(dtype).requires_grad_() for leaf in (hidden, weight, bias)]
    return Case(*leaves, torch.arange(len(SIZES)) + 10, sets)


def by_hand(own: Case, of_loss: Tensor, product: torch.dtype, scaling: dict[str, Any]) -> list[Tensor]:
    """Gradients where the products, and the sums with the bias, were rounded once each."""
    hidden, weight, bias = (None if leaf is None else leaf.detach().double() for leaf in own[:3])
    products = (hidden @ weight.T).to(product)
    products = products if bias is None else products + bias.to(product)
    leaf = products.double().requires_grad_()
    identity = torch.eye(VOCABULARY, dtype=torch.float64)
    log_probs = oracle.log_probs(oracle.scores(leaf, identity, None, **scaling), own.targets, own.sets)
    (of_products,) = torch.autograd.grad(log_probs, leaf, of_loss.double())
    return [of_products @ weight, of_products.T @ hidden, of_products.sum(0)]


@pytest.mark.parametrize("softcap", [None, 25.0])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("name", NARROW)
def test_all_but_a_token_without_a_chance_is_trls_own_log_prob(
    name: str, has_bias: bool, temperature: float, softcap: float | None
) -> None:
    """Also where the products are rounded, as TRL rounds them."""
    dtype, context = NARROW[name]
    own = coarse(dtype)
    own = own if has_bias else own._replace(bias=None)
    scaling = {"temperature": temperature, "logit_scale": 1.7, "softcap": softcap}
    with context():
        got = own.log_probs(**scaling)
        trls = ChunkedLogProbFunction.apply(*own[:4], temperature, 8, softcap, 1.7, ("log_probs",))[0]
    assert got.dtype == trls.dtype == torch.float32
    largest = max(1.7 * 20, softcap or 0) / temperature  # 5 products of 2 times 2
    assert within(gap([got], [trls]), 8 * EPS * largest)  # as above, in two ways
    product = torch.float32 if name == "float32" else torch.bfloat16
    of_loss = weights(own).float()
    gradients = torch.autograd.grad(got, own[: 2 + has_bias], of_loss)
    for gradient, exact in zip(gradients, by_hand(own, of_loss, product, scaling), strict=False):
        assert gradient.dtype == dtype
        # the roundings of a score count in its probability, times the slope, up to 2 of a hidden state and the loss;
        # a gradient in bfloat16 is rounded to half of its eps at last
        rounding = 8 * EPS * largest * 1.7 / temperature * 2 * float(of_loss.abs().max())
        last = torch.finfo(dtype).eps / 2 * exact.abs()
        assert within((gradient.double() - exact).abs(), rounding, granted=last)


def test_autocast_rounds_what_goes_into_the_products() -> None:
    own = case(dtype=torch.float32)
    narrow = own._replace(**{k: getattr(own, k).detach().bfloat16() for k in ("hidden", "weight", "bias")})
    with autocast():
        got = own.log_probs(softcap=2.5)
    assert torch.equal(got, narrow.log_probs(softcap=2.5))
    assert not within(gap([got], [own.log_probs(softcap=2.5)]), 1e-3)
    assert [each.dtype for each in own.gradients(weights(own))] == [torch.float32] * 3


def test_backward_under_autocast_is_the_one_without() -> None:
    """As that of TRL's head."""
    own = case(dtype=torch.float32)
    with autocast():
        log_probs = own.log_probs()
        within = torch.autograd.grad(log_probs.sum(), own[:3], retain_graph=True)
    assert gap(list(within), list(torch.autograd.grad(log_probs.sum(), own[:3]))) == 0


# Who gets a gradient


@pytest.mark.parametrize("needed", [each for n in (1, 2) for each in itertools.combinations(range(3), n)], ids=str)
def test_only_what_is_trained_gets_a_gradient(needed: tuple[int, ...]) -> None:
    own = case()
    all_three = own.gradients(weights(own))
    for number, leaf in enumerate(own[:3]):
        leaf.requires_grad_(number in needed)
    (own.log_probs() * weights(own)).sum().backward()
    assert [leaf.grad is not None for leaf in own[:3]] == [number in needed for number in range(3)]
    assert all(torch.equal(own[number].grad, all_three[number]) for number in needed)


def test_without_any_gradient_the_values_are_the_same() -> None:
    own = case()
    with torch.no_grad():
        got = own.log_probs()
    assert not got.requires_grad
    assert torch.equal(got, own.log_probs())


def test_a_tied_weight_gets_the_sum_of_both_gradients() -> None:
    own = case()
    tokens = torch.arange(len(SIZES)) % 7  # embedded by rows that are in sets too
    (own._replace(hidden=own.weight[tokens].tanh()).log_probs() * weights(own)).sum().backward()
    weight = own.weight.detach().clone().requires_grad_()
    z = oracle.scores(weight[tokens].tanh(), weight, own.bias.detach())
    has_set = torch.tensor(SIZES) > 0
    log_probs = oracle.log_probs(z, own.targets, own.sets).where(has_set, 0)
    (exact,) = torch.autograd.grad(log_probs, weight, weights(own))
    assert within((own.weight.grad - exact).abs(), 1e-14)  # of numbers below 10


def test_used_twice_gradients_add_up() -> None:
    own = case()
    once = own.gradients(weights(own))
    loss = (own.log_probs() * weights(own)).sum()
    for _ in range(2):
        loss.backward(retain_graph=True)
    assert gap([leaf.grad for leaf in own[:3]], [2 * gradient for gradient in once]) == 0
    for leaf in own[:3]:
        leaf.grad = None
    ((own.log_probs() + own.log_probs()) * weights(own)).sum().backward()
    assert gap([leaf.grad for leaf in own[:3]], [2 * gradient for gradient in once]) == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_a_position_without_a_choice_holds_reaches_no_other(bad: float) -> None:
    own, with_choice = case(), torch.tensor(SIZES) > 1
    hidden = own.hidden.detach().where(with_choice.unsqueeze(-1), bad).requires_grad_()
    of_loss = weights(own).where(with_choice, bad)
    spoilt = own._replace(hidden=hidden)
    assert torch.equal(spoilt.log_probs(), own.log_probs())
    assert gap(spoilt.gradients(of_loss), own.gradients(weights(own))) == 0
    # those with a choice spoil their own and the rows of their sets
    spoilt = own._replace(hidden=own.hidden.detach().index_fill(0, torch.tensor([8]), bad).requires_grad_())
    named = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill(0, torch.tensor(own.sets[8]), True)
    got, fine = spoilt.gradients(weights(own)), own.gradients(weights(own))
    for number, bad_rows in enumerate((torch.arange(len(SIZES)) == 8, named, named)):
        assert not got[number][bad_rows].isfinite().any()
        assert torch.equal(got[number][~bad_rows], fine[number][~bad_rows])
    assert not named[0]


@pytest.mark.parametrize("sizes", [[], [0, 0, 0], [1, 1]], ids=str)
def test_without_any_choice_there_is_nothing_to_read(sizes: list[int]) -> None:
    own = case(sizes=sizes)
    assert own.log_probs().tolist() == [0.0] * len(sizes)
    assert gap([each.abs().sum() for each in own.gradients(weights(own))], [torch.tensor(0.0)] * 3) == 0
