"""`GroupReward` on one process: whole groups, each once, with everything that TRL gives a reward function."""

import asyncio
import functools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from tests.features.group_rewards.tools import ALIKE, Judge, build, by_rank, in_chunks, ranks
from tests.tools import tiny
from trl_steady import GroupReward, StepRewards

METHODS = ["GRPO", pytest.param("RLOO", marks=pytest.mark.slow), pytest.param("PPO", marks=pytest.mark.slow)]


@pytest.mark.parametrize("method", METHODS)
def test_a_function_gets_each_group_once_and_trains_as_a_plain_one(
    models: dict[str, Path], tmp_path: Path, method: str
) -> None:
    """All prompts are equal. The plain function cuts the batch into groups, which are whole on one process."""
    judge = Judge()
    options = {"steps_per_generation": 2, "per_device_train_batch_size": 6, "num_generations": 4, "max_steps": 4}
    own = tiny.train(build(models["dense"], tmp_path, GroupReward(judge), method, **options))
    plain = in_chunks(Judge(), 4)
    expected = tiny.train(build(models["dense"], tmp_path, plain, method, **options))
    parameters = tiny.parameters(expected)
    assert all(torch.equal(value, parameters[name]) for name, value in tiny.parameters(own).items())

    assert len(own.kept) == 2 and len(judge.calls) == 6
    ids = [completion for kept in own.kept for completion in kept.ids]
    assert [each for _, of_group in judge.calls for each in of_group] == ids
    assert all(len(set(number)) == 1 and len(number) == 4 for number, _ in judge.calls)
    assert own.kept == expected.kept
    assert len({reward for kept in own.kept for (reward,) in kept.rewards}) > 2


def test_a_function_that_stands_twice_judges_each_group_once(models: dict[str, Path], tmp_path: Path) -> None:
    """The calls may cost money, and its rewards count twice."""
    judge = Judge()
    twice = [GroupReward(judge)] * 2
    trainer = tiny.train(build(models["dense"], tmp_path, twice, max_steps=2))
    assert len(judge.calls) == 4 * len(trainer.kept)
    ids = [completion for kept in trainer.kept for completion in kept.ids]
    expected = [ranks(ids[start : start + 4]) for start in range(0, len(ids), 4)]
    rewards = [row for kept in trainer.kept for row in kept.rewards]
    assert rewards == [[reward, reward] for group in expected for reward in group]


def test_an_evaluation_has_groups_of_its_own_size(models: dict[str, Path], tmp_path: Path) -> None:
    judge = Judge()
    options = {"num_generations_eval": 2, "per_device_eval_batch_size": 6, "build": {"eval_dataset": ALIKE}}
    trainer = build(models["dense"], tmp_path, GroupReward(judge), **options)
    trainer.evaluate()
    assert sorted(number for number, _ in judge.calls) == [[row, row] for row in range(16)]
    assert [completion for kept in trainer.kept for completion in kept.ids] == [
        completion for _, ids in judge.calls for completion in ids
    ]
    expected = [[reward] for _, ids in judge.calls for reward in ranks(ids)]
    assert [reward for kept in trainer.kept for reward in kept.rewards] == expected


def test_async_functions_wait_for_all_groups_at_once(models: dict[str, Path], tmp_path: Path) -> None:
    """Each call returns only after those of all groups and both functions have begun."""
    barriers: list[asyncio.Barrier] = []
    calls: list[Any] = []

    async def first(completion_ids: Any, **_: Any) -> list[float]:
        calls.append(completion_ids)
        if not barriers:
            barriers.append(asyncio.Barrier(8))
        await asyncio.wait_for(barriers[0].wait(), 5)
        return ranks(completion_ids)

    class Second:
        async def __call__(self, **columns: Any) -> list[float]:
            return [2 * reward for reward in await first(**columns)]

    async def plain(completions: list[str], **_: Any) -> list[float]:
        return [float(len(text)) for text in completions]  # TRL's own loop

    for others in ([], [plain]):
        barriers.clear()
        calls.clear()
        functions = [GroupReward(first), GroupReward(Second()), *others]
        trainer = tiny.train(build(models["dense"], tmp_path, functions, max_steps=1))
        assert len(calls) == 8
        (kept,) = trainer.kept
        expected = [reward for start in range(0, 16, 4) for reward in ranks(kept.ids[start : start + 4])]
        assert [row[:2] for row in kept.rewards] == [[reward, 2 * reward] for reward in expected]


