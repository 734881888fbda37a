"""recipes/stress: engines that route otherwise or truncate, and the tasks with longer answers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset

from tests.project.recipe import is_picture
from trl_steady import GRPOConfig, StepRewards

PROMPTS = [[1, 5, 6, 7], [1, 9, 8, 7]]


def routes(recipes: Any, model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """Return the experts (tokens, experts per token) of each layer."""
    with torch.no_grad(), recipes.probe.routed(model) as chosen:
        model(input_ids=ids)
    return chosen


def test_an_engine_with_noise_routes_otherwise_and_is_the_policy_again(digits: Any) -> None:
    model, _ = digits.digits.untaught()
    ids = torch.tensor(PROMPTS)
    before = routes(digits, model, ids)
    engine = digits.engine.Engine(noise=3.0)
    with engine.running(model, seed=0):
        noisy = routes(digits, model, ids)
    with engine.running(model, seed=0):
        again = routes(digits, model, ids)
    with engine.running(model, seed=1):
        other = routes(digits, model, ids)
    after = routes(digits, model, ids)
    assert all(map(torch.equal, before, after)) and all(map(torch.equal, noisy, again))
    assert not all(map(torch.equal, before, noisy)) and not all(map(torch.equal, noisy, other))
    # the same count, by a loop over tokens
    differs = [
        expert not in own
        for layer_before, layer_noisy in zip(before, noisy, strict=True)
        for own, chosen in zip(layer_before.tolist(), layer_noisy.tolist(), strict=True)
        for expert in chosen
    ]
    found = engine.rerouted(model, 0, [row[:2] for row in PROMPTS], [row[2:] for row in PROMPTS])
    assert found == pytest.approx(sum(differs) / len(differs))


def test_the_routers_of_an_engine_in_float32_are_the_policys_bit_for_bit(digits: Any) -> None:
    """The forward that takes their place is that of transformers."""
    model, _ = digits.digits.untaught()
    engine = digits.engine.Engine()
    engine.routes_otherwise = True
    ids = torch.tensor(PROMPTS)
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        with engine.running(model, seed=0):
            assert torch.equal(model(input_ids=ids).logits, expected)


def test_routers_in_number_formats_by_hand(digits: Any) -> None:
    """1 + 2^-8 is half way between 1 and 1 + 2^-7 in bf16, and goes to the even 1; e4m3 keeps three bits."""
    hidden = torch.tensor([[1 + 2**-8, 1.0]])
    weight = torch.tensor([[1.0, 0.0], [1.0, -1.0]])
    assert digits.engine.ROUTERS["float32"](hidden, weight).tolist() == [[1 + 2**-8, 2**-8]]
    assert digits.engine.ROUTERS["bf16"](hidden, weight).tolist() == [[1.0, 0.0]]
    # the largest of a row is 448: 0.55 / 1 * 448 = 246.4 lies between 240 and 256
    assert digits.engine.ROUTERS["fp8"](torch.tensor([[1.0, 0.55]]), torch.eye(2)).float()[0, 1] == pytest.approx(
        240 / 448, rel=2**-8
    )


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"router_replay": "R3"}])
def test_r3_replays_the_routes_of_the_engine(digits: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    """The trainer's log-probs are those of the engine with R3, whose gate weights alone differ, and not without it."""
    arm = digits.stress.Arm(options={}, engine={"noise": 50.0}, model="mixture", correction="token_truncate")
    trainer = stressed(digits, arm, tmp_path, **options)
    samples = first_rollout(trainer)
    assert samples["importance_sampling_ratio"].shape == samples["old_per_token_logps"].shape
    row = trainer.apart[0]
    assert 0.1 < row["rerouted"] < 1 and 0 < row["weight"] <= 3
    changed = [log["routing/changed"] for log in trainer.state.log_history if "routing/changed" in log]
    assert bool(changed) == bool(options)
    if options:  # prompts and completions of the first rollout, and the probe's 32 answers
        assert changed[0] == pytest.approx(row["rerouted"], abs=0.1)


