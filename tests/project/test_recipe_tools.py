"""The recipe with a tool: what its turns earn, a small run of each arm, and what was recorded."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.project import recipe
from trl_steady import GRPOConfig, GRPOTrainer

FOLDER = recipe.FOLDER / "tools"
PLAN = yaml.safe_load((FOLDER / "drawers.yaml").read_text())
FEW = {"max_steps": 2, "per_device_train_batch_size": 8, "eval_steps": 2, "per_device_eval_batch_size": 4}


def answer(number: object) -> dict[str, Any]:
    return {"role": "assistant", "content": str(number)}


def found(number: object) -> dict[str, Any]:
    return {"role": "tool", "name": "open", "content": str(number)}


def test_a_turn_is_right_given_what_the_tool_said_before(recipes: Any) -> None:
    call, right_turns = recipes.drawers.call, recipes.drawers.right_turns
    begin = [call(11), found(6), call(10), found(2)]  # 3 + 8, 6 + 4
    whole = [*begin, call(9), found(5), answer(7)]
    cases: dict[str, tuple[list[dict[str, Any]], list[bool]]] = {
        "right": (whole, [True] * 4),
        "wrong first call": ([call(12), found(6), *whole[2:]], [False, True, True, True]),
        "wrong answer": ([*whole[:-1], answer(8)], [True, True, True, False]),
        "the right number too early": ([answer(7)], [False]),
        "an answer in place of a call": ([*begin, answer(9)], [True, True, False]),
        "words beside the answer": ([*whole[:-1], answer("7!")], [True, True, True, False]),
        "words beside a call": ([{**call(11), "content": "so"}, *whole[1:]], [False, True, True, True]),
        "a fifth turn": ([*whole[:-1], call(7), found(1), answer(7)], [True, True, True, False, False]),
        "two calls at once": (
            [{**call(11), "tool_calls": call(11)["tool_calls"] * 2}, found(6), found(6), *whole[2:]],
            [False, True, True, True],
        ),
    }
    for name, (completion, expected) in cases.items():
        assert right_turns("38472", completion) == expected, name
        earned = recipes.drawers.turn_rewards("38472", completion)
        assert earned.values == tuple(right / 4 for right in expected) and earned.unit == "turns"
        assert recipes.drawers.outcome_reward("38472", completion) == (name == "right")


def test_worked_examples_are_right_and_no_question_is_in_two_sets(recipes: Any) -> None:
    drawers = recipes.drawers
    train, held_out, worked = drawers.split(200)
    assert len({*train, *held_out, *worked}) == len(train) + 200 + len(worked)
    for question in held_out[:20]:
        assert drawers.outcome_reward(question, drawers.worked(question)) == 1
        chest = drawers.Drawers()
        chest.reset(question=question)
        first = drawers.worked(question)[1]["content"]
        assert str(chest.open(int(question[0]) + int(question[1]))) == first
    flawed = [drawers.outcome_reward(question, drawers.worked(question, 0.2)) for question in held_out]
    assert 0.2 < sum(flawed) / 200 < 0.8


@pytest.mark.slow
def test_each_arm_runs_and_turns_have_advantages_of_their_own(
    recipes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipes.drawers, "WORKED_STEPS", 120)  # enough for calls
    monkeypatch.setattr(recipes.drawers, "FLAWED_STEPS", 20)
    monkeypatch.setattr(recipes.drawers, "LEARNING_RATE", 5e-3)
    measured = {"held_out": 4}
    for name, own in PLAN["arms"].items():
        options = {**PLAN["options"], **own["options"], **FEW}
        arm = recipes.tools.Arm(options, own.get("rewards", "outcome"), own.get("critic", False))
        figures = recipes.tools.train(arm, 0, tmp_path, measured)
        assert len(figures["accuracy"]) == 2 and len(figures["right"]) == 1, name
        assert figures["tools/call_frequency"][0] > 0

    kept: dict[str, Any] = {}
    scored: list[Any] = []

    class Kept(GRPOTrainer):
        def advantages(self, rollout: Any) -> Any:
            if self.model.training:  # and not an evaluation
                kept.update(vars(rollout), found=rollout.advantages.clone(), sampled=rollout.is_sampled)
            return rollout.advantages

        def _get_per_token_logps_and_entropies(self, *arguments: Any, **options: Any) -> Any:
            found = super()._get_per_token_logps_and_entropies(*arguments, **options)
            if found[0].requires_grad:
                found[0].retain_grad()
                scored.append(found[0])
            return found

        def _prepare_inputs(self, generation_batch: Any) -> Any:
            inputs = super()._prepare_inputs(generation_batch)
            if self.model.training:
                kept.setdefault("batches", []).append(inputs)
            return inputs

    monkeypatch.setattr(recipes.tools, "GRPOTrainer", Kept)
    options = {**PLAN["options"], **PLAN["arms"]["turns"]["options"], **FEW, "trim_padding": False}
    recipes.tools.train(recipes.tools.Arm(options, "turns"), 0, tmp_path, measured)
    rows = zip(kept["inputs"], kept["completions"], strict=True)
    turns = [recipes.drawers.right_turns(row["question"], completion) for row, completion in rows]
    assert max(map(len, turns)) > 1
    to_go = [[sum(own[j:]) / 4 for j in range(len(own))] for own in turns]
    for i, own in enumerate(to_go):
        group = to_go[i // 8 * 8 : i // 8 * 8 + 8]
        is_own, column, turn = kept["sampled"][i], 0, -1
        for column in range(len(is_own)):
            if not is_own[column]:  # a tool's token, or padding
                assert kept["found"][i, column] == 0
                continue
            turn += column == 0 or not is_own[column - 1]
            others = [each[turn] for k, each in enumerate(group) if k != i % 8 and turn < len(each)]
            baseline = sum(others) / len(others) if others else 0.0
            assert kept["found"][i, column].item() == pytest.approx(7 / 8 * (own[turn] - baseline), abs=1e-6)
        assert turn == len(own) - 1
    assert torch.count_nonzero(kept["found"])
    # in the first update all ratios are 1, and a token's gradient is its advantage, over the tokens of its completion
    inputs, log_probs = kept["batches"][0], scored[0]
    is_own = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
    expected = -inputs["advantages"] * is_own / is_own.sum(1, keepdim=True) / len(is_own)
    torch.testing.assert_close(log_probs.grad, expected, rtol=1e-4, atol=1e-9)
    is_tool = inputs["completion_mask"].bool() & ~is_own
    assert is_tool.any() and not log_probs.grad[is_tool].any() and log_probs.grad.any()


def test_grpo_cannot_train_on_one_completion_of_a_prompt(tmp_path: Path) -> None:
    """As the README says."""
    with pytest.raises(ValueError, match="at least 2 generations"):
        GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, num_generations=1)


def test_the_recorded_runs_are_what_the_readme_says(recipes: Any) -> None:
    recorded = json.loads((FOLDER / "results/drawers.json").read_text())
    assert recorded["settings"] == PLAN
    assert {name: len(own) for name, own in recorded["runs"].items()} == dict.fromkeys(PLAN["arms"], 8)
    readme = (FOLDER / "README.md").read_text()
    assert recipes.experiment.table(PLAN, recorded["runs"]) in readme
    starts = [own["accuracy"]["0"] for runs in recorded["runs"].values() for own in runs.values()]
    assert re.search(rf"rise\s+from\s+{100 * sum(starts) / len(starts):.1f} %", readme)
