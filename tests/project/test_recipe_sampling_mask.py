"""The recipe of the sampling mask: what its sampler tells, and a small run of each variant."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.project import recipe
from tests.project.recipe import is_picture
from tests.tools.headroom import within

NAME = "sampling_mask/digits-top-p"
VARIANTS = {
    "top-p 0.9, mask off": {},
    "top-p 0.9, mask on": {"keep_sampling_mask": True},
    "top-p 1": {"top_p": 1.0},
}
FEW = {"per_device_train_batch_size": 8, "num_generations": 4, "learning_rate": 0.01}
# of the whole vocabulary, while another distribution is sampled from
pytestmark = pytest.mark.filterwarnings("ignore:sampling leaves tokens out:UserWarning")


def test_what_the_sampler_tells(recipes: Any) -> None:
    logits = torch.tensor([[[0.5, 0.3, 0.1, 0.1], [0.6, 0.2, 0.1, 0.1]]]).log() * 2.0  # at a temperature of 2
    left = torch.tensor([[[True, True, False, False], [True] * 4]])
    scores = (logits / 2.0).where(left, -torch.inf)
    told = recipes.sampler.Drawn.among(torch.tensor([[1, 2]]), scores, logits, 2.0)
    torch.testing.assert_close(told.log_probs.exp(), torch.tensor([[0.3 / 0.8, 0.1]]))
    torch.testing.assert_close(told.kept_mass, torch.tensor([[0.8, 1.0]]))
    assert told.kept.tolist() == [[2, 4]] and told.of(0, 1).kept.tolist() == [2]


@pytest.mark.slow
@pytest.mark.parametrize(("label", "adapter"), [*((label, 0) for label in VARIANTS), ("top-p 0.9, mask on", 4)])
def test_each_variant_runs_on_a_smaller_model(
    digits: Any, label: str, adapter: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fast = {**FEW, "max_steps": 8, "check_every": 1, "lora_r": adapter, "start": tmp_path / "start"}
    results = recipe.run(digits, NAME, tmp_path / "out", **fast, **VARIANTS[label])
    assert "first updates: ratios are within" in capsys.readouterr().out
    assert digits.beside.variant(results) == label and digits.beside.updates(results) == 4
    has_mask, truncates = label.endswith("on"), label != "top-p 1"

    history = results["history"]
    assert [row["sampler/update"] for row in history if "sampler/update" in row] == [1, 2, 3, 4, 1, 2, 3, 4]
    off_one, off_mass = digits.sampler.first_updates(history)
    masses = digits.report.series(history, "sampler/kept_mass")[1]
    assert all(0.9 <= mass < 0.99 if truncates else mass == pytest.approx(1, abs=1e-6) for mass in masses)
    if has_mask:  # the trainer has the sampler's log-probs
        assert within(off_one, 1e-4) and off_mass > 0.01
        own = digits.report.series(history, "sampling_mask/kept_mass")[1]
        assert own[0] == pytest.approx(masses[0], abs=1e-4) and own[4] == pytest.approx(masses[4], abs=1e-4)
    else:  # as many times too small as there was probability on the kept tokens
        assert within(off_mass, 1e-4) and (off_one > 0.01) == truncates
    least = min(digits.beside.of_updates(results, "sampler/ratio_min", 1)[1])
    assert within(max(0, 0.9 - least), 1e-4)
    assert max(digits.beside.of_updates(results, "sampler/log_ratio_std", 4)[1]) > 1e-3  # the policy has moved

    assert list(results["accuracy"])[1:] == ["greedy", "sampled with top_p 0.9, 2 each"]
    digits.beside.main(str(tmp_path / "out/all.png"), str(tmp_path / "out/results.json"))
    assert "<svg" in (tmp_path / "out/report.html").read_text() and is_picture(tmp_path / "out/all.png")
    assert capsys.readouterr().out.splitlines()[2].startswith(f"| {label} | 0 | ")
    assert json.loads((tmp_path / "out/results.json").read_text())["objective"] == results["objective"]


def test_the_recorded_runs_are_what_the_readme_says(recipes: Any) -> None:
    """The cells of the page have each seed and the mean, or the mean."""
    folder = recipe.FOLDER / "sampling_mask"
    readme = (folder / "README.md").read_text().replace("%", "")
    runs = [json.loads(file.read_text()) for file in (folder / "results").glob("[am]*.json")]
    rows = [line[2:-2].split(" | ") for line in recipes.beside.table(runs).replace("%", "").splitlines()]
    for label in VARIANTS:
        *seeds, mean = (row[2:] for row in rows if row[0] == label)
        cells = [f"{', '.join(column)} ({of_all})" for *column, of_all in zip(*seeds, mean, strict=True)][:3]
        assert f"| {label} | {' | '.join(cells)} |" in readme
    ratios = [row for row in rows if row[0].startswith("ratio in update")]
    for name, *cells in ratios:
        assert f"| {name} | {' | '.join(cell.split(' (')[0] for cell in cells)} |" in readme
    assert [name for name, *_ in ratios] == ["ratio in update 1, mean", "ratio in update 4, mean"]