def first_rollout(trainer: Any) -> dict[str, Any]:
    """Train, and return the samples of the first rollout."""
    seen = []
    generate = trainer._generate_and_score_completions

    def noted(inputs: Any) -> Any:
        samples = generate(inputs)
        seen.append(samples)
        return samples

    trainer._generate_and_score_completions = noted
    trainer.train()
    return seen[0]


def stressed(recipes: Any, arm: Any, folder: Path, **options: Any) -> Any:
    """Return a trainer of a small model on the arm's task, for two updates of one rollout."""
    task = recipes.stress.task_of(arm, folder)
    model, tokenizer = task.load(folder, quantised=False)
    settings = {"per_device_train_batch_size": 8, "num_generations": 4, "steps_per_generation": 2, "max_steps": 2}
    settings |= {"gradient_accumulation_steps": 1, "max_completion_length": 4, "logging_steps": 1, "report_to": "none"}
    args = GRPOConfig(output_dir=str(folder / "out"), use_cpu=True, bf16=False, seed=3, **settings, **options)
    problems, _ = task.split(2)
    rows = [{"prompt": task.prompt(problem), "problem": list(problem)} for problem in problems[:8]]
    dataset = Dataset.from_list(rows)
    return recipes.stress.Stressed(arm, model, task.reward, args, dataset, processing_class=tokenizer)


@pytest.mark.slow
@pytest.mark.parametrize("kept", [True, False])
def test_the_log_probs_of_an_engine_are_those_of_what_it_samples_from(digits: Any, tmp_path: Path, kept: bool) -> None:
    """With the kept sampling mask they are the trainer's own, and without it larger by the log of the kept mass."""
    arm = digits.stress.Arm(options={}, engine={}, correction="sequence_mask")
    trainer = stressed(digits, arm, tmp_path, top_p=0.6, keep_sampling_mask=kept)
    samples = first_rollout(trainer)
    mask = samples["completion_mask"].bool()
    apart = (samples["old_per_token_logps"] - samples["sampling_per_token_logps"])[mask]
    if kept:
        assert apart.abs().max() < 1e-4  # two passes in float32
        assert trainer.apart[0]["weight"] == pytest.approx(1, abs=1e-3)
    else:  # the mass of the tokens that top-p keeps, at least 0.6 and on most steps below 1
        assert apart.max() < 1e-4 and apart.min() > torch.tensor(0.6).log() - 1e-4 and apart.mean() < -0.05
        assert 0 < trainer.apart[0]["weight"] < 0.9


def test_free_digits_by_hand(recipes: Any, tmp_path: Path) -> None:
    task = recipes.longer.Free(tmp_path, free=1)
    problem = (3, 1, 2, 0, 4, 5, 6, 7, 8, 9)
    right = "90817263544536271809</s>"
    assert task.prompt(problem) == "<s>3120456789:"
    assert task.is_right(problem, right) and task.is_right(problem, task.answer(problem))
    for wrong in (right[:-4], right[2:], "9" + right, right.replace("90", "91", 1), right.replace("9", ":", 1)):
        assert not task.is_right(problem, wrong)
    ids = [recipes.digits.VOCABULARY[c] for c in right[:20]]
    assert task.reward(["", ""], [list(problem)] * 2, [[*ids, 2], ids]) == [1.0, 0.0]
    unequal = recipes.longer.Free(tmp_path, free=2, unequal=True)
    assert unequal.prompt(problem) == "<s>3120456789:0"  # the sum is 45
    assert unequal.answer(problem) == "0123456789</s>"
    assert len(unequal.answer((3, 1, 2, 0, 4, 5, 6, 7, 8, 8))) == 30 + len("</s>")  # the sum is 44