def test_a_function_has_all_that_trl_offers(models: dict[str, Path], tmp_path: Path) -> None:
    """Its own name and weight, None, the trainer's state, metrics, and a column beside the right completions."""
    steps: list[int] = []

    def judge(
        prompts: Any,
        completions: Any,
        number: Any,
        trainer_state: Any,
        log_metric: Any,
        log_extra: Any,
        bonus: float,
        **others: Any,
    ) -> Any:
        assert (
            prompts == ["1+1="] * 4 and {*map(len, (completions, number))} == {4} and [*others] == ["completion_ids"]
        )
        steps.append(trainer_state.global_step)
        log_metric("group", number[0])
        if number[0] % 2:
            log_extra(column="text", values=(f"{row}:{text}" for row, text in zip(number, completions, strict=True)))
        return (torch.tensor(bonus) if i % 2 else None for i in range(4))

    def plain(number: list[int], **_: Any) -> list[float]:
        return [float(row) for row in number]

    functions = [plain, GroupReward(functools.partial(judge, bonus=3.0))]
    trainer = build(models["dense"], tmp_path, functions, max_steps=1, reward_weights=[1.0, 0.5])
    tiny.train(trainer)
    logs, row = trainer._logs, trainer.state.log_history[0]
    rows = [int(reward) for reward in logs["rewards"]["plain"]]
    assert steps == [0] * 4 and row["group"] == sum(rows) / 16
    assert row["rewards/judge/mean"] == 3.0 and row["reward"] == pytest.approx(sum(rows) / 16 + 0.5 * 3 / 2)
    texts = [f"{row}:{text}" if row % 2 else None for row, text in zip(rows, logs["completion"], strict=True)]
    assert [*logs["extra"]["text"]] == texts and None in texts and any(texts)


def test_step_rewards_come_back(models: dict[str, Path], tmp_path: Path) -> None:
    def judge(completion_ids: list[list[int]], **_: Any) -> list[StepRewards]:
        return [steps(rank, ids) for rank, ids in zip(ranks(completion_ids), completion_ids, strict=True)]

    def steps(rank: float, ids: list[int]) -> StepRewards:
        if len(ids) < 2:
            return StepRewards.at_tokens([rank], [len(ids)])
        return StepRewards.at_tokens([rank, 1.0], [1, len(ids)])

    own, expected = (
        tiny.train(build(models["dense"], tmp_path, function, scale_rewards="none", max_steps=4))
        for function in (GroupReward(judge), in_chunks(lambda completion_ids, **_: judge(completion_ids), 4))
    )
    assert own.last_step_advantages == expected.last_step_advantages
    assert own.state.log_history[0]["steps/mean_count"] > 1
    parameters = tiny.parameters(expected)
    assert all(torch.equal(value, parameters[name]) for name, value in tiny.parameters(own).items())


def test_dynamic_sampling_judges_replaced_groups_and_no_kept_one_again(
    models: dict[str, Path], tmp_path: Path
) -> None:
    class Picky(Judge):
        def __call__(self, completion_ids: Any, number: Any, log_extra: Any, **_: Any) -> list[float]:  # type: ignore[override]
            log_extra("row", number)
            rewards = super().__call__(completion_ids, number)
            return rewards if number[0] % 2 else [1.0] * 4

    judge = Picky()
    options = {"dynamic_sampling": True, "dynamic_sampling_max_rounds": 4, "max_steps": 4, "steps_per_generation": 1}
    trainer = build(models["dense"], tmp_path, GroupReward(judge), per_device_train_batch_size=16, **options)
    tiny.train(trainer)
    generated = [row["dynamic_sampling/generated"] * 4 for row in trainer.state.log_history[:-1]]
    assert len(judge.calls) == sum(generated) > 16 == 4 * len(generated)
    number_of = {tuple(ids): number for number, ids in judge.calls}
    groups = [tuple(kept.ids[start : start + 4]) for kept in trainer.kept for start in range(0, 16, 4)]
    rows = [number_of[group] for group in groups]
    assert sum(number[0] % 2 for number in rows) >= 15
    assert [*trainer._logs["extra"]["row"]] == [row for number in rows[-4:] for row in number]


async def slow(**_: Any) -> list[float]:
    async with asyncio.timeout(0.05):
        await asyncio.sleep(20)
    raise AssertionError


async def cancelled(**_: Any) -> list[float]:
    raise asyncio.CancelledError


def down(**_: Any) -> list[float]:
    raise ConnectionError("the judge is down")


def too_few(**_: Any) -> list[float]:
    return [1.0, 2.0, 3.0]


def words(**_: Any) -> list[Any]:
    return ["good", 1.0, 2.0, 3.0]


def nothing(**_: Any) -> None:
    pass


def extra(log_extra: Any, **_: Any) -> list[float]:
    log_extra("why", ["because"])
    return [1.0] * 4


FAILURES = {
    slow: "TimeoutError",
    cancelled: "CancelledError",
    down: "ConnectionError: the judge is down",
    too_few: r"3 rewards for 4 completions\. Give one for each",
    words: "ValueError: could not convert string to float: 'good'",
    nothing: "TypeError: 'NoneType' object is not iterable",
    extra: r"1 values of 'why' for 4 completions",
}


