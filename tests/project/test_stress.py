"""recipes/stress: its samplers, its comparison, a small run of one experiment, and what was recorded of them."""

import itertools
import json
import re
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import trl
import yaml
from matplotlib.colors import to_rgb

from tests.project import recipe
from trl_steady import GRPOConfig

FOLDER = Path(__file__).parents[2] / "recipes/stress"
PLANS = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(FOLDER.glob("*.yaml"))}
GRIDS = {name for name, experiment in PLANS.items() if "grid" in experiment}
EXPERIMENTS = {name: experiment for name, experiment in PLANS.items() if name not in GRIDS}
RECORDED = [name for name in EXPERIMENTS if (FOLDER / f"results/{name}.json").is_file()]


def test_roundings_by_hand(recipes: Any) -> None:
    """Each row has its own scale: the second is a thousandth of the first."""
    row = torch.tensor([6.0, -2.6, 1.0, 0.2])
    weight = torch.stack([row, row / 1000])
    by_hand = {
        "none": [6.0, -2.6, 1.0, 0.2],
        "3 levels": [6.0, 0.0, 0.0, 0.0],
        "5 levels": [6.0, -3.0, 0.0, 0.0],  # in units of 3
        "7 levels": [6.0, -2.0, 0.0, 0.0],  # in units of 2, and 0.5 goes to the even one
        "e2m1": [6.0, -3.0, 1.0, 0.0],
        "bf16": [6.0, -2.59375, 1.0, 0.2001953125],
    }
    for name, expected in by_hand.items():
        rounded = recipes.samplers.ROUNDINGS[name](weight)
        assert torch.allclose(rounded[0], torch.tensor(expected), rtol=1e-6, atol=0), name
        if name not in ("none", "bf16"):
            assert torch.allclose(rounded[1] * 1000, rounded[0], rtol=1e-5, atol=0), name
    # e4m3 has 3 bits behind the leading one: 448 * 2.6 / 6 = 194.13 lies between 192 and 208
    assert recipes.samplers.ROUNDINGS["e4m3"](weight)[0, 1] * 448 / 6 == pytest.approx(-192, rel=1e-6)


