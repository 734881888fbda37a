"""Rewards that a subclass changes, groups that all earn the same, and what else happens around reward functions."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor

import trl_steady
from tests.tools import tiny
from trl_steady import StepRewards


def lengths_where(is_scored: Callable[[int], bool]) -> Callable[..., list[StepRewards | None]]:
    """Two steps for completions whose number of tokens `is_scored`."""

    def in_halves(completion_ids: list[list[int]], **_: Any) -> list[StepRewards | None]:
        return [
            StepRewards.at_tokens([float(ids[0] % 5), 1.0], [len(ids) // 2, len(ids)]) if is_scored(len(ids)) else None
            for ids in completion_ids
        ]

    return in_halves


def build(
    model: Path,
    folder: Path,
    functions: Any,
    method: str = "GRPO",
    change: Callable[[Any], Any] = lambda r: r,
    **options: Any,
) -> Any:
    """A trainer whose class changes what `super()._calculate_rewards` returned."""

    class Mine(getattr(trl_steady, f"{method}Trainer")):
        calls = 0

        def _calculate_rewards(self, *arguments: Any) -> Tensor:
            self.calls += 1
            return change(super()._calculate_rewards(*arguments))

    args = tiny.arguments(getattr(trl_steady, f"{method}Config"), folder, **{"max_steps": 2, **options})
    data = {"train_dataset": tiny.dataset(), "processing_class": tiny.tokenizer()}
    return Mine(str(model), functions, args, **data)


def trained(*arguments: Any, **options: Any) -> tuple[dict[str, Tensor], float]:
    """The parameters after a training, and the logged reward."""
    trainer = tiny.train(build(*arguments, **options))
    return tiny.parameters(trainer), tiny.history(trainer)[0]["reward"]


def check_same(own: tuple[dict[str, Tensor], float], other: tuple[dict[str, Tensor], float]) -> None:
    assert own[0].keys() == other[0].keys() and own[1] == other[1]
    assert all(torch.equal(value, other[0][name]) for name, value in own[0].items())


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(
    ("method", "is_dynamic"),
    [("GRPO", False), ("RLOO", False), ("PPO", False), ("GRPO", True), ("RLOO", True)],
)
def test_changed_rewards_are_trained(models: dict[str, Path], tmp_path: Path, method: str, is_dynamic: bool) -> None:
    """By function, and as functions would have returned them."""

    def shaped(rewards: Tensor) -> Tensor:
        """Another order of the first function's rewards and of the sums, and NaN where there was none."""
        return torch.stack([20 - 3 * rewards[:, 0], rewards[:, 1] / 2], dim=1)

    def length(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        """None for some."""
        return [None if len(ids) % 4 == 2 else float(len(ids)) for ids in completion_ids]

    def halves(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        return [None if value is None else value / 2 for value in length(completion_ids)]

    def other(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [20 - 3 * value for value in tiny.reward(completion_ids)]

    options: dict[str, Any] = {"reward_weights": [1.0, 0.5], "method": method}
    if method != "PPO":
        options["dynamic_sampling"] = is_dynamic
    changed = trained(models["dense"], tmp_path / "a", [tiny.reward, length], change=shaped, **options)
    check_same(changed, trained(models["dense"], tmp_path / "b", [other, halves], **options))


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("method", ["GRPO", "PPO"])
def test_a_changed_reward_of_one_step_is_that_of_the_step(
    models: dict[str, Path], tmp_path: Path, method: str
) -> None:
    def last_step(completion_ids: list[list[int]], **_: Any) -> list[StepRewards]:
        return [
            StepRewards.at_tokens([value], [len(ids)])
            for value, ids in zip(tiny.reward(completion_ids), completion_ids, strict=True)
        ]

    def opposite(completion_ids: list[list[int]], **_: Any) -> list[StepRewards]:
        return [StepRewards([-steps.total], steps.ends, unit="tokens") for steps in last_step(completion_ids)]

    options = {"method": method, "loss_type": "gspo_token"}
    changed = trained(models["dense"], tmp_path / "a", last_step, change=torch.neg, **options)
    check_same(changed, trained(models["dense"], tmp_path / "b", opposite, **options))


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("method", ["GRPO", "PPO"])
def test_steps_without_a_reward_any_more(models: dict[str, Path], tmp_path: Path, method: str) -> None:
    """A subclass that marks a completion as unscored, by NaN, takes its steps too."""

    def unscored(rewards: Tensor) -> Tensor:
        return rewards.where(rewards != 2.0, torch.nan)

    def scored(completion_ids: list[list[int]], **_: Any) -> list[StepRewards | None]:
        given = halves(completion_ids)
        return [None if steps is None or steps.total == 2.0 else steps for steps in given]

    halves = lengths_where(lambda tokens: tokens > 1)
    options = {"method": method, "loss_type": "gspo_token"}
    with pytest.warns(UserWarning, match="the reward of 'in_halves' is nan"):
        changed = trained(models["dense"], tmp_path / "a", halves, change=unscored, **options)
    check_same(changed, trained(models["dense"], tmp_path / "b", scored, **options))


@pytest.mark.parametrize("method", ["GRPO", "PPO"])
def test_a_change_that_belongs_to_no_step_is_refused(models: dict[str, Path], tmp_path: Path, method: str) -> None:
    options = {"method": method, "loss_type": "gspo_token"}
    trainer = build(models["dense"], tmp_path, lengths_where(lambda n: n > 1), change=torch.neg, **options)
    with pytest.raises(
        ValueError, match=r"Mine\._calculate_rewards does not work here: .* of 'in_halves', with 2 steps, to"
    ):
        trainer.train()


def test_a_subclass_rewards_each_round_once(models: dict[str, Path], tmp_path: Path) -> None:
    """Dynamic sampling trains what the rounds have earned, also if a subclass has a state."""
    seen: list[Tensor] = []

    def growing(rewards: Tensor) -> Tensor:
        seen.append(rewards + 100 * len(seen))
        return seen[-1]

    trainer = build(models["dense"], tmp_path, tiny.reward, change=growing, max_steps=1, dynamic_sampling=True)
    read: list[Tensor] = []
    trainer.features[0].on_rewards = lambda rewards, *_: read.append(rewards)
    trainer.train()
    assert len(seen) == trainer.calls == len(read) - 1 > 0
    assert set(read[-1].flatten().tolist()) <= {value for each in seen for value in each.flatten().tolist()}


# groups in which all earn the same

SIZE = 8
BY_GROUP: dict[str, tuple[str, dict[str, Any]]] = {
    "group": ("GRPO", {}),
    "none": ("GRPO", {"scale_rewards": "none"}),
    "RLOO": ("RLOO", {"beta": 0.0}),
    "RLOO, KL": ("RLOO", {"beta": 0.05}),
    "RLOO, normalised": ("RLOO", {"beta": 0.0, "normalize_advantages": True, "reward_clip_range": (-5.0, 0.85)}),
}
BY_BATCH: dict[str, tuple[str, dict[str, Any]]] = {
    "batch": ("GRPO", {"scale_rewards": "batch"}),
    "by function": ("GRPO", {"multi_objective_aggregation": "normalize_then_sum"}),
}


def rewarding(value: float, equal: list[bool]) -> list[Callable[..., list[float | None]]]:
    """Two functions that give each completion the same in the groups that are `equal`. One in five has no reward."""

    def first(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        places = range(len(completion_ids))
        return [None if i % 5 == 4 else value if equal[i // SIZE] else float(i % 3) for i in places]

    def second(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        places = range(len(completion_ids))
        return [(None if i % 5 == 4 else value / 2) if equal[i // SIZE] else float(i % 2) for i in places]

    return [first, second]


class Rolled(NamedTuple):
    advantages: Tensor  # (J, G)
    zero_std: float


def roll(model: Path, folder: Path, value: float, equal: list[bool], *, moved: bool = False, **options: Any) -> Rolled:
    """The advantages of a rollout, of a policy that may have left the reference."""
    built = {"build": {"reward_funcs": rewarding(value, equal)}, "reward_weights": [1.0, 0.3]}
    trainer = tiny.trainer(model, folder, num_generations=SIZE, per_device_train_batch_size=SIZE, **built, **options)
    trainer.model.train()
    torch.manual_seed(0)
    for parameter in trainer.model.parameters() if moved else ():
        parameter.data += 0.01 * torch.randn_like(parameter)
    rows = [{"prompt": f"{row // SIZE}+1="} for row in range(len(equal) * SIZE)]
    advantages = trainer._generate_and_score_completions(rows)["advantages"]
    (zero_std,) = trainer._metrics["train"]["frac_reward_zero_std"]
    return Rolled(advantages.view(-1, SIZE), zero_std)


@pytest.mark.fast_rows(2)
@pytest.mark.parametrize(
    ("setting", "value"), [*((setting, 0.1) for setting in BY_GROUP | BY_BATCH), ("group", 0.7), ("RLOO", 0.9)]
)
def test_equal_rewards_have_no_advantage(models: dict[str, Path], tmp_path: Path, setting: str, value: float) -> None:
    """Other groups have TRL's advantages bit for bit."""
    method, options = (BY_GROUP | BY_BATCH)[setting]
    equal = [True, False, True, True]
    ours = roll(models["dense"], tmp_path, value, equal, method=method, **options)
    # TRL normalises the sums of the whole batch, in which rounded means would be seen
    exact = 0.5 if setting == "by function" else value
    theirs = roll(models["dense"], tmp_path, exact, equal, ours=False, method=method, **options)
    is_equal = torch.tensor(equal).unsqueeze(1)
    assert torch.equal(ours.advantages, theirs.advantages.masked_fill(is_equal, 0.0))
    assert theirs.advantages[1].abs().max() > 0.1
    assert ours.zero_std == (0.75 if setting in BY_GROUP else 0.0)


@pytest.mark.parametrize("method", ["GRPO", "RLOO"])
def test_equal_sums_of_two_functions_have_no_advantage(models: dict[str, Path], tmp_path: Path, method: str) -> None:
    """In float32, 0.6 + 0.1 is not 0.7."""

    def answer(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [0.6 if i % 2 else 0.7 for i in range(len(completion_ids))]

    def form(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [0.1 if i % 2 else 0.0 for i in range(len(completion_ids))]

    options: dict[str, Any] = {"beta": 0.0, "method": method, "build": {"reward_funcs": [answer, form]}}
    trainer = tiny.trainer(models["dense"], tmp_path, **options)
    trainer.model.train()
    samples = trainer._generate_and_score_completions([{"prompt": "1+1="}] * 4)
    assert not samples["advantages"].any()
    assert trainer._metrics["train"]["frac_reward_zero_std"] == [1.0]


@pytest.mark.parametrize("setting", ["group", "RLOO, KL", "by function"])
def test_a_batch_of_equal_rewards_trains_nothing(models: dict[str, Path], tmp_path: Path, setting: str) -> None:
    method, options = (BY_GROUP | BY_BATCH)[setting]
    rolled = roll(models["dense"], tmp_path, 0.9, [True] * 4, method=method, **options)
    assert not rolled.advantages.any() and rolled.zero_std == 1.0


def test_a_kl_in_the_reward_is_a_difference(models: dict[str, Path], tmp_path: Path) -> None:
    """RLOO's rewards differ by the KL of a policy that has left the reference."""
    options: dict[str, Any] = {"method": "RLOO", "beta": 0.05, "moved": True}
    theirs, ours = (
        roll(models["dense"], tmp_path, 0.9, [True] * 4, ours=ours, padded=True, **options) for ours in (False, True)
    )
    assert torch.equal(ours.advantages, theirs.advantages)
    assert ours.advantages.abs().max() > 1e-3 and ours.zero_std == theirs.zero_std == 0.0


# what else happens around reward functions


def test_an_answer_without_extra_values_shows_none(models: dict[str, Path], tmp_path: Path) -> None:
    """TRL would show those of earlier answers."""
    calls: list[None] = []

    def at_times(completion_ids: list[list[int]], log_extra: Callable[..., None], **_: Any) -> list[float]:
        calls.append(None)
        if len(calls) != 2:
            log_extra("call", [len(calls)] * len(completion_ids))
        return tiny.reward(completion_ids)

    trainer = tiny.trainer(models["dense"], tmp_path, build={"reward_funcs": at_times})
    columns = []
    for _ in range(3):
        trainer._generate_and_score_completions([{"prompt": f"{row // 4}+1="} for row in range(16)])
        columns.append([*trainer._logs["extra"]["call"]])
    assert columns == [[1] * 16, [None] * 16, [3] * 16]


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(
    ("act", "evaluations"),
    [
        (lambda trainer: trainer.evaluate(), 7),
        (lambda trainer: trainer.predict(tiny.dataset(4)), 2),
        (lambda trainer: trainer.model.eval(), 2),
    ],
    ids=["evaluate", "predict", "eval mode"],
)
def test_a_callback_that_leaves_training_changes_no_log_of_it(
    models: dict[str, Path], tmp_path: Path, act: Callable[[Any], object], evaluations: int
) -> None:
    """The planned evaluations, after the third step and the last, happen too."""

    class Interrupting(transformers.TrainerCallback):
        """Does something with the trainer after each step, and draws no number."""

        trainer: Any

        def __init__(self, act: Callable[[Any], object]) -> None:
            self.act = act

        def on_step_end(self, *_: Any, **__: Any) -> None:
            state = torch.get_rng_state()
            self.act(self.trainer)
            torch.set_rng_state(state)

    def history(*callbacks: Interrupting) -> list[dict[str, float]]:
        build = {"callbacks": [*callbacks], "eval_dataset": tiny.dataset(4)}
        planned = {"eval_strategy": "steps", "eval_steps": 3}
        options = {"max_steps": 5, "logging_steps": 2, "per_device_eval_batch_size": 4, **planned}
        trainer = tiny.trainer(models["dense"], tmp_path, build=build, **options)
        for callback in callbacks:
            callback.trainer = trainer
        tiny.train(trainer)
        assert trainer.model.training
        trainer.evaluate()
        assert not trainer.model.training  # as after TRL's, outside of a training
        return tiny.history(trainer)[:-1]

    expected, rows = history(), history(Interrupting(act))
    trained = [row for row in rows if "loss" in row]
    # tokens of evaluations count too
    drop = lambda row: {name: value for name, value in row.items() if name != "num_tokens"}
    assert [*map(drop, trained)] == [drop(row) for row in expected if "loss" in row] != []
    assert sum("eval_reward" in row for row in rows) == evaluations