@pytest.fixture(scope="module")
def failing(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    trainer = build(models["dense"], tmp_path_factory.mktemp("failing"), GroupReward(down), max_steps=1)
    trainer.model.train()
    return trainer


@pytest.mark.parametrize("function", FAILURES, ids=lambda function: function.__name__)
def test_an_error_names_the_function_and_the_prompt(failing: Any, function: Any) -> None:
    failing.reward_funcs[0] = GroupReward(function)
    start = time.monotonic()
    expected = (
        f"reward function '{function.__name__}' failed for the group of the prompt '1\\+1=': .*{FAILURES[function]}"
    )
    with pytest.raises(RuntimeError, match=expected) as raised:
        failing._generate_and_score_completions([{**ALIKE[i // 4]} for i in range(8)])
    assert isinstance(raised.value.__cause__, (Exception, asyncio.CancelledError))
    assert time.monotonic() - start < 15  # `slow` would take 20 seconds if nothing stopped it
    with pytest.raises(ValueError, match=rf"GroupReward\({function.__name__}\).*Import the trainer from trl_steady"):
        failing.reward_funcs[0](completions=[])  # no longer in a rollout


def test_a_long_prompt_is_shown_by_its_end(failing: Any) -> None:
    failing.reward_funcs[0] = GroupReward(down)
    rows = [{"prompt": "x" * 1000 + "?", "number": 1}] * 4
    with pytest.raises(RuntimeError, match=r"the prompt x{198}\?': ConnectionError"):
        failing._generate_and_score_completions(rows)


def test_an_error_of_another_function_leaves_nothing_for_the_next_rollout(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """The first function has judged for both when the one between them fails."""
    is_down = True

    def between(completions: Any, **_: Any) -> list[float]:
        if is_down:
            raise ConnectionError
        return [0.0] * len(completions)

    trainer = build(models["dense"], tmp_path, [GroupReward(by_rank), between, GroupReward(Judge())])
    trainer.model.train()
    rows = [dict(ALIKE[i // 4]) for i in range(8)]
    with pytest.raises(ConnectionError):
        trainer._generate_and_score_completions(rows)
    is_down = False
    trainer._generate_and_score_completions(rows)
    (kept,) = trainer.kept
    expected = [*ranks(kept.ids[:4]), *ranks(kept.ids[4:])]
    assert kept.rewards == [[reward, 0.0, reward] for reward in expected]


def test_in_trls_trainer_it_is_an_error(models: dict[str, Path], tmp_path: Path) -> None:
    trainer = tiny.trainer(models["dense"], tmp_path, ours=False, build={"reward_funcs": GroupReward(down)})
    with pytest.raises(ValueError, match=r"GroupReward\(down\).*Import the trainer from trl_steady"):
        trainer.train()


def test_what_cannot_be_called_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"GroupReward\('judge'\) has no function"):
        GroupReward("judge")  # type: ignore[arg-type]


def test_a_column_that_does_not_exist_is_an_error_before_a_rollout(models: dict[str, Path], tmp_path: Path) -> None:
    def judge(completions: Any, numbers: Any) -> list[float]:
        raise AssertionError

    with pytest.raises(ValueError, match=r"reward function 'judge' asks for 'numbers'.*Did you mean 'number'"):
        tiny.trainer(models["dense"], tmp_path, build={"reward_funcs": GroupReward(judge), "train_dataset": ALIKE})


def test_two_trainers_share_a_function(models: dict[str, Path], tmp_path: Path) -> None:
    judge = Judge()
    function = GroupReward(judge)
    pairs, fours = (build(models["dense"], tmp_path, function, num_generations=size, max_steps=1) for size in (2, 4))
    tiny.train(pairs)
    assert {len(number) for number, _ in judge.calls} == {2}
    judge.calls.clear()
    tiny.train(fours)
    assert {len(number) for number, _ in judge.calls} == {4}


def test_the_trainer_says_that_it_is_on(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.trainer(models["dense"], tmp_path, build={"reward_funcs": [GroupReward(down), down]})
    assert "on: completions of a prompt judged together: reward_funcs=GroupReward(...)" in capsys.readouterr().out
    tiny.trainer(models["dense"], tmp_path, build={"reward_funcs": down})
    assert "judged together" not in capsys.readouterr().out


def test_tensors_of_a_row_arrive(models: dict[str, Path], tmp_path: Path) -> None:
    data = Dataset.from_dict({"prompt": ["a"] * 8, "weights": [[float(i), 1.0] for i in range(8)]}).with_format(
        "torch"
    )
    seen: list[Any] = []

    def judge(weights: list[torch.Tensor], **_: Any) -> list[float]:
        seen.extend(weights)
        return [float(row[0]) for row in weights]

    trainer = build(models["dense"], tmp_path, GroupReward(judge), max_steps=1, build={"train_dataset": data})
    tiny.train(trainer)
    assert len(seen) == 16 and all(isinstance(row, torch.Tensor) for row in seen)
    assert [row for (row,) in trainer.kept[0].rewards] == [float(row[0]) for row in seen]
