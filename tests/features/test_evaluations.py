"""Metrics of evaluations equal a plain loop over single completions, and leave no trace in the training."""

import asyncio
import functools
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from datasets import Dataset

import trl_steady
from tests.tools import agent, resumable, tiny
from tests.trainers import tools
from tests.trainers.images import llava as llava
from tests.trainers.images import pictures
from trl_steady.trl_bridge.evaluation import rows_of

ROWS = 5  # three batches of 2 prompts and a last one of 1
EVALUATING: dict[str, Any] = {
    **{"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4, "num_generations_eval": 2},
}


def questions(rows: int = ROWS, first: int = 0) -> Dataset:
    numbers = [*range(first, first + rows)]
    return Dataset.from_dict({"prompt": [f"{n}*2=" for n in numbers], "number": numbers})


def has_even_sum(completion_ids: list[list[int]], number: list[int], **_: Any) -> list[Any]:
    """Right or wrong, with one of three answers, for two of three prompts."""
    found: list[Any] = []
    for ids, of_prompt in zip(completion_ids, number, strict=True):
        is_right = sum(ids) % 2 == 0
        found.append((is_right, f"right {sum(ids) % 4}" if is_right else len(ids) % 3 or None))
        if of_prompt % 3 == 2:
            found[-1] = None
    return found


async def mean_token(completion_ids: list[list[int]], **_: Any) -> list[float]:
    await asyncio.sleep(0)
    return [sum(ids) / len(ids) / 300 for ids in completion_ids]


def by_luck(completions: list[Any], **_: Any) -> list[float]:
    """A judge that draws random numbers of all kinds."""
    return [random.random() + float(np.random.rand()) + float(torch.rand(())) for _ in completions]


class Seen:
    """A metric that keeps what it gets, row by row."""

    __name__ = "seen"

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def __call__(self, completions: list[Any], **columns: Any) -> list[None]:
        known = {"completions": completions, **columns}
        for row in range(len(completions)):
            self.rows.append({name: values[row] for name, values in known.items() if isinstance(values, list)})
        return [None] * len(completions)


def one_by_one(function: Callable[..., Any], rows: list[dict[str, Any]]) -> list[Any]:
    """Call a metric with single completions."""
    found: list[Any] = []
    for row in rows:
        returned = function(**{name: [value] for name, value in row.items()})
        if asyncio.iscoroutine(returned):
            returned = asyncio.run(returned)
        found += returned
    return found


def mean(values: list[Any]) -> float:
    numbers = [value[0] if isinstance(value, tuple) else value for value in values if value is not None]
    return sum(numbers) / len(numbers)


def majority(group: tuple[Any, ...]) -> float:
    """Return the odds that the answer with the most votes is right. Right answers are one, and None does not vote."""
    votes = Counter("right" if is_right else answer for is_right, answer in group if answer is not None)
    winners = [answer for answer, count in votes.items() if count == max(votes.values())]
    return ("right" in winners) / len(winners) if winners else 0.0


def expected(values: list[Any], size: int, k: int, estimate: Callable[[tuple[Any, ...]], float]) -> float:
    """Return the mean over prompts of the mean over all k of the completions to each."""
    groups = [values[start : start + size] for start in range(0, len(values), size)]
    groups = [[value for value in group if value is not None] for group in groups]
    of_groups = [[estimate(some) for some in itertools.combinations(group, k)] for group in groups if len(group) >= k]
    return mean([mean(of_group) for of_group in of_groups])


def evaluations(trainer: Any) -> list[dict[str, float]]:
    return [row for row in trainer.state.log_history if any(key.startswith("eval_") for key in row)]


def with_evaluation(**more: Any) -> dict[str, Any]:
    build = {"eval_dataset": questions(), **more.pop("build", {})}
    return {**EVALUATING, **more, "build": build}


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("method", ["GRPO", "RLOO", "PPO"])
def test_metrics_equal_a_plain_loop_over_single_completions(
    models: dict[str, Path], tmp_path: Path, method: str
) -> None:
    seen = Seen()
    options = with_evaluation(num_generations_eval=4, eval_metrics=[has_even_sum, mean_token, seen])
    trainer = tiny.trainer(models["dense"], tmp_path, method=method, max_steps=2, **options)
    assert not trainer._has_async_funcs  # TRL has no loop for async functions then
    (row,) = evaluations(tiny.train(trainer))
    assert len(seen.rows) == 4 * ROWS and row["eval_seen"] is None
    marks = one_by_one(has_even_sum, seen.rows)
    assert row["eval_has_even_sum"] == mean(marks) and 0 < mean(marks) < 1
    assert row["eval_mean_token"] == pytest.approx(mean(one_by_one(mean_token, seen.rows)), rel=1e-15)
    for k in (1, 2, 4):
        passed = expected(marks, 4, k, lambda some: any(is_right for is_right, _ in some))
        assert row[f"eval_has_even_sum/pass@{k}"] == pytest.approx(passed, abs=1e-12)
        assert row[f"eval_has_even_sum/maj@{k}"] == pytest.approx(expected(marks, 4, k, majority), abs=1e-12)
    assert not any("mean_token/" in key or "@3" in key or "@8" in key for key in row)
    by_trl = [key for key in row if key.startswith("eval_rewards/")]
    assert by_trl == ["eval_rewards/reward/mean", "eval_rewards/reward/std"]


TRACELESS: dict[str, dict[str, Any]] = {
    "GRPO": {},
    "greedy": {"eval_generation": {"greedy": True, "max_completion_length": 3}, "num_generations_eval": 1},
    "RLOO": {"method": "RLOO", "beta": 0.1},
    "PPO": {"method": "PPO", "per_device_train_batch_size": 8},
    "moving reference, kept sets": {
        **{"sync_ref_model": True, "ref_model_sync_steps": 2, "beta": 0.1, "keep_sampling_mask": True, "top_k": 9},
        **{"eval_generation": {"top_k": 0}},
    },
    "dynamic sampling, replay": {"dynamic_sampling": True, "router_replay": "R3", "model": "moe"},
    "several sets": {"build": {"eval_dataset": {"a": questions(3), "b": questions(2, 3)}}},
    "stream": {"build": {"eval_dataset": questions().to_iterable_dataset()}},
    "before the first step": {"eval_on_start": True, "num_iterations": 2},
    "rollout_func": {"build": {"rollout_func": tools.rollout}},
}


@pytest.mark.fast_rows(3)
@pytest.mark.parametrize("case", TRACELESS)
def test_a_training_has_the_same_bits_without_its_evaluations(
    models: dict[str, Path], tmp_path: Path, case: str
) -> None:
    options = with_evaluation(**TRACELESS[case])
    model = models[options.pop("model", "dense")]
    alone = {**options, "eval_strategy": "no", "eval_on_start": False, "eval_generation": None}
    plain = tiny.train(tiny.trainer(model, tmp_path / "plain", **alone))
    judged = tiny.trainer(model, tmp_path / "judged", eval_metrics=[by_luck, mean_token], **options)
    tiny.train(judged)
    assert evaluations(judged) and not evaluations(plain)
    states = resumable.state(plain), resumable.state(judged)
    for state in states:
        del state["history"]  # which has the evaluations
    assert resumable.differences(*states) == []
    trained = [row for row in tiny.history(judged) if not any(key.startswith("eval_") for key in row)]
    assert trained == tiny.history(plain)


def test_without_metrics_a_run_is_trls_with_its_evaluations(models: dict[str, Path], tmp_path: Path) -> None:
    """TRL's evaluation draws the random numbers of the training."""
    options = with_evaluation(max_steps=4, steps_per_generation=1)
    ours, theirs, alone = (
        tiny.parameters(tiny.train(tiny.trainer(models["dense"], tmp_path / str(n), padded=True, **each)))
        for n, each in enumerate((options, {**options, "ours": False}, {**options, "eval_strategy": "no"}))
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert any(not torch.equal(alone[name], theirs[name]) for name in theirs)


def test_each_set_has_its_own_names(models: dict[str, Path], tmp_path: Path) -> None:
    """Also with metrics of ours that TRL logs, and the best model by one set's reward, as TRL computes it."""
    sets = {"a": questions(2), "b_c": questions(2, 7)}
    options = with_evaluation(build={"eval_dataset": sets}, num_generations_eval=2, beta=0.1, max_steps=4)
    options |= {"save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True, "greater_is_better": True}
    options |= {"metric_for_best_model": "eval_b_c_reward", "eval_metrics": [has_even_sum]}
    rows = evaluations(trainer := tiny.train(tiny.trainer(models["dense"], tmp_path / "ours", **options)))
    assert len(rows) == 4  # two evaluations of two sets
    names = [{key.removeprefix(f"eval_{name}_") for key in row} for name, row in zip(["a", "b_c"], rows, strict=False)]
    assert names[0] == names[1] and names[0] > {
        "reward",
        "kl",
        "loss",
        "has_even_sum",
        "has_even_sum/maj@2",
        "entropy",
    }
    assert not any(key in ("eval_reward", "eval_kl") for row in rows for key in row)
    assert trainer.state.best_metric == max(row["eval_b_c_reward"] for row in rows[1::2])
    alone = tiny.trainer(models["dense"], tmp_path / "trl", ours=False, **with_evaluation())
    torch.manual_seed(3)
    theirs = alone.evaluate(sets["a"])
    mine = tiny.trainer(models["dense"], tmp_path / "mine", **with_evaluation())
    torch.manual_seed(3)
    assert mine.evaluate({"a": sets["a"]})["eval_a_reward"] == theirs["eval_reward"]


@pytest.mark.parametrize("metric", ["eval_reward", "reward", "loss"])
def test_a_best_metric_of_no_single_set_is_refused(models: dict[str, Path], tmp_path: Path, metric: str) -> None:
    options = with_evaluation(build={"eval_dataset": {"a": questions(2), "b": questions(2)}})
    with pytest.raises(ValueError, match=f"metric_for_best_model='{metric}'.*sets a, b.*'eval_a_"):
        tiny.trainer(models["dense"], tmp_path, metric_for_best_model=metric, **options)
    with_name = tiny.trainer(models["dense"], tmp_path, metric_for_best_model="b_reward", **options)
    assert with_name.args.metric_for_best_model == "b_reward"


def test_evaluations_sample_with_options_of_their_own(models: dict[str, Path], tmp_path: Path) -> None:
    seen = Seen()
    own = {"greedy": True, "max_completion_length": 5}
    options = with_evaluation(num_generations_eval=1, eval_metrics=[seen], eval_generation=own, temperature=0.9)
    trainer = tiny.trainer(models["dense"], tmp_path, generation_kwargs={"top_p": 0.9, "min_new_tokens": 5}, **options)
    config, kwargs = trainer.generation_config, trainer.generation_kwargs
    trainer.evaluate()
    model = transformers.AutoModelForCausalLM.from_pretrained(models["dense"])
    for row in seen.rows:
        ids = torch.tensor([tiny.tokenizer()(row["prompts"])["input_ids"]])
        greedy = model.generate(ids, do_sample=False, min_new_tokens=5, max_new_tokens=5)[0, ids.size(1) :].tolist()
        assert row["completion_ids"] == greedy
    assert trainer.generation_config is config and trainer.generation_kwargs is kwargs
    assert (trainer.temperature, trainer.args.temperature, trainer.args.max_completion_length) == (0.9, 0.9, 8)


def test_a_temperature_of_evaluations_is_over_that_of_generation_kwargs(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """Near 0, all completions to a prompt are the likeliest one; those of the training are not."""
    seen, trained = Seen(), Seen()
    options = with_evaluation(num_generations_eval=4, eval_metrics=[seen], eval_generation={"temperature": 1e-4})
    options["build"]["reward_funcs"] = [tiny.reward, trained]
    trainer = tiny.trainer(models["dense"], tmp_path, generation_kwargs={"temperature": 5.0}, max_steps=2, **options)
    tiny.train(trainer)

    def texts(rows: list[dict[str, Any]]) -> list[int]:
        found = [tuple(row["completion_ids"]) for row in rows]
        return [len({*found[start : start + 4]}) for start in range(0, len(found), 4)]

    assert texts(seen.rows) == [1] * ROWS
    assert max(texts(trained.rows[:16])) == 4


def test_other_sampling_is_scored_over_all_tokens(models: dict[str, Path], tmp_path: Path) -> None:
    """The kept set of a greedy token is this token alone, with a log-prob of 0 under policy and reference."""
    found: list[float] = []
    for is_kept in (True, False):
        options = with_evaluation(eval_generation={"greedy": True}, beta=0.04, top_p=0.9, num_generations_eval=1)
        trainer = tiny.trainer(models["dense"], tmp_path, keep_sampling_mask=is_kept, **options)
        with torch.no_grad():
            trainer.model.lm_head.weight.mul_(3.0)  # away from the reference
        trainer.evaluate()
        found.append(evaluations(trainer)[0]["eval_kl"])
    assert found[0] == found[1] > 0


def test_a_rollout_func_finds_the_sampling_of_evaluations(models: dict[str, Path], tmp_path: Path) -> None:
    """Also its further columns reach the metrics."""
    found: list[tuple[bool, float, float, int]] = []

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        args = trainer.args
        found.append((trainer.model.training, args.temperature, trainer.top_p, args.max_completion_length))
        return {**tools.rollout(prompts, trainer), "turns": [3] * len(prompts)}

    seen = Seen()
    own = {"temperature": 0.5, "top_p": 0.8, "max_completion_length": 4}
    options = with_evaluation(eval_metrics=seen, eval_generation=own, build={"rollout_func": rollout})
    tiny.train(tiny.trainer(models["dense"], tmp_path, max_steps=2, **options))
    assert {*found} == {(True, 1.0, 1.0, 8), (False, 0.5, 0.8, 4)}
    assert [row["turns"] for row in seen.rows] == [3] * 2 * ROWS


def test_metrics_see_the_turns_of_an_agent(tmp_path: Path) -> None:
    """Metrics also see the agent's environment, as reward functions do."""
    calls: list[tuple[int, int]] = []

    def tool_calls(completions: list[Any], environments: list[Any], **_: Any) -> list[float]:
        counts = [sum(message["role"] == "tool" for message in each) for each in completions]
        calls.extend(zip(counts, (len(environment.calls) for environment in environments), strict=True))
        return list(map(float, counts))

    rows = agent.dataset(agent.one_by_one, rows=6)
    build = {"processing_class": agent.tokenizer(), "environment_factory": agent.Calculator, "train_dataset": rows}
    options: dict[str, Any] = {**EVALUATING, "max_completion_length": 160, "min_p": 0.1, "loss_type": "gspo_token"}
    options |= {"eval_metrics": [tool_calls], "build": {**build, "eval_dataset": rows}, "num_generations": 2}
    trainer = tiny.trainer(agent.save_model(tmp_path / "model"), tmp_path / "out", **options)
    trainer.evaluate()
    assert len(calls) == 12 and len({count for count, _ in calls}) > 1
    assert all(count == of_environment for count, of_environment in calls)
    assert evaluations(trainer)[0]["eval_tool_calls"] == sum(count for count, _ in calls) / 12


def test_metrics_get_images(llava: tuple[Path, Any], tmp_path: Path) -> None:
    folder, processor = llava
    seen = Seen()
    build = {"train_dataset": pictures(), "eval_dataset": pictures(3), "processing_class": processor}
    options = {**EVALUATING, "eval_metrics": [seen, mean_token], "build": build, "max_steps": 2}
    (row,) = evaluations(tiny.train(tiny.trainer(folder, tmp_path, **options)))
    assert [image.size for (image,) in (each["images"] for each in seen.rows)] == [(28, 28)] * 6
    assert row["eval_mean_token"] == pytest.approx(mean(one_by_one(mean_token, seen.rows)), rel=1e-15)


def test_the_best_model_is_by_a_metric_and_the_training_stops_early(models: dict[str, Path], tmp_path: Path) -> None:
    """The metric is best after the first evaluation, and the reward after the last."""
    levels = itertools.count()

    def falls(completions: list[Any], **_: Any) -> list[float]:
        return [1.0 / (1 + next(levels))] * len(completions)

    stop = transformers.EarlyStoppingCallback(early_stopping_patience=2)
    options = with_evaluation(max_steps=12, eval_metrics=[falls], build={"callbacks": [stop]}, eval_steps=1)
    options |= {"save_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True}
    options |= {"metric_for_best_model": "eval_falls", "per_device_eval_batch_size": 16}
    trainer = tiny.train(tiny.trainer(models["dense"], tmp_path, **options))
    assert trainer.state.best_metric == 1.0 and trainer.state.best_global_step == 1
    assert trainer.args.greater_is_better and trainer.state.global_step == 3


def test_functions_inside_others_are_saved_by_name(models: dict[str, Path], tmp_path: Path) -> None:
    """pickle, with which transformers saves its arguments, refuses them."""
    metrics = [lambda completions, **_: [1.0] * len(completions), functools.partial(has_even_sum), Seen()]
    options = with_evaluation(eval_metrics=metrics, max_steps=2, save_strategy="steps", save_steps=2)
    trainer = tiny.train(tiny.trainer(models["dense"], tmp_path, **options))
    names = ["<lambda>", "has_even_sum", "seen"]
    saved = torch.load(tmp_path / "checkpoint-2/training_args.bin", weights_only=False)
    assert list(saved.eval_metrics) == names == trainer.args.to_dict()["eval_metrics"]
    assert json.loads(trainer.args.to_json_string())["eval_metrics"] == names
    assert {f"eval_{name}" for name in names} <= evaluations(trainer)[0].keys()


def test_metrics_log_columns_and_numbers_as_rewards_do(models: dict[str, Path], tmp_path: Path) -> None:
    """Each value stands beside its completion, also in later evaluations, when the column is known."""

    def noting(completions: list[str], log_extra: Any, log_metric: Any, **_: Any) -> list[float]:
        log_extra("noted", list(completions))
        log_metric("count", len(completions))
        return [1.0] * len(completions)

    options = with_evaluation(eval_metrics=[noting], max_steps=4, build={"eval_dataset": questions(2)})
    trainer = tiny.train(tiny.trainer(models["dense"], tmp_path, **options))
    table = trainer._logs
    pairs = [*zip(table["completion"], table["extra"]["noted"], strict=False)]
    noted = [(completion, own) for completion, own in pairs if own is not None]
    assert len(noted) >= 4 and all(completion == own for completion, own in noted)
    assert [row["eval_count"] for row in evaluations(trainer)] == [4.0, 4.0]


def test_a_metric_may_be_an_import_path(tmp_path: Path) -> None:
    path = f"{__name__}.has_even_sum"
    assert tiny.arguments(trl_steady.GRPOConfig, tmp_path, eval_metrics=[path]).eval_metrics == (has_even_sum,)
    assert tiny.arguments(trl_steady.GRPOConfig, tmp_path, eval_metrics=path).eval_metrics == (has_even_sum,)
    parsed = tiny.arguments(trl_steady.GRPOConfig, tmp_path, eval_generation='{"temperature": 0.5}')
    assert parsed.eval_generation == {"temperature": 0.5}


def test_a_metric_that_asks_for_a_missing_column_is_refused_before_the_training(
    models: dict[str, Path], tmp_path: Path
) -> None:
    build = {"eval_dataset": {"a": questions(2), "b": tiny.dataset(2)}}
    with pytest.raises(
        ValueError, match=r"^evaluation metric 'has_even_sum' asks for 'number'\. With eval_dataset\['b"
    ):
        tiny.trainer(models["dense"], tmp_path, **with_evaluation(eval_metrics=[has_even_sum], build=build))


@pytest.mark.parametrize(("name", "copies"), [("reward", 1), ("right", 2)])
def test_names_that_are_taken_are_refused(tmp_path: Path, name: str, copies: int) -> None:
    def function(**_: Any) -> list[float]:
        return []

    function.__name__ = name
    with pytest.raises(ValueError, match=rf"eval_metrics=.*function '{name}'.*eval_{name} .*Rename"):
        tiny.arguments(trl_steady.GRPOConfig, tmp_path, eval_metrics=[function] * copies)


def test_a_metric_that_fails_leaves_the_trainer_as_it_was(models: dict[str, Path], tmp_path: Path) -> None:
    def broken(completions: list[Any], **_: Any) -> list[float]:
        return [1.0]

    options = with_evaluation(eval_metrics=[broken], eval_generation={"max_completion_length": 2})
    trainer = tiny.trainer(models["dense"], tmp_path, **options)
    before = {**vars(trainer)}
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"'broken' returned 1 rewards, but 4"):
        trainer.evaluate()
    assert torch.equal(torch.get_rng_state(), state)
    after = vars(trainer)
    for name in ("reward_funcs", "reward_func_names", "generation_config", "max_completion_length"):
        assert after.get(name) is before.get(name), name
    assert trainer.args.max_completion_length == 8


def test_rows_are_counted_where_accelerate_may_repeat_some(models: dict[str, Path], tmp_path: Path) -> None:
    trainer = tiny.trainer(models["dense"], tmp_path, **with_evaluation())
    loader = trainer.get_eval_dataloader()
    assert rows_of(loader, 1) is None  # it repeats none
    assert rows_of(loader, 2) == 2 * ROWS
    assert rows_of(trainer.get_eval_dataloader(questions().to_iterable_dataset()), 2) is None
    assert rows_of([["a script's own batches"]], 2) is None


@pytest.mark.parametrize("kind", [trl_steady.GroupReward, trl_steady.RewardAdapter])
def test_a_reward_that_only_a_rollout_computes_is_refused(models: dict[str, Path], tmp_path: Path, kind: Any) -> None:
    metric = kind(by_luck) if kind is trl_steady.GroupReward else kind()
    with pytest.raises(ValueError, match=f"eval_metrics=.*a {kind.__name__} is no function.*reward_funcs"):
        tiny.trainer(models["dense"], tmp_path, **with_evaluation(eval_metrics=[metric]))


def test_steps_are_worth_their_sum(models: dict[str, Path], tmp_path: Path) -> None:
    def per_token(completion_ids: list[list[int]], **_: Any) -> list[Any]:
        return [trl_steady.StepRewards.at_tokens([1.0] * len(ids), range(1, len(ids) + 1)) for ids in completion_ids]

    def length(completion_ids: list[list[int]], **_: Any) -> list[int]:
        return list(map(len, completion_ids))

    trainer = tiny.trainer(models["dense"], tmp_path, **with_evaluation(eval_metrics=[per_token, length]))
    trainer.evaluate()
    row = evaluations(trainer)[0]
    assert row["eval_per_token"] == row["eval_length"] > 1
