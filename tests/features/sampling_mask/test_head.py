"""Log-probs among kept tokens: against the oracle, TRL's head, and what a set implies."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from trl.kernels import ChunkedLogProbFunction

from tests.tools.headroom import within
from tests.tools.sets import candidate_sets
from trl_steady.features.sampling_mask import log_probs as head
from trl_steady.features.sampling_mask.log_probs import candidate_log_probs
from trl_steady.trl_bridge.lm_head import Head

VOCABULARY, WIDTH = 23, 5
SIZES = [2, 0, 7, 1, 22, 3, 1, 0, 2, 12, 5, 3]
ALL_SCALINGS: dict[str, Any] = {"temperature": 0.6, "logit_scale": 1.7, "softcap": 2.5}
EPS = torch.finfo(torch.float32).eps


def head_of(*tensors: Any, temperature: float = 1.0, softcap: float | None = None, logit_scale: float = 1.0) -> Head:
    return Head(*tensors, temperature, 0, softcap, logit_scale, (), {})


class Case(NamedTuple):
    hidden: Tensor
    weight: Tensor
    bias: Tensor
    targets: Tensor
    sets: list[list[int]]

    def log_probs(self, **scaling: Any) -> Tensor:
        return candidate_log_probs(head_of(*self[:4], **scaling), candidate_sets(self.sets))

    def gradients(self, of_loss: Tensor, **options: Any) -> list[Tensor]:
        """With respect to hidden states, weight and bias."""
        log_probs = self.log_probs(**options)
        return list(torch.autograd.grad(log_probs, self[:3], of_loss.to(log_probs.dtype)))


def make_case(seed: int = 0, dtype: torch.dtype = torch.float64, sizes: list[int] = SIZES) -> Case:
    """Every fifth target is token 0, which also fills up the rows of smaller sets."""
    generator = torch.Generator().manual_seed(seed)
    random = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    sets = [torch.randperm(VOCABULARY, generator=generator)[:size].tolist() for size in sizes]
    sets[::5] = [[0 if token == max(each) and 0 not in each else token for token in each] for each in sets[::5]]
    targets = torch.tensor([each[len(each) // 2] if each else 4 for each in sets])
    targets[::5] = 0
    return Case(random(len(sizes), WIDTH), random(VOCABULARY, WIDTH), random(VOCABULARY), targets, sets)


def weights(case: Case) -> Tensor:
    return torch.randn(len(case.sets), generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def gap(got: list[Tensor], others: list[Tensor]) -> float:
    return max(
        float((x.detach().double() - y.detach().double()).abs().max()) for x, y in zip(got, others, strict=True)
    )


@pytest.mark.parametrize("chunk", [1, 60, 22 * 5])
def test_parts_are_no_larger_than_a_chunk_and_change_nothing(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case()
    whole, gradients = case.log_probs(softcap=2.5), case.gradients(weights(case), softcap=2.5)
    monkeypatch.setattr(head, "_CHUNK", chunk)
    parts = list(head._chunks(candidate_sets(case.sets), case.targets, WIDTH))
    assert sorted(torch.cat([part.positions for part in parts]).tolist()) == [i for i, n in enumerate(SIZES) if n > 1]
    assert all(part.ids.numel() * WIDTH <= chunk or len(part.positions) == 1 for part in parts)
    assert all((len(a.ids) + 1) * a.ids.size(1) * WIDTH > chunk for a in parts[:-1])  # no room for one more
    # other shapes of the products, hence other roundings of 5 summands below 10
    assert within(gap([case.log_probs(softcap=2.5)], [whole]), 1e-14)
    assert within(gap(case.gradients(weights(case), softcap=2.5), gradients), 1e-14)


def test_no_tensor_is_as_large_as_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    class Allocated(TorchDispatchMode):
        """The shapes of all tensors that are made inside the context."""

        def __init__(self) -> None:
            super().__init__()
            self.shapes: list[torch.Size] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            outputs = out if isinstance(out, tuple | list) else [out]
            self.shapes += [each.shape for each in outputs if torch.is_tensor(each)]
            return out

        def above(self, numbers: int) -> set[tuple[int, ...]]:
            return {tuple(shape) for shape in self.shapes if shape.numel() > numbers}

    n, vocabulary, width, size, chunk = 64, 1000, 4, 8, 512
    hidden, weight = torch.randn(n, width).requires_grad_(), torch.randn(vocabulary, width).requires_grad_()
    bias = torch.randn(vocabulary).requires_grad_()
    sets = [torch.randperm(vocabulary)[: size - i % 3].tolist() for i in range(n)]
    targets = torch.tensor([each[0] for each in sets])
    monkeypatch.setattr(head, "_CHUNK", chunk)
    kept = candidate_sets(sets)
    with Allocated() as forward:
        log_probs = candidate_log_probs(head_of(hidden, weight, bias, targets), kept)
    with Allocated() as backward:
        log_probs.sum().backward()
    assert forward.above(chunk) == set()  # the sets themselves have fewer
    assert backward.above(chunk) == {(vocabulary, width), (vocabulary,)}


@pytest.mark.parametrize(("has_bias", "temperature", "softcap"), [(True, 0.6, None), (False, 1.0, 25.0)])
@pytest.mark.parametrize(
    ("dtype", "is_autocast"), [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)]
)
def test_log_probs_among_almost_all_tokens_are_rounded_like_trls(
    dtype: torch.dtype, is_autocast: bool, has_bias: bool, temperature: float, softcap: float | None
) -> None:
    """All tokens but one without a chance. Products are exact in float32, whatever the order, and not in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randint(-32, 33, shape, generator=generator) / 16
    hidden, weight, bias = draw(len(SIZES), WIDTH), draw(VOCABULARY, WIDTH), draw(VOCABULARY)
    hidden[:, 0], weight[9] = 2, torch.tensor([-512.0, 0, 0, 0, 0])
    sets = [[token for token in range(VOCABULARY) if token != 9]] * len(SIZES)
    leaves: list[Any] = [leaf.to(dtype).requires_grad_() for leaf in (hidden, weight, bias)]
    case = Case(*leaves, torch.arange(len(SIZES)) + 10, sets)
    case = case if has_bias else case._replace(bias=None)
    scaling = {"temperature": temperature, "logit_scale": 1.7, "softcap": softcap}
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        got = case.log_probs(**scaling)
        trls = ChunkedLogProbFunction.apply(*case[:4], temperature, 8, softcap, 1.7, ("log_probs",))[0]
    assert got.dtype == trls.dtype == torch.float32
    largest = max(1.7 * 20, softcap or 0) / temperature  # 5 products of 2 times 2
    assert within(gap([got], [trls]), 8 * EPS * largest)  # as above, in two ways
    gradients = torch.autograd.grad(got.sum(), case[: 2 + has_bias])
    assert {gradient.dtype for gradient in gradients} == {dtype}


