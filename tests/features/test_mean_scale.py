"""MaxRL: advantages over the mean reward of a group."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.oracles import trust_regions as oracles
from tests.tools import tiny
from tests.trainers.tools import by_steps

Rollouts = list[tuple[list[Any], dict[str, Any]]]


def trained(models: dict[str, Path], folder: Path, reward: Any, **options: Any) -> tuple[Any, Rollouts]:
    """The trainer after a run, with the rewards and the samples of each rollout."""
    rewards, samples = list[Any](), list[Any]()

    def kept(**inputs: Any) -> Any:
        rewards.append(reward(**inputs))
        return rewards[-1]

    options = {"scale_rewards": "mean", "max_steps": 8, "learning_rate": 0.0, **options}
    trainer = tiny.trainer(models["dense"], folder, build={"reward_funcs": kept}, **options)
    run = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: samples.append(run(inputs)) or samples[-1]
    trainer.train()
    return trainer, list(zip(rewards, samples, strict=True))


def test_advantages_are_the_oracles_of_the_rewards_with_a_verdict(models: dict[str, Path], tmp_path: Path) -> None:
    def few_right(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        """Mostly 0, and no verdict for some."""
        return [None if sum(ids) % 7 == 3 else 0.5 * (sum(ids) % 3 == 0) for ids in completion_ids]

    trainer, rollouts = trained(models, tmp_path, few_right)
    expected: list[float] = []
    for rewards, samples in rollouts:
        for start in range(0, len(rewards), 4):
            group = rewards[start : start + 4]
            scored = [reward for reward in group if reward is not None]
            own = iter(oracles.maxrl(scored, max(len(scored), 1)))
            expected += [0.0 if reward is None else next(own) for reward in group]
        assert samples["advantages"].tolist() == pytest.approx(expected[-len(rewards) :], rel=1e-5)  # float32
    assert max(expected) > 1 and sum(None in rewards for rewards, _ in rollouts) > 0
    assert list(trainer._logs["advantages"]) == pytest.approx(samples["advantages"].tolist())  # TRL's table
    assert trainer.scale_rewards == "mean"


def test_the_advantages_of_steps_are_divided_by_the_mean_of_their_sums(
    models: dict[str, Path], tmp_path: Path
) -> None:
    options = {"loss_type": "gspo_token"}
    (trainer, found), (_, undivided) = (
        trained(models, tmp_path / scale, by_steps, scale_rewards=scale, **options) for scale in ("mean", "none")
    )
    for (rewards, samples), (_, plain) in zip(found, undivided, strict=True):
        means = torch.tensor([each.total for each in rewards]).view(-1, 4).mean(1).repeat_interleave(4)
        assert torch.allclose(samples["advantages"] * means[:, None], plain["advantages"], rtol=1e-5, atol=1e-6)
    assert samples["advantages"].any() and len(means.unique()) > 1
    shown = [[value for _, value in completion] for completion in trainer.last_step_advantages]
    last = found[-1][1]
    kept = zip(last["advantages"], last["completion_mask"].bool(), strict=True)
    assert shown == [row[mask].tolist() for row, mask in kept]


def test_a_reward_below_0_stops_the_run(models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"scale_rewards='mean' does not work here: .*reward -1\b.*of 0 or above"):
        trained(models, tmp_path, lambda completion_ids, **_: [1.0, -1.0] * (len(completion_ids) // 2))


def test_it_does_not_act_on_the_advantages_of_a_critic(models: dict[str, Path], tmp_path: Path) -> None:
    """PPO warns that the option cannot act. A reward below 0 is none of its concern."""

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(sum(ids) % 5 - 2) for ids in completion_ids]

    def parameters(**options: Any) -> dict[str, torch.Tensor]:
        options |= {"method": "PPO", "num_generations": 1, "build": {"reward_funcs": reward}}
        return tiny.parameters(tiny.train(tiny.trainer(models["dense"], tmp_path, **options)))

    plain, scaled = parameters(), parameters(scale_rewards="mean")
    assert all(torch.equal(scaled[name], value) for name, value in plain.items())
