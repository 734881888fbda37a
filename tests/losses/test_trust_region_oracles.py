"""The oracles of trust regions give the values that their docstrings work by hand."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.oracles import trust_regions as oracles


def _row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def _dppo(pi: float, mu: float, a: float, **options: Any) -> tuple[float, float]:
    given: dict[str, Any] = {"low": 0.2, "high": 0.2} | options
    result = oracles.dppo(_row(pi).log(), _row(mu).log(), _row(1.0).bool(), _row(a), **given)
    return result.loss, float(result.grad)


@pytest.mark.parametrize(
    ("pi", "mu", "a", "options", "expected"),
    [
        (0.6, 0.5, 1.0, {}, (-1.2, -1.2)),
        (0.8, 0.5, 1.0, {}, (0.0, 0.0)),
        (0.8, 0.5, 1.0, {"high": 0.31}, (-1.6, -1.6)),
        (0.2, 0.5, 1.0, {}, (-0.4, -0.4)),  # It moved against A: free.
        (0.2, 0.5, -1.0, {}, (0.0, 0.0)),
        (0.2, 0.5, -1.0, {"low": 0.31}, (0.4, 0.4)),
        (0.8, 0.5, -1.0, {}, (1.6, 1.6)),
        (0.1, 0.001, 1.0, {}, (-20.0, -20.0)),
        (0.1, 0.001, 1.0, {"attached": True}, (-20.0, 0.0)),
        (0.1, 0.0, 1.0, {}, (-20.0, -20.0)),
        (0.75, 0.5, 1.0, {"divergence": "kl", "high": 0.15}, (-1.5, -1.5)),
        (0.75, 0.5, 1.0, {"divergence": "kl", "high": 0.14}, (0.0, 0.0)),
        (0.25, 0.5, 1.0, {"divergence": "kl", "high": 0.0}, (-0.5, -0.5)),
        (0.25, 0.5, -1.0, {"divergence": "kl", "low": 0.14}, (0.0, 0.0)),
        (1.0, 0.5, 1.0, {"divergence": "kl", "high": 1e9}, (0.0, 0.0)),  # D is infinite.
        (1.0, 1.0, 1.0, {"divergence": "kl", "high": 0.0}, (-1.0, -1.0)),
        (0.9, 0.1, 0.0, {}, (0.0, 0.0)),
    ],
)
def test_dppo(pi: float, mu: float, a: float, options: dict[str, Any], expected: tuple[float, float]) -> None:
    assert _dppo(pi, mu, a, **options) == pytest.approx(expected, abs=1e-12)


def test_binary_kl() -> None:
    assert oracles.binary_kl(0.75, 0.5) == pytest.approx(math.log(4 / 3) / 2)
    assert oracles.binary_kl(0.5, 0.0) == pytest.approx(math.log(2))


def test_sampler_penalty() -> None:
    result = oracles.sampler_penalty(_row(-1.0, math.nan), _row(-1.5, 0.0), _row(1.0, 0.0).bool(), tau=0.1)
    assert (result.loss, result.grad[0].tolist()) == (pytest.approx(0.025), [pytest.approx(0.1), 0.0])


@pytest.mark.parametrize(("every_token", "keep"), [(False, [1, 1, 0, 1, 0]), (True, [1, 1, 0, 0, 0])])
def test_m2po(every_token: bool, keep: list[int]) -> None:
    ratios = _row(0.1, 0.2, 0.5, -3.0, math.nan)
    mask = _row(1, 1, 1, 1, 0).bool()
    given = (ratios, torch.zeros_like(ratios), mask, _row(1.0, 1.0, 1.0, 1.0, 1.0))
    assert oracles.m2po_keep(*given, budget=0.04, every_token=every_token)[0].tolist() == keep

    terms = [-math.exp(0.1), -math.exp(0.2), 0.0, -math.exp(-3.0) * keep[3], 0.0]
    result = oracles.m2po(*given, budget=0.04, every_token=every_token)
    assert result.loss == pytest.approx(sum(terms) / 4)
    assert result.grad[0].tolist() == pytest.approx([term / 4 for term in terms])


def test_maxrl() -> None:
    assert oracles.maxrl([1.0, 0.0, 0.0, 0.0] + [1.0] * 4 + [0.0] * 4, 4) == [3.0, -1.0, -1.0, -1.0] + [0.0] * 8


@pytest.mark.parametrize(("zero_tail", "tail"), [(False, 0.0), (True, 1.0)])
def test_token_baseline(zero_tail: bool, tail: float) -> None:
    halves = torch.full((2, 3), math.log(0.5), dtype=torch.float64)
    sums = torch.tensor([[0.5, math.nan, 0.5], [1.0, 0.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[True, False, True], [True, False, False]])
    first, second = oracles.token_baseline([1.0, 0.0], halves, sums, mask, 2, zero_tail=zero_tail)
    assert (first, second) == (pytest.approx([2 / 3, tail]), pytest.approx([-1 / 3]))


def test_variance_filter() -> None:
    rewards = [1.0, -1.0, 0.0, 1.0, 2.0, 2.0, 0.0, 0.5]
    assert oracles.variance_filter(rewards, 2) == [True, True, False, False]
    assert oracles.variance_filter(rewards, 2, share=0.96) == [True, True, False, True]
    assert oracles.variance_filter([3.0] * 4, 2) == [False, False]
