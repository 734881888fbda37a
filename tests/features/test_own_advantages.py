"""Advantages that the method of a script's trainer returns, on their way to everything that reads them."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import trl_steady
from tests.tools import tiny
from trl_steady.core.types import Rollout
from trl_steady.trl_bridge.rewards import give_rewards

SGD: dict[str, Any] = {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "max_steps": 2}
Train = Callable[..., Any]


def flat(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [1.0] * len(completion_ids)


def odd(samples: dict[str, Any]) -> Tensor:
    """1 for answers with an odd number of tokens."""
    return (samples["completion_mask"].sum(1) % 2).float()


@pytest.fixture
def train(models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Trains with a subclass: `members` of the class, over the trainer of a method."""

    def train(members: dict[str, Any], method: str = "GRPO", **options: Any) -> Any:
        base = getattr(trl_steady, f"{method}Trainer")
        torch.manual_seed(0)
        with monkeypatch.context() as patch:
            patch.setattr(trl_steady, f"{method}Trainer", type("Own", (base,), {**members, "__module__": __name__}))
            return tiny.train(tiny.trainer(models["dense"], tmp_path, method=method, **{**SGD, **options}))

    return train


def own(function: Callable[[Any], Any], rollouts: list[Any] | None = None) -> dict[str, Any]:
    """Members of a class whose `advantages` is a function of the rollout, which is kept."""

    def advantages(_: Any, rollout: Any) -> Any:
        if rollouts is not None:
            rollouts.append(rollout)
        return function(rollout)

    return {"advantages": advantages}


@pytest.mark.fast_rows(2)
@pytest.mark.parametrize("method", ["GRPO", "RLOO", "PPO"])
@pytest.mark.parametrize("options", [{}, {"skip_zero_weight": True}, {"token_budget": 60}], ids=str)
def test_they_are_trained_as_if_a_rollout_had_them(train: Train, method: str, options: dict[str, Any]) -> None:
    """All answers earn the same, so that GRPO's and RLOO's own are 0."""
    options = {**options, "beta": 0.0, "build": {"reward_funcs": flat}}
    rollout_of_base = getattr(trl_steady, f"{method}Trainer")._generate_and_score_completions

    def replaced(trainer: Any, inputs: list[Any]) -> dict[str, Any]:
        samples = rollout_of_base(trainer, inputs)
        return {**samples, "advantages": odd(samples)}

    expected = train({"_generate_and_score_completions": replaced}, method, **options)
    trained = train(own(lambda rollout: odd(rollout.samples)), method, **options)
    found = tiny.parameters(trained)
    assert all(torch.equal(value, found[name]) for name, value in tiny.parameters(expected).items())
    shares = [row["skipped/sequences"] for row in tiny.history(trained) if "skipped/sequences" in row]
    assert not options.get("skip_zero_weight") or 0 < max(shares) < 1
    if method != "PPO":
        before = tiny.parameters(train({}, method, **options, max_steps=1))
        assert any(not torch.equal(value, found[name]) for name, value in before.items())


