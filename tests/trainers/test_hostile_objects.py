"""Objects of users that are not like those of our other tests: a run is that on lists and numbers, bit for bit.

A test builds a trainer with a plain and a hostile form of the same values, with all features that can act together,
and resumes inside a rollout. GRPO meets each kind of object; rewards, columns and overrides meet each trainer. Where
TRL raises an error, ours raises the same.
"""

from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trl
from datasets import Dataset, IterableDataset
from peft import LoraConfig
from torch.utils.data import Sampler

import trl_steady
from tests.features.dynamic_sampling import tools as rounds
from tests.features.generate_ahead import tools as ahead
from tests.tools import engines, resumable, tiny
from tests.tools.cases import cases
from trl_steady import StepRewards

engine, server = engines.engine, engines.server

FEATURES: dict[str, dict[str, Any]] = {
    "dynamic": {"dynamic_sampling": True, "dynamic_sampling_max_rounds": 2},
    "all": {
        **{"dynamic_sampling": True, "dynamic_sampling_max_rounds": 2, "skip_zero_weight": True},
        **{"keep_sampling_mask": True, "top_k": 5, "router_replay": "R3", "router_aux_loss_coef": 0.0},
    },
    "ahead": {"async_generate": True, "use_vllm": True, "vllm_mode": "server", "engine_check": None},
    "off": {},
}
EACH_TRAINER = pytest.mark.parametrize(
    ("method", "feature"), cases([("GRPO", "all"), ("PPO", "all"), ("RLOO", "all"), ("GRPO", "ahead")], fast=2)
)


class Site:
    """Where trainers are built."""

    def __init__(self, models: dict[str, Path], folder: Path, server: Any = None) -> None:
        self.models, self.folder, self.server = models, folder, server

    def build(
        self,
        method: str,
        feature: str,
        build: dict[str, Any],
        options: dict[str, Any] | None = None,
        mixin: type | None = None,
        package: Any = trl_steady,
    ) -> Any:
        """Build a trainer, whose class has the overrides of `mixin`."""
        given = {**FEATURES[feature], "beta": 0.0, "max_steps": 6, "save_strategy": "steps", "save_steps": 3}
        given |= {"gradient_checkpointing": False, **({"num_generations": 4} if method == "PPO" else {})}
        build = {"train_dataset": tiny.dataset(), "reward_funcs": rounds.planted, **build}
        if self.server is not None:
            given["vllm_server_base_url"] = self.server.url
            self.server.engine.syncs = 0
        if "rollout_func" in build and package is trl_steady:
            given["engine_check"] = None
        if "router_replay" in given:
            build["peft_config"] = LoraConfig(**tiny.LORA)  # TRL cannot resume a whole mixture
        args = tiny.arguments(getattr(package, f"{method}Config"), self.folder, **{**given, **(options or {})})
        model = self.models["moe" if "router_replay" in given else "dense"]
        base = getattr(package, f"{method}Trainer")
        own = base if mixin is None else type("Own", (mixin, base), {})
        torch.manual_seed(0)
        return own(str(model), build.pop("reward_funcs"), args, processing_class=tiny.tokenizer(), **build)


@pytest.fixture
def site(models: dict[str, Path], tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[[str], Site]]:
    with ExitStack() as stack:

        def site(feature: str) -> Site:
            if feature != "ahead":
                return Site(models, tmp_path)
            server = request.getfixturevalue("server")
            stack.enter_context(ahead.connected())
            ahead.Watched(server)
            return Site(models, tmp_path, server)

        yield site


def plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def outcome(trainer: Any) -> dict[str, Any]:
    """All that two runs must have in common, with values as text: what is logged may be NaN, or an array."""
    clocks = ("async/waited", "async/overlap")
    history = [{name: str(plain(v)) for name, v in row.items() if name not in clocks} for row in tiny.history(trainer)]
    tables = {name: table for name, table in trainer._logs.items() if isinstance(table, dict)}
    return {
        "policy": tiny.parameters(trainer),
        "optimizer": trainer.optimizer.state_dict()["state"],
        "history": history[:-1],  # the summary tells of one process only
        "tables": {n: {c: [str(plain(v)) for v in values] for c, values in t.items()} for n, t in tables.items()},
    }


Same = Callable[..., None]


