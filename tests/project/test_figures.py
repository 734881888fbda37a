"""The pictures of the docs show what their pages say."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tools.headroom import within

SCRIPT = Path(__file__).parents[2] / "docs/figures/kl_optimum.py"


@pytest.fixture(scope="module")
def toy() -> Any:
    pytest.importorskip("matplotlib", reason="needs the recipes extra")
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def runs(toy: Any) -> dict[str, Tensor]:
    return {name: toy.train(term) for name, term in toy.TERMS.items()}


@pytest.mark.parametrize(
    ("name", "divergence"),
    [
        ("optimum", lambda policy, reference: policy @ (policy / reference).log()),
        ("optimum_of_the_other_kl", lambda policy, reference: reference @ (reference / policy).log()),
    ],
    ids=["policy to reference", "reference to policy"],
)
def test_a_closed_form_is_the_optimum_of_its_objective(
    toy: Any, name: str, divergence: Callable[[Tensor, Tensor], Tensor]
) -> None:
    def objective(logits: Tensor) -> Tensor:
        policy = logits.softmax(0)
        return policy @ toy.REWARDS - toy.BETA * divergence(policy, toy.REFERENCE)

    policy = getattr(toy, name)()
    assert within(abs(policy.sum() - 1), 1e-12)
    assert within(torch.func.grad(objective)(policy.log()).abs(), 1e-12)
    curvature = torch.linalg.eigvalsh(torch.func.hessian(objective)(policy.log()))
    # a constant added to every logit changes nothing; every other direction leads down
    assert within(abs(curvature[-1]), 1e-12) and curvature[-2] < -1e-3


def test_the_corrected_kl_ends_at_the_optimum(toy: Any, runs: dict[str, Tensor]) -> None:
    assert within(toy.distances(runs["corrected"][-1], toy.optimum()), 1e-8)


@pytest.mark.parametrize("name", ["uncorrected", "ratio detached"])
def test_the_others_end_at_the_optimum_of_the_other_kl(toy: Any, runs: dict[str, Tensor], name: str) -> None:
    assert toy.distances(runs[name][-1], toy.optimum()) > 0.2
    assert within(toy.distances(runs[name][-1], toy.optimum_of_the_other_kl()), 1e-8)


def test_the_updates_of_a_rollout_are_off_policy(runs: dict[str, Tensor]) -> None:
    """On policy the two wrong terms have one gradient; from the second update of a rollout on they differ."""
    uncorrected, detached = runs["uncorrected"], runs["ratio detached"]
    assert within((uncorrected[1] - detached[1]).abs(), 1e-12)
    assert not within((uncorrected[2] - detached[2]).abs(), 1e-4)


def test_the_picture_is_drawn(toy: Any, runs: dict[str, Tensor], tmp_path: Path) -> None:
    toy.draw(tmp_path / "kl.png", runs)
    assert (tmp_path / "kl.png").stat().st_size > 10_000
