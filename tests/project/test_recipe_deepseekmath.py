"""DeepSeekMath's figures: the task, what RFT's gradient and sampler are, a small run, and what was recorded."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.project import recipe
from tests.project.recipe import is_picture, parse

FOLDER = recipe.FOLDER / "deepseekmath"
PLAN = yaml.safe_load((FOLDER / "plan.yaml").read_text())
PROBLEM = (3, 8, 1, 4, 0, 0, 9, 2, 5, 5)  # sums: 3 11 12 16 16 16 25 27 32 37
FEW = {"max_steps": 2, "num_generations": 4, "per_device_train_batch_size": 8, "most_samples": 2, "check_every": 1}


@pytest.fixture
def chain(digits: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The recipes, whose chain has a small model after two steps of a warm start."""
    monkeypatch.setattr(digits.chain, "WORKED_STEPS", 2)
    monkeypatch.setattr(digits.chain.Chain, "is_right", lambda _, problem, text: sum(map(ord, text)) % 2 == 0)
    return digits


def test_steps_and_result_of_an_answer_by_hand(recipes: Any) -> None:
    chain = recipes.chain
    assert chain.answer(PROBLEM) == "3126665727</s>"
    task = chain.Chain(Path("unused"))
    for text, right, steps in (
        ("3126665727</s>", True, 10 * [True]),
        ("3226665727</s>", True, [True, False, False, *7 * [True]]),  # a wrong chain, by luck at the right result
        ("3126665726</s>", False, [*9 * [True], False]),
        ("4237776838</s>", False, [False, *9 * [True]]),  # wrong once
        ("312666572</s>", False, 9 * [True]),
        ("31266657277</s>", False, [*10 * [True], False]),
        ("3126665727", False, 10 * [True]),  # did not end
        ("", False, []),
    ):
        assert task.is_right(PROBLEM, text) is right
        assert chain.right_steps(PROBLEM, text.partition("</s>")[0]) == steps


def test_rewards_are_of_results_or_steps_and_the_end_is_in_the_last(recipes: Any) -> None:
    ids = [
        [recipes.digits.VOCABULARY[token] for token in tokens]
        for tokens in ([*"3126665727", "</s>"], [*"41"], ["</s>"])
    ]
    ids += [[*ids[0][:3], recipes.digits.VOCABULARY["<pad>"]]]  # a token of several characters
    logged: dict[str, float] = {}

    def rewarded(rewards: str) -> list[Any]:
        task = recipes.chain.Chain(Path("unused"), rewards)
        texts = ["".join(recipes.digits.TOKENS[i] for i in own) for own in ids]
        return task.reward(texts, [list(PROBLEM)] * 4, ids, log_metric=logged.__setitem__)

    assert rewarded("outcome") == [1, 0, 0, 0]
    whole, broken, silent, odd = rewarded("process")
    assert whole.values == 10 * (0.1,) and whole.ends == (1, 2, 3, 4, 5, 6, 7, 8, 9, 11)
    assert broken.values == (0, 0) and broken.ends == (1, 2) and silent.values == ()
    assert odd.values == (0.1, 0.1, 0.1, 0) and odd.ends == (1, 2, 3, 4)
    assert logged == {"right": 0.25, "right_steps": 13 / 40}


def test_no_problem_is_in_two_sets(recipes: Any) -> None:
    chain = recipes.chain
    train, test = chain.Chain(Path("unused")).split(200)
    worked = chain.draw(chain.WORKED_STEPS * recipes.digits.WORKED_BATCH, chain.SMALL, seed=0)
    large = chain.Chain(Path("unused")).large(200)
    assert len({*train, *test, *worked, *large}) == 4_000 + 200 + len(worked) + 200
    assert min(min(problem) for problem in large) == 5


