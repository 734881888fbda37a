"""`GroupReward` on two processes: groups with members on both are judged once, and errors reach both."""

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import gather_object

from tests.distributed import processes
from tests.features.group_rewards.tools import ALIKE, Judge, build, ranks
from tests.tools import tiny
from trl_steady import GroupReward, StepRewards

# groups 0 and 2 are whole, group 1 has two members on each process
SIX: dict[str, Any] = {"per_device_train_batch_size": 6, "steps_per_generation": 1, "num_generations": 4}
EVALUATED = {"num_generations_eval": 4, "per_device_eval_batch_size": 6}
SETTINGS: dict[str, dict[str, Any]] = {
    "some groups on both": SIX,
    "each group on both": {**SIX, "num_generations": 12},
    "whole groups": {**SIX, "per_device_train_batch_size": 4},
    "micro-batches": {**SIX, "per_device_train_batch_size": 3, "steps_per_generation": 2},
    "RLOO": {**SIX, "method": "RLOO"},
    "PPO": {**SIX, "method": "PPO"},
    "PPO without groups": {**SIX, "method": "PPO", "num_generations": 1},
    "dynamic sampling": {**SIX, "dynamic_sampling": True},
    "evaluated": {**SIX, **EVALUATED, "build": {"eval_dataset": ALIKE}},
}


class Picky(Judge):
    """Ranks the rows with odd numbers only, and writes which row it has seen."""

    def __call__(self, completion_ids: Any, number: Any, log_extra: Any, **_: Any) -> list[float]:  # type: ignore[override]
        log_extra("row", number)
        return self.earned(number, super().__call__(completion_ids, number))

    def earned(self, number: list[int], rewards: list[float]) -> list[float]:
        return rewards if number[0] % 2 else [1.0] * len(number)


def check(trainer: Any, judge: Judge, size: int, *, is_replaced: bool) -> int:
    """Compare what both processes trained with what both judged. Return how many groups were on both."""
    calls: list[Any] = gather_object(judge.calls)
    assert all(len({*number}) == 1 and len(number) == len(ids) == size for number, ids in calls)
    row_of = {tuple(ids): number[0] for number, ids in calls}
    assert len(row_of) == len(calls)  # each group once
    trained = 0
    split = 0
    for kept in trainer.kept:
        ids: list[Any] = gather_object(kept.ids)
        rewards = gather_object(kept.rewards)
        for start in range(0, len(ids), size):
            group = slice(start, start + size)
            number = row_of[tuple(ids[group])]  # a group that a function has judged
            expected = [1.0] * size
            if not isinstance(judge, Picky) or number % 2:
                expected = ranks(ids[group])
            assert rewards[group] == [[pytest.approx(reward)] for reward in expected]
            trained += 1
            split += start // len(kept.ids) != (start + size - 1) // len(kept.ids)
    assert len(calls) > trained if is_replaced else len(calls) == trained
    return split


@pytest.mark.supports("group rewards", on="DDP")
@processes.on_two
def test_both_processes_have_each_group_judged_once(models: dict[str, Path], tmp_path: Path) -> None:
    for name, options in SETTINGS.items():
        is_replaced = "dynamic_sampling" in options
        judge = Picky() if is_replaced else Judge()
        trainer = build(models["dense"], tmp_path / name, GroupReward(judge), **{"max_steps": 3, **options})
        tiny.train(trainer)
        size = trainer.num_generations
        if is_replaced:
            assert gather_object([*trainer._logs["extra"]["row"]])
        if "eval_dataset" in options.get("build", {}):
            trainer.evaluate()
        split = check(trainer, judge, size, is_replaced=is_replaced)
        assert (split > 0) == (name not in ("whole groups", "PPO without groups")), name
        logged = trainer.state.log_history[0]
        assert logged["rewards/" + type(judge).__name__ + "/mean"] == logged["reward"], name