def test_a_method_sees_the_rollout_once_and_the_table_shows_what_it_returns(train: Train) -> None:
    rollouts: list[Any] = []

    def short(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        return [None if len(ids) == 1 else -len(ids) for ids in completion_ids]

    trained = train(
        own(lambda rollout: odd(rollout.samples), rollouts),
        reward_weights=[1.0, 0.5],
        build={"reward_funcs": [tiny.reward, short]},
        max_steps=1,
        dynamic_sampling=True,
        eval_strategy="no",
    )
    (rollout,) = rollouts
    lengths, ids = rollout.is_sampled.sum(1), rollout.samples["completion_ids"]
    texts = trained.processing_class.batch_decode(
        [row[:length] for row, length in zip(ids.tolist(), lengths.tolist(), strict=True)], skip_special_tokens=True
    )
    assert rollout.completions == texts and rollout.prompts == [row["prompt"] for row in rollout.inputs]
    by_function = rollout.rewards_by_function
    assert torch.equal(by_function[:, 1].isnan(), lengths == 1)
    assert torch.equal(rollout.rewards, by_function[:, 0] + 0.5 * by_function[:, 1].nan_to_num())
    size = trained.num_generations
    assert torch.equal(rollout.group_rewards[::size].flatten(), rollout.rewards)
    assert list(trained._logs["advantages"]) == odd(rollout.samples).tolist()


@pytest.mark.parametrize("process", [0, 1])
def test_a_group_may_be_on_several_processes(process: int) -> None:
    trainer: Any = SimpleNamespace(
        num_generations=4,
        model=torch.nn.Linear(1, 1),
        reward_weights=torch.tensor([1.0, 2.0]),
        accelerator=SimpleNamespace(process_index=process),
    )
    rewards = torch.arange(24.0).view(12, 2)
    rewards[7], rewards[8, 0] = torch.nan, torch.nan
    rollout, totals = Rollout(), [2.0, 8, 14, 20, 26, 32, 38, torch.nan, 34, 56, 62, 68]
    give_rewards(trainer, rollout, rewards, ["prompt"] * 6, ["answer"] * 6)
    same = {"rtol": 0, "atol": 0, "equal_nan": True}
    own_rows = slice(6 * process, 6 * process + 6)
    torch.testing.assert_close(rollout.rewards_by_function, rewards[own_rows], **same)
    torch.testing.assert_close(rollout.rewards, torch.tensor(totals)[own_rows], **same)
    groups = [totals[row // 4 * 4 : row // 4 * 4 + 4] for row in range(12)][own_rows]
    torch.testing.assert_close(rollout.group_rewards, torch.tensor(groups), **same)


def by_steps(completion_ids: list[list[int]], **_: Any) -> list[Any]:
    return [trl_steady.StepRewards.at_tokens([float(len(ids) % 3)], [len(ids)]) for ids in completion_ids]


def test_those_of_steps_may_be_replaced_token_by_token(train: Train) -> None:
    rollouts: list[Any] = []

    def halved(rollout: Any) -> Tensor:
        assert rollout.advantages.shape == rollout.is_sampled.shape
        return (rollout.advantages + 1).masked_fill(~rollout.is_sampled, torch.nan)  # padding is nobody's

    trained = train(own(halved, rollouts), build={"reward_funcs": by_steps}, max_steps=1)
    found, mask = rollouts[0].samples["advantages"], rollouts[0].is_sampled
    assert not found[~mask].any() and found[mask].isfinite().all()
    shown = [[value for _, value in completion] for completion in trained.last_step_advantages]
    assert shown == [row[kept].tolist() for row, kept in zip(found, mask, strict=True)]


def test_those_of_steps_may_be_replaced_by_one_for_each_answer(train: Train) -> None:
    rollouts: list[Any] = []
    members = own(lambda rollout: odd(rollout.samples), rollouts)
    trained = train(members, loss_type="gspo_token", build={"reward_funcs": by_steps}, max_steps=1)
    shown = [[value for _, value in completion] for completion in trained.last_step_advantages]
    expected = zip(odd(rollouts[0].samples).tolist(), rollouts[0].is_sampled.sum(1).tolist(), strict=True)
    assert shown == [[value] * count for value, count in expected]


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(
    "convert",
    [Tensor.tolist, Tensor.double, Tensor.requires_grad_, Tensor.numpy, Tensor.unbind],
    ids=str,
)
def test_lists_arrays_and_other_dtypes_are_taken(train: Train, convert: Callable[[Tensor], Any]) -> None:
    trained = train(own(lambda rollout: convert(odd(rollout.samples))), max_steps=1)
    expected = train(own(lambda rollout: odd(rollout.samples)), max_steps=1)
    found = tiny.parameters(trained)
    assert all(torch.equal(value, found[name]) for name, value in tiny.parameters(expected).items())


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda rollout: None, r"Own\.advantages returned a NoneType, which is no tensor of numbers"),
        (lambda rollout: ["good"] * len(rollout.rewards), r"returned a list, which is no tensor"),
        (lambda rollout: [[0.0]] + [[0.0, 1.0]] * 15, r"returned a list, which is no tensor"),
        (lambda rollout: rollout.group_rewards, r"returned shape \(16, 4\). Return \(16,\), .*, or \(16, \d+\)"),
        (lambda rollout: rollout.rewards[:-1], r"returned shape \(15,\)"),
        (lambda rollout: 1.0, r"returned shape \(\)"),
        (lambda rollout: rollout.rewards / 0 * 0, r"nan or an infinite number\. A reward is nan"),
        (lambda rollout: np.full(16, np.inf), r"nan or an infinite number\. A reward is nan"),
    ],
)
def test_what_is_no_advantage_is_refused(train: Train, returned: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train(own(returned), gradient_accumulation_steps=4)


@pytest.mark.parametrize(
    ("method", "options", "way_out"), [("RLOO", {}, "GRPOTrainer"), ("GRPO", {"loss_type": "gspo"}, "gspo_token")]
)
def test_advantages_per_token_are_refused_where_the_loss_takes_one(
    train: Train, method: str, options: dict[str, Any], way_out: str
) -> None:
    with pytest.raises(ValueError, match=rf"Own\.advantages returned one advantage per token. But .*{way_out}"):
        train(own(lambda rollout: rollout.is_sampled.float()), method, **options)


def test_the_start_lines_name_the_method(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    train(own(lambda rollout: rollout.advantages), max_steps=1, trim_padding=False)
    said = capsys.readouterr().out
    assert f"on: own advantages: {__name__}.Own.advantages" in said and "on: nothing" not in said


def test_data_of_a_script_under_this_name_is_no_method(train: Train) -> None:
    assert not train({"advantages": []}).advantages
