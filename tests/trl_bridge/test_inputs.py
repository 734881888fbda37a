"""Rewards: the meaning of NaN, and the kinds that count."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import trl_steady
from tests.features.step_rewards.tools import rows
from tests.tools import tiny

NAN = float("nan")


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
        return trainer, [str(w.message) for w in caught if "is nan" in str(w.message)]

    (with_nan, said), (with_none, nothing) = run(NAN), run(None)
    assert [message.split(",")[0] for message in said] == [
        "the reward of 'first' is nan",
        "the reward of 'second' is nan",
    ]
    assert not nothing
    before, after = tiny.parameters(with_none), tiny.parameters(with_nan)
    assert all(torch.equal(before[name], value) for name, value in after.items())


def test_rewards_as_tensors_and_numbers_of_every_kind(models: dict[str, Path], tmp_path: Path) -> None:
    def mixed(completions: list[str], **_: Any) -> list[Any]:
        return [torch.tensor(1.5, dtype=torch.bfloat16), True, 2, None]

    def whole(completions: list[str], **_: Any) -> torch.Tensor:
        return torch.arange(4.0)

    def generated(completions: list[str], **_: Any) -> Any:
        return (float(i) for i in range(4))

    trainer = tiny.trainer(models["dense"], tmp_path, build={"reward_funcs": [mixed, whole, generated]})
    trainer._generate_and_score_completions(rows(4))
    logged = {name: list(column) for name, column in trainer._logs["rewards"].items()}
    assert logged["mixed"] == pytest.approx([1.5, 1.0, 2.0, NAN], nan_ok=True)
    assert logged["whole"] == logged["generated"] == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("name", ["metrics", "checkpoints", "features", "preemption"])
def test_an_attribute_of_a_script_with_a_name_of_ours_is_refused_before_the_training(
    models: dict[str, Path], tmp_path: Path, name: str
) -> None:
    class Mine(trl_steady.GRPOTrainer):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **keywords)
            setattr(self, name, [])

    args = tiny.arguments(trl_steady.GRPOConfig, tmp_path)
    data = {"train_dataset": tiny.dataset(), "processing_class": tiny.tokenizer()}
    trainer = Mine(str(models["dense"]), tiny.reward, args, **data)
    with pytest.raises(ValueError, match=f"Mine sets an attribute '{name}' of its own"):
        trainer.train()
