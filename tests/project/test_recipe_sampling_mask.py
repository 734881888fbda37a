"""The recipe of the sampling mask: what its sampler tells, and a small run of each variant."""

import json
from typing import Any

import torch

from tests.project import recipe


def test_what_the_sampler_tells(recipes: Any) -> None:
    logits = torch.tensor([[[0.5, 0.3, 0.1, 0.1], [0.6, 0.2, 0.1, 0.1]]]).log() * 2.0  # at a temperature of 2
    left = torch.tensor([[[True, True, False, False], [True] * 4]])
    scores = (logits / 2.0).where(left, -torch.inf)
    told = recipes.sampler.Drawn.among(torch.tensor([[1, 2]]), scores, logits, 2.0)
    torch.testing.assert_close(told.log_probs.exp(), torch.tensor([[0.3 / 0.8, 0.1]]))
    torch.testing.assert_close(told.kept_mass, torch.tensor([[0.8, 1.0]]))
    assert told.kept.tolist() == [[2, 4]] and told.of(0, 1).kept.tolist() == [2]


def test_the_recorded_runs_are_what_the_readme_says(recipes: Any) -> None:
    """The cells of the page have each seed and the mean, or the mean."""
    folder = recipe.FOLDER / "sampling_mask"
    readme = (folder / "README.md").read_text().replace("%", "")
    runs = [json.loads(file.read_text()) for file in (folder / "results").glob("[am]*.json")]
    rows = [line[2:-2].split(" | ") for line in recipes.beside.table(runs).replace("%", "").splitlines()]
    for label in ("top-p 0.9, mask off", "top-p 0.9, mask on", "top-p 1"):
        *seeds, mean = (row[2:] for row in rows if row[0] == label)
        cells = [f"{', '.join(column)} ({of_all})" for *column, of_all in zip(*seeds, mean, strict=True)][:3]
        assert f"| {label} | {' | '.join(cells)} |" in readme
    ratios = [row for row in rows if row[0].startswith("ratio in update")]
    for name, *cells in ratios:
        assert f"| {name} | {' | '.join(cell.split(' (')[0] for cell in cells)} |" in readme
    assert [name for name, *_ in ratios] == ["ratio in update 1, mean", "ratio in update 4, mean"]