@pytest.mark.slow
def test_the_gradient_of_rft_is_that_of_the_likelihood_of_right_answers(chain: Any, tmp_path: Path) -> None:
    """Its `advantages` make GRPO's loss the negative log-likelihood, weighted by 1 and 0."""
    found: dict[str, Any] = {}

    class Kept(chain.deepseekmath.RightAnswers):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            found["rollout"] = super()._generate_and_score_completions(inputs)
            return found["rollout"]

    class Gradients(chain.run.TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            found["gradients"] = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    few = {**FEW, "max_steps": 1, "quantised": False, "learning_rate": 0, "max_grad_norm": 0, "held_out": 4}
    parsed, args = parse(chain, "deepseekmath/rft", output_dir=tmp_path / "out", start=tmp_path / "start", **few)
    task = chain.chain.Chain(tmp_path / "start")
    sampler = chain.deepseekmath.from_start
    trainer = chain.small_model.build(parsed, args, task, kind=Kept, rollout_func=sampler)
    for name, weight in trainer.model.named_parameters():  # an adapter that does something
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    trainer.add_callback(Gradients())
    trainer.train()

    rollout = found["rollout"]
    ids, mask = rollout["completion_ids"], rollout["completion_mask"]
    texts = ["".join(chain.digits.TOKENS[i] for i in own[kept.bool()]) for own, kept in zip(ids, mask, strict=True)]
    right = torch.tensor([float(sum(map(ord, text)) % 2 == 0) for text in texts])
    assert 0 < right.sum() < len(right)
    logits = trainer.model(torch.cat([rollout["prompt_ids"], ids], dim=1)).logits[:, -ids.size(1) - 1 : -1]
    likelihood = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    loss = -(right * (likelihood * mask).sum(1) / mask.sum(1)).mean()
    names, weights = zip(*((n, p) for n, p in trainer.model.named_parameters() if p.requires_grad), strict=True)
    for name, expected in zip(names, torch.autograd.grad(loss, weights), strict=True):
        # float32, in another order
        assert torch.allclose(found["gradients"][name], expected, rtol=1e-3, atol=1e-6), name


@pytest.mark.slow
def test_each_arm_runs_and_is_not_run_again(chain: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {**FEW, "held_out": 4, "samples": 1, "use_cpu": True, "quantised": False, "bf16": False}
    own = {
        **PLAN,
        "arms": {
            name: {**arm, "options": {**arm.get("options", {}), **options}} for name, arm in PLAN["arms"].items()
        },
    }
    for arm in own["arms"].values():
        arm["config"] = str(FOLDER / arm["config"])
        if "sync_ref_model" in arm["options"]:
            arm["options"]["ref_model_sync_steps"] = 1
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(own, sort_keys=False))
    with pytest.MonkeyPatch.context() as patch:  # in this process, whose model is small
        patch.setattr(chain.figures, "ProcessPoolExecutor", lambda *_: ThreadPoolExecutor(1))
        command = [str(tmp_path / "plan.yaml"), "--output_dir", str(tmp_path / "out"), "--seeds", "0", "1"]
        found = chain.figures.main(command)
        assert capsys.readouterr().out.count("seed 1 ") == len(PLAN["arms"])
        assert is_picture(tmp_path / "out/runs.png")
        runs = {name: own[0] for name, own in found["runs"].items()}
        assert all(len(own["right"]) == 2 for own in runs.values())
        firsts = {name: own["right"][0] for name, own in runs.items()}
        assert len(set(firsts.values())) == 1  # all arms begin with the same rollout
        patch.setattr(chain.deepseekmath, "main", None)
        assert json.dumps(chain.figures.main(command)) == json.dumps(found)


def test_the_recorded_runs_are_what_the_readme_says(recipes: Any) -> None:
    recorded = json.loads((FOLDER / "results/runs.json").read_text())
    assert recorded["plan"] == PLAN
    runs = recorded["runs"]
    assert {name: len(own) for name, own in runs.items()} == dict.fromkeys(PLAN["arms"], 10)
    readme = (FOLDER / "README.md").read_text()
    parts = recipes.figures.tables(PLAN, runs).split("\n\n")
    for heading, table in zip(parts[::2], parts[1::2], strict=True):
        if heading.endswith("pass@1"):
            assert f"**{heading}**\n\n{table}" in readme
        else:  # a sentence has the start
            (start,) = re.findall(r"^\| start \| ([\d.]+)%", table, flags=re.MULTILINE)
            assert heading.startswith("Held-out") and f"{start} %" in readme