@pytest.fixture
def same(site: Callable[[str], Site], tmp_path: Path) -> Same:
    """Compare the runs on both forms, and the second one resumed."""

    def same(
        form: Callable[[bool], tuple[Any, ...]], method: str = "GRPO", feature: str = "all", resumes: bool = True
    ) -> None:
        at = site(feature)

        def run(is_hostile: bool, checkpoint: str | None = None) -> dict[str, Any]:
            trainer = at.build(method, feature, *form(is_hostile))
            trainer.train(resume_from_checkpoint=checkpoint)
            return outcome(trainer)

        expected = run(False)
        assert resumable.differences(expected, run(True)) == []
        if resumes:
            (checkpoint, *_) = sorted(tmp_path.glob("checkpoint-*"))
            assert resumable.differences(expected, run(True, str(checkpoint))) == []

    return same


class Judge:
    """A reward function with a state, without a name, and empty."""

    def __init__(self) -> None:
        self.last: list[Any] = []

    def __len__(self) -> int:
        return 0

    async def __call__(self, prompts: Any, completion_ids: Any, **_: Any) -> Any:
        for ids in self.last:
            ids.clear()
        self.last = completion_ids
        return map(float, rounds.planted(prompts, completion_ids))


@pytest.mark.fast_rows(1)
@EACH_TRAINER
def test_rewards(same: Same, method: str, feature: str) -> None:
    returned: dict[str, Callable[[list[Any]], Any]] = {
        "tuple": tuple,
        "array": np.array,
        "objects": lambda values: np.array([None if value == 1.0 else value for value in values], object),
        "tensor": lambda values: torch.tensor(values, requires_grad=True),
        "half": lambda values: torch.tensor(values, dtype=torch.float16),
        "scalars": lambda values: [(np.float32, torch.tensor, np.int64, bool)[i % 4](v) for i, v in enumerate(values)],
        "generator": lambda values: (value for value in values),
        "view": lambda values: dict(enumerate(values)).values(),
    }

    def returning(name: str, convert: Callable[[Any], Any]) -> Any:
        def function(prompts: Any, completion_ids: Any, **_: Any) -> Any:
            return convert(rounds.planted(prompts, completion_ids))

        function.__name__ = name
        return function

    def as_list(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda values: [plain(value) for value in convert(values)]

    def form(is_hostile: bool) -> Any:
        functions = [returning(name, each if is_hostile else as_list(each)) for name, each in returned.items()]
        return ({"reward_funcs": [*functions, Judge() if is_hostile else returning("Judge", list)]},)

    same(form, method, feature)


def test_a_reward_function_that_changes_what_it_gets(same: Same) -> None:
    def form(is_hostile: bool) -> Any:
        def reward(prompts: Any, completions: Any, completion_ids: Any, tasks: Any, **_: Any) -> Any:
            assert all(each == ["one", "two"] for each in tasks)
            found = rounds.planted(prompts, completion_ids)
            if is_hostile:
                for ids, own in zip(completion_ids, tasks, strict=True):
                    ids[:] = [ids[0] + 1]
                    own.pop()
            return found

        return ({"reward_funcs": reward, "train_dataset": tiny.dataset().map(lambda _: {"tasks": ["one", "two"]})},)

    same(form)


def test_steps(same: Same) -> None:
    def values(ids: Any) -> tuple[list[float], list[int]]:
        return [float(sum(ids) % 3), 1.0][: len(ids)], [1, len(ids)][: len(ids)]

    def form(is_hostile: bool) -> Any:
        def reward(completion_ids: Any, **_: Any) -> Any:
            pairs = map(values, completion_ids)
            if is_hostile:
                return (StepRewards.at_tokens(torch.tensor(rewards), np.array(ends)) for rewards, ends in pairs)
            return [StepRewards.at_tokens(*pair) for pair in pairs]

        return {"reward_funcs": reward}, {"loss_type": "gspo_token"}

    same(form)


def by_number(prompts: Any, completion_ids: Any, number: Any, **_: Any) -> Any:
    return [value + each / 4 for value, each in zip(rounds.planted(prompts, completion_ids), number, strict=True)]


def numbered(rows: int = 16) -> Dataset:
    return tiny.dataset(rows).add_column("number", [i % 3 for i in range(rows)])  # type: ignore[call-arg]


@pytest.mark.fast_rows(1)
@EACH_TRAINER
def test_columns(same: Same, method: str, feature: str) -> None:
    cells: dict[str, Callable[[int], Any]] = {
        "tuple": lambda i: (i, i + 1),
        "array": lambda i: np.array([i, i + 1]),
        "scalar": np.int16,
        "tensor": lambda i: torch.tensor([[i], [i + 1]]),
        "none": lambda i: None,
        "object": lambda i: Judge(),
        "generator": lambda i: iter(range(3)),
        "text": np.str_,
    }

    def hostile_rows(batch: dict[str, Any]) -> dict[str, Any]:
        made = {name: [make(i) for i in batch["number"]] for name, make in cells.items()}
        changed = {"prompt": list(map(np.str_, batch["prompt"])), "number": list(map(np.int64, batch["number"]))}
        return {**batch, **made, **changed}

    def form(is_hostile: bool) -> Any:
        data = numbered().with_transform(hostile_rows) if is_hostile else numbered()
        return ({"train_dataset": data, "reward_funcs": by_number},)

    same(form, method, feature)


class Stream:
    """The rows of a stream. It can be hashed, as `datasets` wants."""

    def __init__(self, is_hostile: bool) -> None:
        self.is_hostile = is_hostile

    def __reduce__(self) -> Any:
        return Stream, (self.is_hostile,)

    def __call__(self) -> Iterator[Any]:
        for row in numbered():
            yield {**row, "number": np.int64(row["number"]), "cells": np.ones(2)} if self.is_hostile else row


def test_a_stream(same: Same) -> None:
    def form(is_hostile: bool) -> Any:
        return ({"train_dataset": IterableDataset.from_generator(Stream(is_hostile)), "reward_funcs": by_number},)

    same(form)


def test_a_sampler_with_a_state(same: Same) -> None:
    """In the second epoch when the checkpoint is taken."""

    class Order(Sampler[int]):
        def __init__(self, order: Any) -> None:
            self.order, self.drawn = order, 0

        def __len__(self) -> int:
            return len(self.order)

        def __iter__(self) -> Iterator[int]:
            for index in self.order:
                self.drawn += 1
                yield np.int64(index)  # type: ignore[misc]

    class Own:
        def _get_train_sampler(self: Any, dataset: Any = None) -> Any:
            return Order(trl.GRPOTrainer._get_train_sampler(self, dataset))

    def form(is_hostile: bool) -> Any:
        mixin = Own if is_hostile else None
        return {"train_dataset": tiny.dataset(4)}, {"max_steps": 8, "save_steps": 6}, mixin

    same(form)


def test_metrics(same: Same) -> None:
    logged: dict[str, Callable[[float], Any]] = {
        "single": np.float32,
        "double": np.float64,
        "tensor": torch.tensor,
        "array": np.array,
        "integer": lambda value: np.int64(value),
        "bool": lambda value: np.bool_(value > 2),
    }

    def form(is_hostile: bool) -> Any:
        def made(name: str, value: float) -> Any:
            return logged[name](value) if is_hostile else plain(logged[name](value))

        def reward(prompts: Any, completion_ids: Any, log_extra: Any, log_metric: Any, **_: Any) -> Any:
            lengths = [float(len(ids)) for ids in completion_ids]
            for name in logged:
                log_metric(f"metric_{name}", made(name, lengths[0]))
                values = [made(name, length) for length in lengths]
                log_extra(f"extra_{name}", iter(values) if is_hostile else values)
            log_extra("none", (None for _ in lengths) if is_hostile else [None] * len(lengths))
            return rounds.planted(prompts, completion_ids)

        class Own:
            def _compute_loss(self: Any, model: Any, inputs: Any) -> Any:
                for name in logged:
                    width = float(inputs["completion_ids"].size(1))
                    self._metrics["train"][f"own_{name}"].append(made(name, width))
                return super()._compute_loss(model, inputs)  # type: ignore[misc]

        return {"reward_funcs": reward}, {}, Own

    same(form)


@pytest.mark.fast_rows(1)
@EACH_TRAINER
def test_overrides(same: Same, method: str, feature: str) -> None:
    """Results of methods, columns of samples and of a micro-batch, and keys of a log."""

    def form(is_hostile: bool) -> Any:
        as_rows = tuple if is_hostile else list
        as_array = np.array if is_hostile else list

        class Own:
            def _generate_single_turn(self: Any, *arguments: Any, **keywords: Any) -> Any:
                found = super()._generate_single_turn(*arguments, **keywords)  # type: ignore[misc]
                if not is_hostile:
                    return found
                return [tuple(found[0]), found[1]] if isinstance(found, tuple) else tuple(found)

            def _generate(self: Any, prompts: Any) -> Any:
                found = super()._generate(prompts)  # type: ignore[misc]
                is_column = [isinstance(each, list) and len(each) > 0 for each in found]
                rows = [as_rows(each) if has else each for each, has in zip(found, is_column, strict=True)]
                return rows if is_hostile else tuple(rows)

            def _generate_and_score_completions(self: Any, inputs: Any) -> Any:
                samples = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
                weights = samples["completion_mask"].sum(1).tolist()
                return {**samples, "a": as_rows(weights), "b": as_array(weights), "c": None, "d": torch.tensor(3)}

            def compute_loss(self: Any, model: Any, inputs: Any, *arguments: Any, **keywords: Any) -> Any:
                weights = inputs["completion_mask"].sum(1).tolist()
                inputs = {**inputs, "e": as_rows(weights), "f": as_array(weights), "g": np.float32(2)}
                return super().compute_loss(model, inputs, *arguments, **keywords)  # type: ignore[misc]

            def _compute_loss(self: Any, model: Any, inputs: Any) -> Any:
                weights = inputs["completion_mask"].sum(1).tolist()
                assert all([plain(each) for each in inputs[name]] == weights for name in "abef")
                return super()._compute_loss(model, inputs)  # type: ignore[misc]

            def log(self: Any, logs: Any, *arguments: Any) -> None:
                super().log({**logs, "mine": np.float64(0.5) if is_hostile else 0.5}, *arguments)  # type: ignore[misc]

        return {}, {}, Own

    same(form, method, feature)


def test_options(same: Same) -> None:
    def form(is_hostile: bool) -> Any:
        own, weights = (np.float64, np.array([0.5, 0.5])) if is_hostile else (float, [0.5, 0.5])
        options = {"epsilon": own(0.1), "top_p": own(1.0), "reward_weights": weights}
        return {"reward_funcs": [rounds.planted, tiny.reward]}, options

    same(form)


def keeps(rewards: Any, rows: Any) -> bool:
    return bool(rewards.min() < rewards.max())


def keeps_and_spoils(rewards: Any, rows: Any) -> Any:
    keep = rewards.min() < rewards.max()
    rewards -= rewards.mean()
    for row in rows:
        row.clear()
    return keep


def test_a_filter_that_spoils_what_it_gets(same: Same) -> None:
    same(lambda is_hostile: ({}, {"dynamic_sampling_filter": keeps_and_spoils if is_hostile else keeps}))


def rollout(prompts: Any, trainer: Any) -> dict[str, Any]:
    answers = [torch.randint(45, 200, (int(torch.randint(3, 8, ())),)).tolist() for _ in prompts]
    return {
        "prompt_ids": [trainer.processing_class(prompt)["input_ids"] for prompt in prompts],
        "completion_ids": answers,
        "logprobs": [[-5.0 - token / 1000 for token in answer] for answer in answers],
        "env_mask": [[int(i != 1) for i in range(len(answer))] for answer in answers],
        "worth": [float(sum(answer) % 7) for answer in answers],
    }


ROWS: dict[str, Callable[[Any], Any]] = {
    "tuples": lambda rows: tuple(map(tuple, rows)),
    "arrays": lambda rows: [np.array(row, np.float32 if isinstance(row[0], float) else None) for row in rows],
    "tensors": lambda rows: tuple(map(torch.tensor, rows)),
    "map": lambda rows: map(list, rows),
    "scalars": lambda rows: [[torch.tensor(value) for value in row] for row in rows],
}


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("name", ROWS)
def test_a_rollout_function(same: Same, name: str) -> None:
    """With a state, which is empty, and a mapping that is no dictionary."""

    class Rolls:
        def __init__(self) -> None:
            self.last = dict[str, Any]()

        def __len__(self) -> int:
            return 0

        def __call__(self, prompts: Any, trainer: Any) -> Any:
            self.last.clear()
            found = rollout(prompts, trainer)
            converted = {n: ROWS[name](found[n]) for n in ("prompt_ids", "completion_ids", "logprobs", "env_mask")}
            self.last = {**converted, "worth": [np.float32(each) for each in found["worth"]]}
            return UserDict(self.last)

    def reward(prompts: Any, worth: Any, **_: Any) -> Any:
        return [each if rounds.number(prompt) % 2 else 1.0 for prompt, each in zip(prompts, worth, strict=True)]

    same(
        lambda is_hostile: ({"rollout_func": Rolls() if is_hostile else rollout, "reward_funcs": reward},),
        "GRPO",
        "dynamic",
    )


def test_a_rollout_without_some_columns(same: Same) -> None:
    """None, or no field, in every second call."""

    def form(is_hostile: bool) -> Any:
        calls = 0

        def function(prompts: Any, trainer: Any) -> Any:
            nonlocal calls
            calls, found = calls + 1, rollout(prompts, trainer)
            if calls % 2:
                found["env_mask"] = None if is_hostile else [[1] * len(ids) for ids in found["completion_ids"]]
                found["worth"] = [1.0] * len(prompts)
            if calls % 2 and is_hostile:
                del found["worth"]
            return found

        def reward(completion_ids: Any, worth: Any = None, **_: Any) -> Any:
            return [float(sum(ids) % 2) for ids in completion_ids]

        return ({"rollout_func": function, "reward_funcs": reward},)

    same(form, "GRPO", "dynamic", resumes=False)  # it counts its calls


REWARDS = ("reward raises", "reward stops", "no rewards", "few rewards", "text", "row lacks", "row beyond")
FAILURES = [
    *((how, "GRPO", "all") for how in REWARDS),
    *((how, "GRPO", "ahead") for how in ("reward stops", "few rewards", "row beyond")),
    *((how, "GRPO", "dynamic") for how in ("rollout raises", "rollout lacks", "no rollout")),
    *(("reward stops", method, "all") for method in ("RLOO", "PPO")),
]


@pytest.mark.fast_rows(2)
@pytest.mark.parametrize(("how", "method", "feature"), FAILURES)
def test_an_error_is_trls_and_leaves_nothing_behind(
    site: Callable[[str], Site], models: dict[str, Path], tmp_path: Path, how: str, method: str, feature: str
) -> None:
    """A trainer whose first rollout has failed trains as one whose first rollout has not."""
    is_broken = True

    def reward(prompts: Any, completion_ids: Any, **_: Any) -> Any:
        found = rounds.planted(prompts, completion_ids)
        if is_broken and how == "reward raises":
            raise LookupError("no verdict")
        if is_broken and how == "reward stops":
            raise StopIteration("no further verdict")
        wrong = {"no rewards": None, "few rewards": iter(found[1:]), "text": np.array(["1"] * len(found))}
        return wrong.get(how, found) if is_broken else found

    def rows(batch: Any) -> Any:
        if is_broken:
            raise {"row lacks": KeyError("row"), "row beyond": IndexError("row")}[how]
        return batch

    def rolls(prompts: Any, trainer: Any) -> Any:
        found = rollout(prompts, trainer)
        if is_broken and how == "rollout raises":
            raise KeyError("completion_ids")
        if is_broken and how == "rollout lacks":
            del found["completion_ids"]
        return None if is_broken and how == "no rollout" else found

    build: dict[str, Any] = {"reward_funcs": reward}
    if how.startswith("row "):
        build["train_dataset"] = tiny.dataset().with_transform(rows)
    if "rollout" in how:
        build["rollout_func"] = rolls
    options, at = {"save_strategy": "no", "max_steps": 4}, site(feature)
    trainer = at.build(method, feature, build, options)
    of_trl = Site(models, tmp_path).build(method.replace("PPO", "GRPO"), "off", build, options, package=trl)
    said = []
    for each in (trainer, of_trl):
        with pytest.raises(Exception) as raised:
            each.train()
        said.append((raised.type, how == "no rollout" or str(raised.value)))
    assert said[0] == said[1]
    is_broken, ends = False, []
    for each in (trainer, at.build(method, feature, build, options)):
        if at.server is not None:
            at.server.engine.syncs = 0
        torch.manual_seed(0)
        each.train()
        ends.append(tiny.parameters(each))
    assert resumable.differences(*ends) == []