def test_backward_is_the_same_inside_autocast_and_outside() -> None:
    case = make_case(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        log_probs = case.log_probs()
        inside = torch.autograd.grad(log_probs.sum(), case[:3], retain_graph=True)
    assert gap(list(inside), list(torch.autograd.grad(log_probs.sum(), case[:3]))) == 0
    assert {each.dtype for each in inside} == {torch.float32}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_position_without_a_choice_spoils_no_other(bad: float) -> None:
    case, with_choice = make_case(), torch.tensor(SIZES) > 1
    hidden = case.hidden.detach().where(with_choice.unsqueeze(-1), bad).requires_grad_()
    of_loss = weights(case).where(with_choice, bad)
    spoilt = case._replace(hidden=hidden)
    assert torch.equal(spoilt.log_probs(), case.log_probs())
    assert gap(spoilt.gradients(of_loss), case.gradients(weights(case))) == 0


@pytest.mark.parametrize("sizes", [[], [1, 0, 0, 1]], ids=str)
def test_sets_of_one_token_or_none_have_log_prob_0_and_no_gradient(sizes: list[int]) -> None:
    case = make_case(sizes=sizes)
    assert case.log_probs(**ALL_SCALINGS).tolist() == [0.0] * len(sizes)
    gradients = case.gradients(weights(case), **ALL_SCALINGS)
    assert [int(gradient.count_nonzero()) for gradient in gradients] == [0, 0, 0]
