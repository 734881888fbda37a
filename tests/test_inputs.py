"""Data and reward functions that fit are not refused; what NaN means; whose completion is infinite."""

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset

from tests import tiny
from tests.stepwise import rows
from trl_steady.rewards.returned import refuse_infinite

NAN = float("nan")


def rewards_length(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [len(text) / len(right) for text, right in zip(completions, answer, strict=True)]


def filtering(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that passes on what the function takes."""

    @functools.wraps(function)
    def wrapper(**keywords: Any) -> Any:
        return function(keywords["completions"])

    return wrapper


@filtering
def decorated(completions: list[str]) -> list[float]:
    return [float(len(text)) for text in completions]


class Callable_:
    def __call__(self, completions: list[str], answer: list[str] | None = None, **_: Any) -> list[float]:
        return [float(len(text)) for text in completions]


def answered() -> Dataset:
    return tiny.dataset().add_column("answer", ["12"] * 16)


@pytest.mark.parametrize(
    "build",
    [
        {"reward_funcs": rewards_length, "train_dataset": answered()},
        {"reward_funcs": functools.partial(rewards_length, answer=["12"] * 16)},
        {"reward_funcs": [decorated, Callable_()]},
        {
            "train_dataset": tiny.dataset()
            .rename_column("prompt", "question")
            .with_transform(lambda batch: {"prompt": batch["question"]})
        },
        {"train_dataset": IterableDataset.from_generator(lambda: ({"prompt": str(i)} for i in range(16)))},
        {"train_dataset": Dataset.from_dict({"prompt": ["a"] * 4})},
        {"eval_dataset": {"one": tiny.dataset(4), "another": tiny.dataset(1)}},
    ],
    ids=["a column", "partial", "decorated, object", "a transform", "a stream", "just enough", "several evaluations"],
)
def test_what_fits_is_taken(models: dict[str, Path], tmp_path: Path, build: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert tiny.train(tiny.trainer(models["dense"], tmp_path, max_steps=1, build=build)).state.global_step == 1


def test_columns_of_a_rollout_func_reach_the_reward_functions(models: dict[str, Path], tmp_path: Path) -> None:
    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = {"prompt_ids": [[50]] * len(prompts), "completion_ids": [[60, 61]] * len(prompts)}
        return {**ids, "logprobs": [[-1.0, 1e-6]] * len(prompts), "answer": ["12"] * len(prompts)}

    build = {"reward_funcs": rewards_length, "rollout_func": rollout}
    assert tiny.train(tiny.trainer(models["dense"], tmp_path, max_steps=1, build=build)).state.global_step == 1


def test_nan_is_no_reward_and_said_once_a_function(models: dict[str, Path], tmp_path: Path) -> None:
    """Training is bit for bit what it is with None."""

    def run(missing: float | None) -> tuple[Any, list[str]]:
        def first(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
            return [missing if len(ids) % 2 else float(len(ids)) for ids in completion_ids]

        def second(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
            return [missing if i % 4 == 0 else float(i) for i in range(len(completion_ids))]

        trainer = tiny.trainer(models["dense"], tmp_path, max_steps=9, build={"reward_funcs": [first, second]})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tiny.train(trainer)
        return trainer, [str(w.message) for w in caught if "returned nan" in str(w.message)]

    (with_nan, said), (with_none, nothing) = run(NAN), run(None)
    assert [message.split(",")[0] for message in said] == [
        "reward function 'first' returned nan",
        "reward function 'second' returned nan",
    ]
    assert not nothing
    before, after = tiny.parameters(with_none), tiny.parameters(with_nan)
    assert all(torch.equal(before[name], value) for name, value in after.items())


@pytest.mark.parametrize(
    ("row", "said"), [(1, "completion 1 of process 0"), (4, "completion 0 of process 1"), (7, "completion 3 of proc")]
)
def test_an_infinite_reward_is_named_by_its_process_and_its_place_there(row: int, said: str) -> None:
    rewards = torch.zeros(8, 2)
    rewards[row, 1] = -torch.inf
    with pytest.raises(ValueError, match=rf"'second' returned -inf for {said}"):
        refuse_infinite(["first", "second"], rewards, 4)
    refuse_infinite(["first"], torch.tensor([[NAN], [3e38]]), 2)


def test_rewards_as_tensors_and_numbers_of_every_kind(models: dict[str, Path], tmp_path: Path) -> None:
    def mixed(completions: list[str], **_: Any) -> list[Any]:
        return [torch.tensor(1.5, dtype=torch.bfloat16), True, 2, None]

    def whole(completions: list[str], **_: Any) -> torch.Tensor:
        return torch.arange(4.0)

    def generated(completions: list[str], **_: Any) -> Any:
        return (float(i) for i in range(4))

    trainer = tiny.trainer(models["dense"], tmp_path, build={"reward_funcs": [mixed, whole, generated]})
    trainer.rollout(rows(4))
    logged = {name: list(column) for name, column in trainer._logs["rewards"].items()}
    assert logged["mixed"] == pytest.approx([1.5, 1.0, 2.0, NAN], nan_ok=True)
    assert logged["whole"] == logged["generated"] == [0.0, 1.0, 2.0, 3.0]
