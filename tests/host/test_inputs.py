"""Data and reward functions that fit are not refused; what NaN means; whose completion is infinite."""

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, IterableDataset
from torch.utils.data import SubsetRandomSampler

import trl_steady
from tests.tools import tiny
from tests.tools.stepwise import rows
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


def questions() -> Dataset:
    return tiny.dataset().rename_column("prompt", "question")


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
        {"eval_dataset": questions()},
    ],
    ids=[
        "a column",
        "partial",
        "decorated, object",
        "a transform",
        "a stream",
        "just enough",
        "several evaluations",
        "no evaluation",
    ],
)
def test_what_fits_is_taken(models: dict[str, Path], tmp_path: Path, build: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert tiny.train(tiny.trainer(models["dense"], tmp_path, max_steps=1, build=build)).state.global_step == 1


def with_prompts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "prompt": row["question"], "answer": "12"} for row in rows]


class AtRollout(trl_steady.GRPOTrainer):
    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        return super()._generate_and_score_completions(with_prompts(inputs))


class AtBatch(trl_steady.GRPOTrainer):
    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        return super()._prepare_inputs(with_prompts(generation_batch))


class Collated(trl_steady.GRPOTrainer):
    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.data_collator = with_prompts


class Mapped(trl_steady.GRPOTrainer):
    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.train_dataset = Dataset.from_list(with_prompts(self.train_dataset.to_list()))


def of_a_subclass(kind: Any, model: Path, folder: Path, **build: Any) -> Any:
    args = tiny.arguments(trl_steady.GRPOConfig, folder, max_steps=1)
    build = {"reward_funcs": tiny.reward, "train_dataset": tiny.dataset(), **build}
    return kind(str(model), args=args, processing_class=tiny.tokenizer(), **build)


@pytest.mark.parametrize("kind", [AtRollout, AtBatch, Collated, Mapped])
def test_a_subclass_may_make_the_columns(kind: Any, models: dict[str, Path], tmp_path: Path) -> None:
    data = {"train_dataset": questions(), "reward_funcs": rewards_length}
    assert tiny.train(of_a_subclass(kind, models["dense"], tmp_path, **data)).state.global_step == 1


def test_the_data_of_a_subclass_that_leaves_it_alone_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    class Idle(trl_steady.GRPOTrainer):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **keywords)

    trainer = of_a_subclass(Idle, models["dense"], tmp_path, train_dataset=questions())
    with pytest.raises(ValueError, match="train_dataset has no column 'prompt'"):
        trainer.train()


def test_a_subclass_may_call_the_reward_functions_itself(models: dict[str, Path], tmp_path: Path) -> None:
    class Calling(trl_steady.GRPOTrainer):
        def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
            pairs = zip(prompts, completions, strict=True)
            return torch.tensor([[function(*pair) for function in self.reward_funcs] for pair in pairs])

    def length(prompt: str, completion: str) -> float:
        return float(len(completion) - len(prompt))

    trainer = of_a_subclass(Calling, models["dense"], tmp_path, reward_funcs=length)
    assert tiny.train(trainer).state.global_step == 1


def test_a_sampler_of_ones_own_may_take_fewer_prompts(models: dict[str, Path], tmp_path: Path) -> None:
    class Repeated(trl_steady.GRPOTrainer):
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return SubsetRandomSampler([0] * 16)

    trainer = of_a_subclass(Repeated, models["dense"], tmp_path, train_dataset=tiny.dataset(1))
    assert tiny.train(trainer).state.global_step == 1


def test_the_hint_for_a_small_dataset_is_a_way_out(models: dict[str, Path], tmp_path: Path) -> None:
    small: dict[str, Any] = {"build": {"train_dataset": tiny.dataset(1)}, "per_device_train_batch_size": 8}
    trainer = tiny.trainer(models["dense"], tmp_path, steps_per_generation=1, **small)
    with pytest.raises(ValueError, match="or set a smaller per_device_train_batch_size"):
        trainer.train()
    options = {**small, "per_device_train_batch_size": 4}
    tiny.trainer(models["dense"], tmp_path, steps_per_generation=1, **options).get_train_dataloader()


def rolled(prompts: list[Any], as_: Callable[[Any], Any] = list) -> dict[str, Any]:
    ids = {"prompt_ids": [[50]] * len(prompts), "completion_ids": as_([[60, 61]] * len(prompts))}
    return {**ids, "logprobs": as_([[-1.0, -2.0]] * len(prompts)), "env_mask": as_([[1, 1]] * len(prompts))}


@pytest.mark.parametrize("as_", [torch.tensor, np.array, lambda rows: [torch.tensor(row) for row in rows]])
def test_a_rollout_func_may_return_tensors_and_arrays(as_: Any, models: dict[str, Path], tmp_path: Path) -> None:
    build = {"rollout_func": lambda prompts, trainer: rolled(prompts, as_)}
    assert tiny.train(tiny.trainer(models["dense"], tmp_path, max_steps=1, build=build)).state.global_step == 1


@pytest.mark.parametrize("prompt", ["", 3, {"level": 1}], ids=str)
def test_a_rollout_func_may_take_prompts_of_any_kind(prompt: Any, models: dict[str, Path], tmp_path: Path) -> None:
    build = {
        "rollout_func": lambda prompts, trainer: rolled(prompts),
        "train_dataset": Dataset.from_dict({"prompt": [prompt] * 16}),
    }
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
