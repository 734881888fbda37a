"""recipes/stress: its samplers, its comparison, a small run of each experiment, and what was recorded of them."""

import itertools
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from tests.project import recipe
from trl_steady import GRPOConfig

FOLDER = Path(__file__).parents[2] / "recipes/stress"
EXPERIMENTS = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(FOLDER.glob("*.yaml"))}
RECORDED = [name for name in EXPERIMENTS if (FOLDER / f"results/{name}.json").is_file()]
FEW = {"max_steps": 4, "steps_per_generation": 2, "per_device_train_batch_size": 8, "num_generations": 4}
FEW_CHECKS = {"held_out": 4, "samples": 1, "every": 2}
ROUNDING = 1e-5  # of log-probs in float32: two passes add in another order


@pytest.fixture
def small(digits: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The small model of digits stands for SmolLM2, too."""
    monkeypatch.setitem(digits.stress.MODELS, "smollm2", digits.stress.MODELS["dense"])
    return digits


def trained(recipes: Any, folder: Path, *, every: int = 2, measured: Any = None, **arm: Any) -> Any:
    """The trainer, after a short run of an arm."""
    built: list[Any] = []

    class Kept(recipes.stress.Stressed):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **keywords)
            built.append(self)
            self.rollouts: list[Any] = []

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            self.rollouts.append(super()._generate_and_score_completions(inputs))
            return self.rollouts[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipes.stress, "Stressed", Kept)
        options = {**EXPERIMENTS["engine"]["options"], **FEW, "learning_rate": 0.01, **arm.pop("options", {})}
        figures = recipes.stress.train(
            recipes.stress.Arm(options, **{"sampler": {}, **arm}),
            *(0, folder, {**FEW_CHECKS, "every": every, **(measured or {})}),
        )
    return SimpleNamespace(trainer=built[0], rollouts=built[0].rollouts, figures=figures)


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


@pytest.mark.slow
def test_samplers_and_corrections_are_what_the_arm_says(small: Any, tmp_path: Path) -> None:
    """An exact sampler is the policy. The log-probs of a rounded one correct the loss, or are the old ones."""
    exact = trained(small, tmp_path)
    for samples in exact.rollouts:
        apart = samples["old_per_token_logps"] - samples["sampling_per_token_logps"]
        assert apart[samples["completion_mask"].bool()].abs().max() < ROUNDING
    rewards = [row["reward"] for row in exact.trainer.state.log_history if "reward" in row]
    assert exact.figures["reward"] == pytest.approx(rewards, rel=1e-3) and len(rewards) == len(exact.rollouts) == 2
    assert exact.figures["outside"] == [0.0, 0.0] and exact.figures["ess"] == pytest.approx([1.0, 1.0], abs=1e-3)

    plain, corrected, older = (
        trained(small, tmp_path, sampler={"rounding": "3 levels"}, **arm)
        for arm in ({}, {"correction": "token_truncate"}, {"old": "sampler"})
    )
    first = corrected.rollouts[0]
    mask = first["completion_mask"].bool()
    ratios = (first["old_per_token_logps"] - first["sampling_per_token_logps"]).exp()
    assert torch.equal(first["importance_sampling_ratio"][mask], ratios.clamp(max=3.0)[mask])
    assert ((ratios - 1).abs() > 0.01)[mask].any() and "importance_sampling_ratio" not in plain.rollouts[0]
    assert torch.equal(older.rollouts[0]["old_per_token_logps"], older.rollouts[0]["sampling_per_token_logps"])


@pytest.mark.slow
def test_a_sampler_lags_behind_and_rounds_linear_layers_only(small: Any, tmp_path: Path) -> None:
    """Rollout 3 of a sampler that lags by two comes from the policy before the first update, as rollout 1 does."""
    run = trained(small, tmp_path, sampler={"lag": 2, "rounding": "5 levels"}, options={"max_steps": 6})
    past = run.trainer.sampler.past
    assert len(run.rollouts) == 3 and len(past) == 3
    start, _ = small.digits.Digits(tmp_path / "start", dense=True).load(tmp_path, quantised=False)
    own, rounding = run.trainer.sampler.model.state_dict(), small.samplers.ROUNDINGS["5 levels"]
    assert own.keys() == start.state_dict().keys()
    for name, value in start.state_dict().items():
        is_rounded = name.endswith("proj.weight")
        assert torch.equal(own[name], rounding(value) if is_rounded else value), name
        assert torch.equal(past[0][name], value), name
    assert any(not torch.equal(past[1][name], past[0][name]) for name in past[0])
    assert run.figures["outside"][2] > 0 and run.figures["ess"][2] < 1


def leaves(problem: str, recipes: Any) -> list[list[int]]:
    """All answers of at most three tokens: an end ends one early."""
    tokens, end = range(len(recipes.digits.TOKENS)), recipes.digits.VOCABULARY["</s>"]
    return [
        list(own)
        for n in (1, 2, 3)
        for own in itertools.product(tokens, repeat=n)
        if end not in own[:-1] and (n == 3 or own[-1] == end)
    ]


@pytest.mark.slow
@torch.no_grad()
def test_the_distance_to_the_optimum_by_enumeration(small: Any, tmp_path: Path) -> None:
    """Problems of two digits have 2,536 answers. The optimum is start * exp(reward / beta), normalised."""
    task, beta, samples = small.digits.Digits(tmp_path, dense=True), 0.2, 3000
    start, tokenizer = small.digits.untaught(dense=True)
    policy, _ = small.digits.untaught(dense=True)
    for scale, model in ((60, start.eval()), (90, policy.eval())):
        model.lm_head.weight.mul_(scale).add_(0.01 * scale * torch.randn_like(model.lm_head.weight))
    problems = [(3, 1), (7, 2)]
    expected, variance = [], 0.0
    for problem in problems:
        answers = leaves(task.prompt(problem), small)
        prompt = tokenizer(task.prompt(problem))["input_ids"]
        padded = torch.tensor([prompt + own + [0] * (3 - len(own)) for own in answers])
        is_token = torch.arange(3) < torch.tensor([[len(own)] for own in answers])
        own, first = (
            model(padded).logits[:, len(prompt) - 1 : -1].double().log_softmax(-1) for model in (policy, start)
        )
        at = padded[:, len(prompt) :, None]
        log_p, log_first = ((of.gather(-1, at)[..., 0] * is_token).sum(1) for of in (own, first))
        right = tokenizer(small.digits.answer(problem))["input_ids"]
        rewards = torch.tensor([float(own == right) for own in answers])
        assert rewards.sum() == 1 and abs(log_p.exp().sum() - 1) < 1e-6
        optimum = (log_first + rewards / beta).log_softmax(0)
        expected.append((log_p.exp() * (log_p - optimum)).sum().item())
        of_answer = ((own.exp() * (own - first)).sum(-1) * is_token).sum(1)  # what a sample is worth
        variance += (log_p.exp() @ of_answer.square() - (log_p.exp() @ of_answer).square()).item()
    how: Any = {"samples": samples, "beta": beta}
    torch.manual_seed(0)
    found = small.checks.distance(policy, start, tokenizer, task, problems, **how)
    error = (variance / samples) ** 0.5 / len(problems)
    assert error < 0.05 * np.mean(expected)
    assert abs(found - np.mean(expected)) < 5 * error


@pytest.mark.slow
def test_the_rate_of_the_routers(small: Any, tmp_path: Path) -> None:
    """0 leaves them, and 1 is the default optimizer. A mixture has the figures of the probe."""
    first, _ = small.digits.untaught()
    arms = {rate: trained(small, tmp_path, model="mixture", router_rate=rate) for rate in (0.0, 1.0, 1 + 1e-9)}
    start, _ = small.digits.Digits(tmp_path / "start-mixture", balanced=False).load(tmp_path, quantised=False)
    ends = {rate: dict(run.trainer.model.named_parameters()) for rate, run in arms.items()}
    assert start.state_dict().keys() == first.state_dict().keys()
    for name, value in start.named_parameters():
        is_router = name.endswith("mlp.gate.weight")
        assert torch.equal(ends[0.0][name], value) == is_router, name
        assert not torch.equal(ends[1.0][name], value), name
        torch.testing.assert_close(ends[1 + 1e-9][name], ends[1.0][name], rtol=1e-4, atol=1e-5)
    assert all(len(arms[1.0].figures[name]) == 2 for name in ("changed", "log_ratio_std"))


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


def test_every_arm_of_an_experiment_can_be_built(recipes: Any, tmp_path: Path) -> None:
    for name, experiment in EXPERIMENTS.items():
        assert len(experiment["seeds"]) >= (3 if name == "smollm2" else 8)  # it confirms the results of others
        assert {experiment["control"], experiment["baseline"]} <= set(experiment["arms"])
        against = {arm.get("against", experiment["baseline"]) for arm in experiment["arms"].values()}
        assert against <= experiment["arms"].keys()
        for arm in recipes.experiment.arms(experiment).values():
            GRPOConfig(output_dir=str(tmp_path), use_cpu=True, **arm.options)
            recipes.samplers.Sampler(**arm.sampler or {})
            recipes.stress.task_of(arm, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_each_experiment_runs_on_a_smaller_model(
    small: Any, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its control and its baseline; the other arms are built above."""
    experiment = json.loads(json.dumps(EXPERIMENTS[name]))
    experiment["options"] |= FEW
    experiment["measured"] |= FEW_CHECKS
    experiment["arms"] = {arm: experiment["arms"][arm] for arm in (experiment["control"], experiment["baseline"])}
    file, output = tmp_path / f"{name}.yaml", tmp_path / "out" / name

    def run(*command: str) -> tuple[dict[str, Any], list[str]]:
        file.write_text(yaml.safe_dump(experiment, sort_keys=False))
        asked = [str(file), "--jobs", "1", "--seeds", "0", "--output_dir", str(output), *command]
        results = small.experiment.main(asked)
        return results, [line for line in capsys.readouterr().out.splitlines() if "  seed 0  " in line]

    results, lines = run()
    assert len(lines) == len(experiment["arms"]) == len(results["runs"])
    assert results["settings"] == json.loads((output / "results.json").read_text())["settings"] == experiment
    assert recipe.is_picture(output / "arms.png")
    again, lines = run()
    assert lines == [] and again["runs"] == results["runs"]
    arm = experiment["baseline"]  # other settings are another run
    experiment["arms"][arm] = {**experiment["arms"][arm], "options": {"learning_rate": 0.01}}
    _, lines = run("--arms", arm)
    assert len(lines) == 1 and lines[0].endswith(arm)


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
    assert recipes.experiment.table(experiment, runs) in (FOLDER / "README.md").read_text()
    assert all(np.isfinite([*row["accuracy"].values()]).all() for of_arm in runs.values() for row in of_arm.values())


def test_the_summary_of_evidence_quotes_recorded_differences(recipes: Any) -> None:
    page = (FOLDER.parents[1] / "docs/evidence.md").read_text()
    summary = page.partition("## Summary")[2].partition("## Exact")[0]
    quoted = set(re.findall(r"[\d.]+ \([\d.]+ to [\d.]+\)", summary))
    signed, intervals = set(), set()
    for name in RECORDED:
        _, runs = recorded(name)
        shown = recipes.experiment.SHOWN[EXPERIMENTS[name].get("figure", "accuracy")]
        found = set()
        for row in recipes.experiment.compare(EXPERIMENTS[name], runs).values():
            if row.difference is not None:
                ends = sorted(abs(end) for end in (row.low, row.high))
                sizes = (f"{shown.scale * size:.{shown.decimals}f}" for size in (abs(row.difference), *ends))
                found.add("{} ({} to {})".format(*sizes))
                signed.add(f"{shown.scale * row.difference:+.{shown.decimals}f}")
        assert found & quoted, name
        intervals |= found
    assert quoted <= intervals
    assert set(re.findall(r"(?<![\w.])[+-]\d+\.\d", summary)) <= signed
