"""Metrics of evaluations on two processes: each completion counts once, and the training keeps its bits."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from accelerate.utils import gather_object

from tests.distributed import processes
from tests.features.test_evaluations import (
    by_luck,
    evaluations,
    expected,
    has_even_sum,
    majority,
    mean,
    mean_token,
    questions,
)
from tests.tools import resumable, tiny

EVALUATING: dict[str, Any] = {
    **{"per_device_train_batch_size": 2, "steps_per_generation": 2, "max_steps": 4, "eval_strategy": "steps"},
    **{"eval_steps": 2, "num_generations_eval": 2, "per_device_eval_batch_size": 3},
}
"""Three prompts in a batch of both processes: the second one has a completion on each."""


class Judge:
    """`has_even_sum` and the numbers of its prompts, batch by batch."""

    def __init__(self) -> None:
        self.batches: list[list[tuple[int, Any]]] = []

    def __call__(self, number: list[int], **columns: Any) -> list[Any]:
        found = has_even_sum(number=number, **columns)
        self.batches.append([*zip(number, found, strict=True)])
        return found

    def rows(self) -> list[tuple[int, Any]]:
        """Return the rows of both processes, in the order of the sampler."""
        of_both: list[list[list[tuple[int, Any]]]] = gather_object([self.batches])
        return [row for batches in zip(*of_both, strict=True) for row in itertools.chain(*batches)]


def is_first(number: list[int], **_: Any) -> list[float]:
    return [float(each < 2) for each in number]


@pytest.mark.parametrize("rows", [5, 7])
@processes.on_two
def test_each_completion_counts_once(models: dict[str, Path], tmp_path: Path, rows: int) -> None:
    """The last batch is filled up with the first rows. TRL counts these twice in its rewards."""
    judge = Judge()
    judge.__name__ = "judge"  # pyright: ignore[reportAttributeAccessIssue]
    build = {"train_dataset": questions(16), "eval_dataset": questions(rows), "reward_funcs": is_first}
    options = {**EVALUATING, "eval_metrics": [judge, mean_token, is_first], "build": build}
    trainer = tiny.trainer(models["dense"], tmp_path, **options)
    metrics = trainer.evaluate()
    judged = judge.rows()
    assert len(judged) == 6 * -(-2 * rows // 6) and len(judged) > 2 * rows
    own = judged[: 2 * rows]
    assert sorted(number for number, _ in own) == sorted([*range(rows)] * 2)
    values = [value for _, value in own]
    assert metrics["eval_judge"] == mean(values)
    for k in (1, 2):
        passed = expected(values, 2, k, lambda some: any(is_right for is_right, _ in some))
        assert metrics[f"eval_judge/pass@{k}"] == pytest.approx(passed, abs=1e-12)
        assert metrics[f"eval_judge/maj@{k}"] == pytest.approx(expected(values, 2, k, majority), abs=1e-12)
    assert metrics["eval_is_first"] == 2 / rows != metrics["eval_reward"]
    assert len({str(each) for each in gather_object([{**metrics, "eval_runtime": 0}])}) <= 2  # clocks differ


@pytest.mark.parametrize("method", ["GRPO", "RLOO", "PPO"])
@processes.on_two
def test_a_training_on_two_has_the_same_bits_without_its_evaluations(
    models: dict[str, Path], tmp_path: Path, method: str
) -> None:
    options = {**EVALUATING, "method": method, "build": {"eval_dataset": {"a": questions(2), "b": questions(3)}}}
    if method == "PPO":
        options["num_generations"] = 1
    alone = {**options, "eval_strategy": "no"}
    plain = tiny.train(tiny.trainer(models["dense"], tmp_path / "plain", **alone))
    judged = tiny.trainer(models["dense"], tmp_path / "judged", eval_metrics=[by_luck, mean_token], **options)
    tiny.train(judged)
    first, second = evaluations(judged)[:2]
    assert 0 < first["eval_a_mean_token"] < 1 and 0 < second["eval_b_mean_token"] < 1
    states = resumable.state(plain), resumable.state(judged)
    for state in states:
        del state["history"]
    assert resumable.differences(*states) == []