@torch.no_grad()
def test_the_sampler_computes_in_its_number_format(digits: Any, tmp_path: Path) -> None:
    model, tokenizer = digits.digits.untaught(dense=True)
    model.generation_config.eos_token_id = [digits.digits.VOCABULARY["</s>"]]
    args = SimpleNamespace(temperature=1.0, max_completion_length=3)
    trainer = SimpleNamespace(model=model.eval(), processing_class=tokenizer, args=args)
    prompts = [digits.digits.Digits(tmp_path, dense=True).prompt((3, 1))] * 8
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        sampler = digits.samplers.Sampler(dtype=str(dtype).removeprefix("torch."))
        found = sampler(prompts, trainer)
        assert {weight.dtype for weight in sampler.model.parameters()} == {dtype}
        copied = deepcopy(model).to(dtype)
        for prompt, answer, log_probs in zip(*found.values(), strict=True):
            logits = copied(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
            expected = logits.float().log_softmax(-1).gather(-1, torch.tensor(answer)[:, None])[:, 0]
            # a token by token pass with a cache may round otherwise, by a few units in the last place of the logits
            assert torch.tensor(log_probs).allclose(expected, rtol=0, atol=8 * torch.finfo(dtype).eps)


@pytest.mark.slow
@torch.no_grad()
def test_the_distance_to_the_optimum_by_enumeration(digits: Any, tmp_path: Path) -> None:
    """Problems of two digits have 2,536 answers. The optimum is start * exp(reward / beta), normalised."""
    tokens, end = range(len(digits.digits.TOKENS)), digits.digits.VOCABULARY["</s>"]
    # all answers of at most three tokens: an end ends one early
    answers = [[*own, end] for n in (0, 1) for own in itertools.product(tokens, repeat=n) if end not in own]
    answers += [[*own] for own in itertools.product(tokens, repeat=3) if end not in own[:-1]]
    task, beta, samples = digits.digits.Digits(tmp_path, dense=True), 0.2, 3000
    start, tokenizer = digits.digits.untaught(dense=True)
    policy, _ = digits.digits.untaught(dense=True)
    for scale, model in ((60, start.eval()), (90, policy.eval())):
        model.lm_head.weight.mul_(scale).add_(0.01 * scale * torch.randn_like(model.lm_head.weight))
    problems = [(3, 1), (7, 2)]
    expected, variance = [], 0.0
    for problem in problems:
        prompt = tokenizer(task.prompt(problem))["input_ids"]
        padded = torch.tensor([prompt + own + [0] * (3 - len(own)) for own in answers])
        is_token = torch.arange(3) < torch.tensor([[len(own)] for own in answers])
        own, first = (
            model(padded).logits[:, len(prompt) - 1 : -1].double().log_softmax(-1) for model in (policy, start)
        )
        at = padded[:, len(prompt) :, None]
        log_p, log_first = ((of.gather(-1, at)[..., 0] * is_token).sum(1) for of in (own, first))
        right = tokenizer(digits.digits.answer(problem))["input_ids"]
        rewards = torch.tensor([float(own == right) for own in answers])
        assert rewards.sum() == 1 and abs(log_p.exp().sum() - 1) < 1e-6
        optimum = (log_first + rewards / beta).log_softmax(0)
        expected.append((log_p.exp() * (log_p - optimum)).sum().item())
        of_answer = ((own.exp() * (own - first)).sum(-1) * is_token).sum(1)  # what a sample is worth
        variance += (log_p.exp() @ of_answer.square() - (log_p.exp() @ of_answer).square()).item()
    how: Any = {"samples": samples, "beta": beta}
    torch.manual_seed(0)
    found = digits.checks.distance(policy, start, tokenizer, task, problems, **how)
    error = (variance / samples) ** 0.5 / len(problems)
    assert error < 0.05 * np.mean(expected)
    assert abs(found - np.mean(expected)) < 5 * error


def test_the_comparison_by_hand(recipes: Any) -> None:
    """Gains of 0.1, 0.2 and 0.3 over three seeds: only all signs, or none, give a mean as far from 0 as 0.2."""
    experiment = {"baseline": "nothing", "arms": {"nothing": {}, "helps": {}, "more": {"against": "helps"}}}
    ends = {"nothing": (0.2, 0.3, 0.4), "helps": (0.3, 0.5, 0.7), "more": (0.4, 0.6, 0.8)}
    runs = {
        arm: {seed: {"accuracy": {"0": 0.0, **dict.fromkeys("123", end)}} for seed, end in enumerate(of_arm)}
        for arm, of_arm in ends.items()
    }
    found = recipes.experiment.compare(experiment, runs)
    assert found["nothing"][1:] == (None, None, None, None) and found["nothing"].mean == pytest.approx(0.3)
    assert found["helps"].difference == pytest.approx(0.2) and found["helps"].p == 2 / 8
    assert found["more"].difference == pytest.approx(0.1)
    # the mean of three resampled gains is 0.1 with a chance of 1/27 = 3.7 %, which is more than 2.5 %
    assert (found["helps"].low, found["helps"].high) == (pytest.approx(0.1), pytest.approx(0.3))
    # Holm: 0.01 * 3, then 0.02 * 2, and the last no smaller than the one before it
    assert recipes.experiment.holm([0.02, 0.03, 0.01]) == pytest.approx([0.04, 0.04, 0.03])


def test_a_row_of_the_picture_says_what_the_table_says(
    recipes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gains of 0.1, 0.2 and 0.3 exclude 0, and gains of -0.1, 0 and 0.2 do not: their interval is grey."""
    experiment = {"baseline": "nothing", "arms": {"nothing": {}, "helps": {}, "same": {}}, "columns": ["ess"]}
    ends = {"nothing": (0.2, 0.3, 0.4), "helps": (0.3, 0.5, 0.7), "same": (0.1, 0.3, 0.6)}
    runs: dict[str, dict[int, dict[str, Any]]] = {
        arm: {seed: {"accuracy": {"0": 0.0, **dict.fromkeys("123", end)}} for seed, end in enumerate(of_arm)}
        for arm, of_arm in ends.items()
    }
    for figures in runs["helps"].values():
        figures["ess"] = [0.25, 0.75]
    kept = []
    monkeypatch.setattr(recipes.experiment.plt, "close", kept.append)
    recipes.experiment.draw_differences(tmp_path / "differences.png", experiment, runs)
    (axis,) = kept[0].axes
    assert [text.get_text() for text in axis.texts] == [
        *("nothing", "30.0%"),
        *("helps [0.50]", "50.0%   +20.0 (+10.0 to +30.0)   p 0.500"),
        *("same", "33.3%   +3.3 (-10.0 to +20.0)   p 1.000"),
    ]
    intervals = [line for line in axis.lines if len(line.get_xdata()) == 2 and line.get_ydata()[0] in (1, 2)]
    shown = [(*np.round(line.get_xdata(), 9), line.get_ydata()[0], line.get_color()) for line in intervals]
    assert shown == [(10, 30, 1, "C0"), (-10, 20, 2, "0.6")]


def test_every_arm_of_an_experiment_can_be_built(recipes: Any, tmp_path: Path) -> None:
    for experiment in EXPERIMENTS.values():
        is_confirmation = experiment.get("model") == "smollm2"
        assert len(experiment["seeds"]) >= (3 if is_confirmation else 8)
        assert {experiment["control"], experiment["baseline"]} <= set(experiment["arms"])
        against = {arm.get("against", experiment["baseline"]) for arm in experiment["arms"].values()}
        assert against <= experiment["arms"].keys()
        for arm in recipes.experiment.arms(experiment).values():
            built(recipes, arm, tmp_path)


def built(recipes: Any, arm: Any, folder: Path) -> None:
    """Build everything of an arm but its trainer."""
    GRPOConfig(output_dir=str(folder), use_cpu=True, **arm.options)
    recipes.samplers.Sampler(**arm.sampler or {})
    recipes.engine.Engine(**arm.engine or {})
    recipes.stress.task_of(arm, folder)


def test_every_pair_of_a_grid_is_an_arm(recipes: Any, tmp_path: Path) -> None:
    for name in GRIDS:
        experiment = recipes.experiment.load(FOLDER / f"{name}.yaml")
        grid = experiment["grid"]
        assert len(grid["cells"]) == len(grid["rows"]) * len(grid["columns"])
        arms = recipes.experiment.arms(experiment)
        assert len(arms) == len(grid["cells"]) * len(grid["settings"]) and experiment["baseline"] in arms
        for arm in arms.values():
            built(recipes, arm, tmp_path)


def colour_of(cell: Any) -> str:
    """Return the name of a filled cell's colour, without its strength."""
    return next(name for name in ("C0", "C3") if np.allclose(cell.get_facecolor()[0, :3], to_rgb(name)))


def test_a_map_by_hand(recipes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first cell b ends first, and a below it on all seeds; c is below on one seed of two, so it is tied."""
    grid = {"cells": {"x": {}, "y": {}}, "settings": {"a": {}, "b": {}, "c": {}}, "rows": ["r"], "columns": ["x", "y"]}
    ends = {"x, a": [0.1, 0.3], "x, b": [0.3, 0.5], "x, c": [0.1, 0.6]}
    ends |= {"y, a": [0.9, 0.9], "y, b": [0.1, 0.1], "y, c": [0.2, 0.2]}
    found = recipes.grid.cells(grid, {arm: dict(enumerate(values)) for arm, values in ends.items()})
    assert found["x"].first == "b" and found["x"].tied == ["c"]
    assert found["x"].means == pytest.approx({"b": 0.4, "c": 0.35, "a": 0.2})
    assert found["y"].first == "a" and found["y"].tied == []
    rows = recipes.grid.table(found).splitlines()
    last = "| first or tied, of 2 | 1 | 1 | 1 |"
    assert rows[2:] == ["| x | 20.0 | **40.0** | **35.0** |", "| y | **90.0** | 10.0 | 20.0 |", last]
    summary = recipes.grid.summary(found).splitlines()
    assert summary[2:] == ["| b | 1 | 80.0 |", "| c | 1 | 70.0 |", "| a | 1 | 20.0 |"]
    recipes.grid.draw(tmp_path / "map.png", grid, found)
    assert recipe.is_picture(tmp_path / "map.png")
    kept = []
    monkeypatch.setattr(recipes.grid.plt, "close", kept.append)
    recipes.grid.draw_gaps(tmp_path / "gaps.png", grid, found)
    panels = [axis for axis in kept[0].axes if axis.get_visible()]
    assert [axis.get_title() for axis in panels] == ["a", "b", "c"]
    assert [[text.get_text() for text in axis.texts] for axis in panels] == [["20", "0"], ["0", "80"], ["5", "70"]]
    blue = [[colour_of(cell) == "C0" for cell in axis.collections] for axis in panels]
    assert blue == [[False, True], [True, False], [True, False]]


@pytest.mark.slow
def test_an_experiment_runs_on_a_smaller_model_and_not_again(
    digits: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its control, its baseline and a correction; the other arms are built above."""
    experiment = json.loads(json.dumps(EXPERIMENTS["engine"]))
    experiment["options"] |= {"max_steps": 4, "steps_per_generation": 2, "num_generations": 4}
    experiment["options"]["per_device_train_batch_size"] = 8
    experiment["measured"] |= {"held_out": 4, "samples": 1, "every": 2}
    arms = (experiment["control"], experiment["baseline"], "sequence_mask")
    experiment["arms"] = {arm: experiment["arms"][arm] for arm in arms}
    file, output = tmp_path / "engine.yaml", tmp_path / "out"

    def run(*command: str) -> tuple[dict[str, Any], list[str]]:
        file.write_text(yaml.safe_dump(experiment, sort_keys=False))
        asked = [str(file), "--jobs", "1", "--seeds", "0", "--output_dir", str(output), *command]
        results = digits.experiment.main(asked)
        return results, [line for line in capsys.readouterr().out.splitlines() if "  seed 0  " in line]

    results, lines = run()
    assert len(lines) == len(experiment["arms"]) == len(results["runs"])
    assert not any("%" in line for line in lines)  # one look, after all seeds
    assert results["settings"] == json.loads((output / "results.json").read_text())["settings"] == experiment
    assert recipe.is_picture(output / "arms.png")
    again, lines = run()
    assert lines == [] and again["runs"] == results["runs"]
    arm = experiment["baseline"]  # other settings are another run
    experiment["arms"][arm] = {**experiment["arms"][arm], "options": {"learning_rate": 0.01}}
    _, lines = run("--arms", arm)
    assert len(lines) == 1 and lines[0].endswith(arm)


def test_a_package_that_is_missing_has_no_version(recipes: Any) -> None:
    assert dict(recipes.experiment._versions(("trl", "no-such-package"))) == {"trl": trl.__version__}


def recorded(name: str) -> tuple[dict[str, Any], dict[str, dict[int, Any]]]:
    """Return the settings and the runs in an experiment's file of results."""
    found = json.loads((FOLDER / f"results/{name}.json").read_text())
    runs = {arm: {int(seed): row for seed, row in of_arm.items()} for arm, of_arm in found["runs"].items()}
    return found["settings"], runs


@pytest.mark.parametrize("name", RECORDED)
def test_what_was_recorded_fits_its_file_and_its_page(recipes: Any, name: str) -> None:
    experiment, (settings, runs) = EXPERIMENTS[name], recorded(name)
    shown = dict.fromkeys(("drawn", "columns"))  # they shape the page only, and may come after the runs
    assert settings | shown == experiment | shown
    assert {arm: list(of_arm) for arm, of_arm in runs.items()} == dict.fromkeys(
        experiment["arms"], experiment["seeds"]
    )
    pictures = ("", "-differences")
    assert all(f"](results/{name}{kind}.png)" in section_of(name) for kind in pictures)
    assert all(np.isfinite([*row["accuracy"].values()]).all() for of_arm in runs.values() for row in of_arm.values())


def test_the_recorded_map_is_what_the_pages_say(recipes: Any) -> None:
    experiment, (settings, runs) = recipes.experiment.load(FOLDER / "map.yaml"), recorded("map")
    assert settings == experiment
    assert {arm: list(own) for arm, own in runs.items()} == dict.fromkeys(experiment["arms"], experiment["seeds"])
    found = recipes.experiment.cells(experiment, runs)
    section = section_of("map")
    assert recipes.grid.summary(found) in section
    assert all(f"](results/map{kind}.png)" in section for kind in ("", "-gaps"))
    counts = recipes.grid.leading(found)
    pages = {page: (FOLDER.parents[1] / f"docs/{page}.md").read_text() for page in ("choose", "evidence")}
    assert all(f" in {counts['token_truncate and off-policy mask']} of " in text for text in pages.values())
    for setting in ("DPPO", "GRPO", "M2PO", "`token_truncate` alone"):
        count = counts[setting.removesuffix(" alone").strip("`")]
        assert re.search(rf"{setting}\s+in {count}[,.]", pages["evidence"]), setting
    without_a_loss = [name for name, cell in found.items() if "GRPO" in cell.best]
    assert without_a_loss == ["fresh and exact", "fresh and 15 levels"]


def section_of(name: str) -> str:
    """Return the part of the page on an experiment."""
    parts = (FOLDER / "README.md").read_text().split("\n## ")
    return next(part for part in parts if f"[`{name}.yaml`]({name}.yaml), " in part)


def quotable(recipes: Any, name: str) -> tuple[set[str], set[str]]:
    """Return the differences of an experiment as pages write them: with their intervals, and alone."""
    _, runs = recorded(name)
    shown = recipes.experiment.SHOWN[EXPERIMENTS[name].get("figure", "accuracy")]
    intervals, alone = set(), set()
    for row in recipes.experiment.compare(EXPERIMENTS[name], runs).values():
        if row.difference is None:
            continue
        scaled = [shown.scale * value for value in (row.difference, row.low, row.high)]
        ends = sorted(abs(end) for end in (row.low, row.high))
        sizes = (f"{shown.scale * size:.{shown.decimals}f}" for size in (abs(row.difference), *ends))
        intervals.add("{} ({} to {})".format(*sizes))
        intervals.add("{:+.{d}f} ({:+.{d}f} to {:+.{d}f})".format(*scaled, d=shown.decimals))
        alone.add(f"{scaled[0]:+.{shown.decimals}f}")
    return intervals, alone


INTERVAL = re.compile(r"[\d.]+ \([\d.]+ to [\d.]+\)|[+-][\d.]+ \([+-][\d.]+ to [+-][\d.]+\)")
SIGNED = re.compile(r"(?<![\w.])[+-]\d+\.\d")


def test_the_summary_of_evidence_quotes_recorded_differences(recipes: Any) -> None:
    page = (FOLDER.parents[1] / "docs/evidence.md").read_text()
    summary = page.partition("## Summary")[2].partition("## Exact")[0]
    quoted = set(INTERVAL.findall(summary))
    intervals, alone = set(), set()
    for name in RECORDED:
        own, differences = quotable(recipes, name)
        assert own & quoted, name
        intervals |= own
        alone |= differences
    assert quoted <= intervals
    assert set(SIGNED.findall(INTERVAL.sub("", summary))) <= alone