@pytest.mark.slow
@processes.on_two
def test_what_comes_back_reaches_the_right_rows(models: dict[str, Path], tmp_path: Path) -> None:
    """Steps, None and a column of the table, by an async and a plain function."""

    async def judge(completion_ids: list[list[int]], number: list[int], log_extra: Any, **_: Any) -> list[Any]:
        await asyncio.sleep(0.01 * (number[0] % 3))
        if number[0] % 3:
            log_extra("sum", [sum(ids) for ids in completion_ids])
        steps = [
            StepRewards.at_tokens([rank], [len(ids)])
            for rank, ids in zip(ranks(completion_ids), completion_ids, strict=True)
        ]
        return [None, *steps[1:]]

    def plain(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(sum(ids)) for ids in completion_ids]

    functions = [plain, GroupReward(judge)]
    trainer = build(models["dense"], tmp_path / "out", functions, **SIX, scale_rewards="none", max_steps=1)
    tiny.train(trainer)
    (kept,) = trainer.kept
    ids = gather_object(kept.ids)
    expected = [rank for start in range(0, 12, 4) for rank in [None, *ranks(ids[start : start + 4])[1:]]]
    found = [None if row[1] != row[1] else row[1] for row in gather_object(kept.rewards)]
    assert found == [rank if rank is None else pytest.approx(rank) for rank in expected]
    assert gather_object([len(trainer.last_step_advantages)]) == [6, 6]
    table, sums = trainer._logs["extra"]["sum"], trainer._logs["rewards"]["plain"]
    both = [*zip(table, sums, strict=True)]
    assert len(both) == 12 and all(value in (None, own) for value, own in both)
    assert {*map(type, table)} == {type(None), int}


def fail_on_second(kind: str) -> Any:
    """A function that fails for the last group, which is on the second process."""

    def judge(completion_ids: Any, number: Any, **_: Any) -> Any:
        if torch.distributed.get_rank() == 0:
            return ranks(completion_ids)
        if kind == "raises":
            raise ConnectionError("the judge is down")
        return ranks(completion_ids)[1:]

    async def late(**columns: Any) -> Any:
        if torch.distributed.get_rank() == 1:
            await asyncio.wait_for(asyncio.sleep(60), 0.05)
        return judge(**columns)

    return late if kind == "times out" else judge


FAILURES = {
    "raises": "ConnectionError: the judge is down",
    "too few": "3 rewards for 4 completions",
    "times out": "TimeoutError",
}


@pytest.mark.slow
@processes.on_two
def test_an_error_on_one_process_is_raised_on_both(models: dict[str, Path], tmp_path: Path) -> None:
    trainer = build(models["dense"], tmp_path / "out", GroupReward(Judge()), **SIX)
    trainer.model.train()
    for kind, why in FAILURES.items():
        trainer.reward_funcs = [GroupReward(fail_on_second(kind))]
        name = trainer.reward_funcs[0].__name__
        start = time.monotonic()
        with pytest.raises(
            RuntimeError, match=rf"function '{name}' failed for the group of the prompt '1\+1=': .*{why}"
        ) as raised:
            trainer._generate_and_score_completions([dict(ALIKE[i]) for i in range(6)])
        assert time.monotonic() - start < 50  # `late` sleeps for a minute, and gloo would wait for five
        assert (raised.value.__cause__ is not None) == (torch.distributed.get_rank() == 1)


class Live:
    """An environment that cannot be sent."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def reset(self, **_: Any) -> None:
        """Change nothing in the prompt."""


@pytest.mark.slow
@processes.on_two
def test_live_environments_stay_on_their_process(models: dict[str, Path], tmp_path: Path) -> None:
    """A function gets them if all groups are whole, and else asks for them in vain."""
    calls: list[Any] = []

    def judge(completions: Any, environments: Any = None, **_: Any) -> list[float]:
        calls.append(environments)
        return [float(i) for i in range(len(completions))]

    trainer = build(models["dense"], tmp_path / "out", GroupReward(judge), **SIX)
    trainer.model.train()
    rows = [{**ALIKE[i]} for i in range(6)]
    for size, expected in ((6, [Live] * 6), (4, None)):
        calls.clear()
        trainer.num_generations = size
        trainer.environments = [Live() for _ in rows]
        trainer._generate_and_score_completions([dict(row) for row in rows])
        assert calls and all((each and [*map(type, each)]) == expected for each in calls)
