"""The pictures of the docs show what their pages say."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tools import script
from tests.tools.headroom import within

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def toy() -> Iterator[Any]:
    with script.figure("kl_optimum") as toy:
        yield toy


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


def test_the_corrected_kl_ends_at_the_optimum_and_the_others_at_that_of_the_other_kl(
    toy: Any, runs: dict[str, Tensor]
) -> None:
    assert within(toy.distances(runs["corrected"][-1], toy.optimum()), 1e-8)
    for name in ("uncorrected", "ratio detached"):
        assert toy.distances(runs[name][-1], toy.optimum()) > 0.2
        assert within(toy.distances(runs[name][-1], toy.optimum_of_the_other_kl()), 1e-8)


def test_the_picture_is_drawn(toy: Any, runs: dict[str, Tensor], tmp_path: Path) -> None:
    toy.draw(tmp_path / "kl.png", runs)
    assert (tmp_path / "kl.png").stat().st_size > 10_000


def test_the_first_picture_shows_the_recorded_runs_that_its_caption_quotes(tmp_path: Path) -> None:
    page = (ROOT / "README.md").read_text()
    recorded = json.loads((ROOT / "docs/figures/resume.json").read_text())
    theirs, ours = (recorded["runs"][package] for package in ("trl", "trl_steady"))
    assert ours["apart"] == 0 and ours["rewards"][0] == ours["rewards"][1]
    assert f"resumed after update {recorded['stop']}." in page and f"by up to {theirs['apart']:.4f} with TRL" in page
    with script.figure("resume") as resume:
        resume.draw(tmp_path / "resume.png")
    assert (tmp_path / "resume.png").stat().st_size > 10_000


def test_the_page_of_padding_has_the_recorded_figures(tmp_path: Path) -> None:
    recorded = json.loads((ROOT / "docs/figures/padding.json").read_text())
    page = (ROOT / "docs/performance.md").read_text()
    rows = re.findall(
        r"^\| ([a-z ]+) \| ([a-z_` ]+) \| (\d[\d.]+) \(([\d.]+), ([\d.]+)\) \|", page, flags=re.MULTILINE
    )
    found = {
        (name, variant.replace("ours, ", "").replace("ours", "default")): of["ratio"]
        for name, of_set in recorded["sets"].items()
        for variant, of in of_set["variants"].items()
    }
    assert found == {
        (name, variant.replace("`", "")): dict(zip(("median", "low", "high"), map(float, ratio), strict=True))
        for name, variant, *ratio in rows
    }
    with script.figure("padding") as picture:
        picture.draw(tmp_path / "padding.png", recorded)
    assert (tmp_path / "padding.png").stat().st_size > 10_000


def test_the_page_of_skipped_sequences_has_the_recorded_figures(tmp_path: Path) -> None:
    recorded = json.loads((ROOT / "docs/figures/weights.json").read_text())
    page = (ROOT / "docs/performance.md").read_text()
    rows = re.findall(r"^\| (0\.?\d*) \| (.*?) \|$", page, flags=re.MULTILINE)
    assert [float(share) for share, _ in rows] == [float(share) for share in recorded["shares"]]
    for (_, cells), of_share in zip(rows, recorded["shares"].values(), strict=True):
        ratios = [of["ratio"] for variant, of in of_share.items() if variant != "TRL"]
        tokens = [of["tokens"] / of_share["TRL"]["tokens"] for variant, of in of_share.items() if variant != "TRL"]
        expected = [f"{r['median']:.2f}" for r in ratios]
        assert cells.split(" | ") == [*expected, f"{tokens[-1]:.1%}"]
    with script.figure("weights") as picture:
        picture.draw(tmp_path / "weights.png", recorded)
    assert (tmp_path / "weights.png").stat().st_size > 10_000


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("name", ["flow", "rooms"])
def test_the_figure_of_the_design_is_of_todays_code(name: str, tmp_path: Path) -> None:
    """Run `docs/figures/NAME.py` if it is not."""
    image = pytest.importorskip("PIL.Image")
    with script.figure(name) as figure:
        figure.draw(tmp_path / "now.png")
    stored, now = (image.open(path) for path in (ROOT / f"docs/figures/{name}.png", tmp_path / "now.png"))
    assert stored.text["Description"] == now.text["Description"]