def test_a_chain_by_hand(recipes: Any, tmp_path: Path) -> None:
    """Ten places before the first step is 3, the step before is 9, and 12 ends with 2."""
    problem = (3, 1, 2, 0, 4, 5, 6, 7, 8, 9)
    task = recipes.longer.Chain(tmp_path, steps=4)
    assert task.answer(problem) == "2355</s>"  # 9 + 3, 2 + 1, 3 + 2, 5 + 0
    assert task.right_steps(problem, "2355</s>") == [True] * 4
    assert task.right_steps(problem, "2466</s>") == [True, False, True, True]  # 4 + 2 and 6 + 0 follow from 4
    assert task.right_steps(problem, "23</s>55") == [True, True]
    assert task.is_right(problem, "2355</s>") and not task.is_right(problem, "23555")
    hard = recipes.longer.Chain(tmp_path, steps=4, hard=1, hard_share=1.0, worked_steps=4)
    shown = [task.right_steps(tuple(map(int, prompt[3:13])), answer) for prompt, answer in hard.worked()]
    shares = [sum(column) / len(shown) for column in zip(*shown, strict=True)]
    assert shares[0] == shares[2] == shares[3] == 1
    assert shares[1] == pytest.approx(0.1, abs=4 * (0.09 / len(shown)) ** 0.5)


def test_rewards_of_a_chain_by_hand(recipes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = [3, 1, 2, 0, 4, 5, 6, 7, 8, 9]
    ids = [[recipes.digits.VOCABULARY[c] for c in text] + [2] for text in ("2355", "2466")]

    def rewards(kind: str, count: int = 2) -> list[Any]:
        task = recipes.longer.Chain(tmp_path, steps=4, rewards=kind)
        return task.reward([""] * count, [problem] * count, ids[:count], log_metric=lambda *_: None)

    assert rewards("outcome") == [1.0, 0.0]
    assert rewards("share") == [1.0, 0.75]
    assert rewards("steps")[1] == StepRewards.at_tokens([0.25, 0, 0.25, 0.25], [1, 2, 3, 4])
    monkeypatch.setattr(recipes.longer, "DELAY", 2)
    assert rewards("delayed")[1] == StepRewards.at_tokens([0, 0, 0.25, 0.5], [1, 2, 3, 4])
    monkeypatch.setattr(recipes.longer, "WRONG", 1.0)
    assert rewards("noisy")[1] == StepRewards.at_tokens([0, 0.25, 0, 0], [1, 2, 3, 4])
    with pytest.raises(ValueError, match="rewards='all'"):
        rewards("all")


@pytest.mark.parametrize(
    ("text", "earned"),
    [
        ("2355</s>", [0.2, 0.2, 0.2, 0.2, 0.2]),
        ("23555", [0.2, 0.2, 0.2, 0.2, 0]),  # goes on behind the last step
        ("23</s>", [0.2, 0.2, 0]),  # ends early
    ],
)
def test_a_chain_that_pays_its_end_by_hand(recipes: Any, tmp_path: Path, text: str, earned: list[float]) -> None:
    problem = [3, 1, 2, 0, 4, 5, 6, 7, 8, 9]
    body, end, _ = text.partition("</s>")
    ids = [recipes.digits.VOCABULARY[c] for c in body] + [2] * bool(end)
    tasks = [recipes.longer.Chain(tmp_path, steps=4, rewards=kind, pays_end=True) for kind in ("steps", "share")]
    steps, share = (task.reward([""], [problem], [ids], log_metric=lambda *_: None)[0] for task in tasks)
    assert steps == StepRewards.at_tokens(earned, range(1, len(earned) + 1))
    assert share == pytest.approx(sum(earned))


def test_the_gain_of_r3_by_hand(recipes: Any, tmp_path: Path) -> None:
    """Accuracies of 0.2, 0.3, 0.4 become 0.3, 0.5, 0.7. An arm with a correction is another question."""
    arms = {
        "exact": {},
        "noise": {},
        "noise, R3": {"against": "noise"},
        "noise, token_truncate, R3": {"against": "noise", "correction": "token_truncate"},
    }
    ends = dict.fromkeys(arms, (0.2, 0.3, 0.4)) | {"noise, R3": (0.3, 0.5, 0.7)}
    runs = {}
    for arm, own in ends.items():
        figures = [{"accuracy": dict.fromkeys("123", end), "rerouted": [0.2, 0.4]} for end in own]
        runs[arm] = dict(enumerate(figures))
    found = recipes.gain.gains({"baseline": "exact", "arms": arms}, runs)
    assert [tuple(np.round(each, 9)) for each in found] == [(30, 20, 10, 30)]
    recipes.gain.draw(tmp_path / "gain.png", {"2 updates": found})
    assert is_picture(tmp_path / "gain.png")
