"""Objects of users that are not like those of our other tests: a run is that on lists and numbers, bit for bit.

A kind returns what a trainer is built with, in plain or in hostile form. Both forms have the same values. Each kind
meets each trainer with each feature, and a checkpoint that is taken inside a rollout. Where TRL raises an error, ours
raises the same.
"""

import contextlib
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

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

TRAINERS = ("GRPO", "RLOO", "PPO")
FEATURES: dict[str, dict[str, Any]] = {
    "dynamic": {"dynamic_sampling": True, "dynamic_sampling_max_rounds": 2},
    "skip": {"skip_zero_weight": True},
    "sets": {"keep_sampling_mask": True, "top_k": 5},
    "R3": {"router_replay": "R3", "router_aux_loss_coef": 0.0},
}
FEATURES["all"] = {name: value for options in FEATURES.values() for name, value in options.items()}
FEATURES["ahead"] = {"async_generate": True, "use_vllm": True, "vllm_mode": "server", "engine_check": None}
FEATURES["off"] = {}


@dataclass(frozen=True)
class Form:
    """The arguments of a trainer."""

    build: dict[str, Any] = field(default_factory=dict[str, Any])
    """Arguments of the constructor."""
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    mixin: type = object
    """Overrides of a subclass."""
    skips: tuple[str, ...] = ()
    """Trainers and features that cannot have it."""
    resumes: bool = True


Kind = Callable[[bool], Form]
KINDS: dict[str, Kind] = {}


def kind(function: Kind) -> Kind:
    KINDS[function.__name__] = function
    return function


# rewards

RETURNED: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "array": np.array,
    "objects": lambda values: np.array([None if value == 1.0 else value for value in values], object),
    "tensor": lambda values: torch.tensor(values, requires_grad=True),
    "half": lambda values: torch.tensor(values, dtype=torch.float16),
    "scalars": lambda values: [(np.float32, torch.tensor, np.int64, bool)[i % 4](v) for i, v in enumerate(values)],
    "generator": lambda values: (value for value in values),
    "view": lambda values: dict(enumerate(values)).values(),
}


def plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def returning(name: str, convert: Callable[[Any], Any]) -> Any:
    def function(prompts: Any, completion_ids: Any, **_: Any) -> Any:
        return convert(rounds.planted(prompts, completion_ids))

    function.__name__ = name
    return function


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


@kind
def rewards(is_hostile: bool) -> Form:
    as_list = lambda convert: lambda values: [plain(value) for value in convert(values)]
    functions = [returning(n, each if is_hostile else as_list(each)) for n, each in RETURNED.items()]
    return Form({"reward_funcs": [*functions, Judge() if is_hostile else returning("Judge", list)]})


@kind
def reward_that_changes_what_it_gets(is_hostile: bool) -> Form:
    def reward(prompts: Any, completions: Any, completion_ids: Any, tasks: Any, **_: Any) -> Any:
        assert all(each == ["one", "two"] for each in tasks)
        found = rounds.planted(prompts, completion_ids)
        if is_hostile:
            for ids, own in zip(completion_ids, tasks, strict=True):
                ids[:] = [ids[0] + 1]
                own.pop()
        return found

    data = tiny.dataset().map(lambda _: {"tasks": ["one", "two"]})
    return Form({"reward_funcs": reward, "train_dataset": data})


@kind
def steps(is_hostile: bool) -> Form:
    def values(ids: Any) -> tuple[list[float], list[int]]:
        return [float(sum(ids) % 3), 1.0][: len(ids)], [1, len(ids)][: len(ids)]

    def reward(completion_ids: Any, **_: Any) -> Any:
        pairs = map(values, completion_ids)
        if is_hostile:
            return (StepRewards.at_tokens(torch.tensor(rewards), np.array(ends)) for rewards, ends in pairs)
        return [StepRewards.at_tokens(*pair) for pair in pairs]

    return Form({"reward_funcs": reward}, {"loss_type": "gspo_token"}, skips=("RLOO",))


# data

CELLS: dict[str, Callable[[int], Any]] = {
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
    cells = {name: [make(i) for i in batch["number"]] for name, make in CELLS.items()}
    return {
        **batch,
        **cells,
        "prompt": list(map(np.str_, batch["prompt"])),
        "number": list(map(np.int64, batch["number"])),
    }


def by_number(prompts: Any, completion_ids: Any, number: Any, **_: Any) -> Any:
    return [value + each / 4 for value, each in zip(rounds.planted(prompts, completion_ids), number, strict=True)]


def numbered(rows: int = 16) -> Dataset:
    return tiny.dataset(rows).add_column("number", [i % 3 for i in range(rows)])  # type: ignore[call-arg]


@kind
def columns(is_hostile: bool) -> Form:
    data = numbered()
    return Form(
        {"train_dataset": data.with_transform(hostile_rows) if is_hostile else data, "reward_funcs": by_number}
    )


class Stream:
    """The rows of a stream. It can be hashed, as `datasets` wants."""

    def __init__(self, is_hostile: bool) -> None:
        self.is_hostile = is_hostile

    def __reduce__(self) -> Any:
        return Stream, (self.is_hostile,)

    def __call__(self) -> Iterator[Any]:
        for row in numbered():
            yield {**row, "number": np.int64(row["number"]), "cells": np.ones(2)} if self.is_hostile else row


@kind
def stream(is_hostile: bool) -> Form:
    return Form({"train_dataset": IterableDataset.from_generator(Stream(is_hostile)), "reward_funcs": by_number})


class Order(Sampler[int]):
    """An order of one's own, with a state."""

    def __init__(self, order: Any) -> None:
        self.order, self.drawn = order, 0

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[int]:
        for index in self.order:
            self.drawn += 1
            yield np.int64(index)  # type: ignore[misc]


@kind
def sampler(is_hostile: bool) -> Form:
    """In the second epoch when the checkpoint is taken."""

    class Own:
        def _get_train_sampler(self: Any, dataset: Any = None) -> Any:
            if not is_hostile:
                return super()._get_train_sampler(dataset)  # type: ignore[misc]
            base = trl.RLOOTrainer if isinstance(self, trl.RLOOTrainer) else trl.GRPOTrainer
            return Order(base._get_train_sampler(self, dataset))

    return Form({"train_dataset": tiny.dataset(4)}, {"max_steps": 8, "save_steps": 6}, Own)


# metrics

LOGGED: dict[str, Callable[[float], Any]] = {
    "single": np.float32,
    "double": np.float64,
    "tensor": torch.tensor,
    "array": np.array,
    "integer": lambda value: np.int64(value),
    "bool": lambda value: np.bool_(value > 2),
}


@kind
def metrics(is_hostile: bool) -> Form:
    own = {n: make if is_hostile else lambda v, make=make: plain(make(v)) for n, make in LOGGED.items()}

    def reward(prompts: Any, completion_ids: Any, log_extra: Any, log_metric: Any, **_: Any) -> Any:
        lengths = [float(len(ids)) for ids in completion_ids]
        for name, make in own.items():
            log_metric(f"metric_{name}", make(lengths[0]))
            log_extra(f"extra_{name}", map(make, lengths) if is_hostile else list(map(make, lengths)))
        log_extra("none", (None for _ in lengths) if is_hostile else [None] * len(lengths))
        return rounds.planted(prompts, completion_ids)

    class Own:
        def _compute_loss(self: Any, model: Any, inputs: Any) -> Any:
            for name, make in own.items():
                self._metrics["train"][f"own_{name}"].append(make(float(inputs["completion_ids"].size(1))))
            return super()._compute_loss(model, inputs)  # type: ignore[misc]

    return Form({"reward_funcs": reward}, mixin=Own)


# overrides


@kind
def overrides(is_hostile: bool) -> Form:
    """Results of methods, columns of samples and of a micro-batch, and keys of a log."""
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

    return Form(mixin=Own)


@kind
def options(is_hostile: bool) -> Form:
    own, weights = (np.float64, np.array([0.5, 0.5])) if is_hostile else (float, [0.5, 0.5])
    given = {"epsilon": own(0.1), "top_p": own(1.0), "reward_weights": weights}
    return Form({"reward_funcs": [rounds.planted, tiny.reward]}, given)


def keeps(rewards: Any, rows: Any) -> bool:
    return bool(rewards.min() < rewards.max())


def keeps_and_spoils(rewards: Any, rows: Any) -> Any:
    keep = rewards.min() < rewards.max()
    rewards -= rewards.mean()
    for row in rows:
        row.clear()
    return keep


@kind
def filters(is_hostile: bool) -> Form:
    given = {"dynamic_sampling_filter": keeps_and_spoils if is_hostile else keeps}
    return Form(options=given, skips=("skip", "sets", "R3", "ahead", "off"))


# rollout functions

ROWS: dict[str, Callable[[Any], Any]] = {
    "tuples": lambda rows: tuple(map(tuple, rows)),
    "arrays": lambda rows: [np.array(row, np.float32 if isinstance(row[0], float) else None) for row in rows],
    "tensors": lambda rows: tuple(map(torch.tensor, rows)),
    "map": lambda rows: map(list, rows),
    "scalars": lambda rows: [[torch.tensor(value) for value in row] for row in rows],
}
OF_TOKENS = ("prompt_ids", "completion_ids", "logprobs", "env_mask")


def rollout(prompts: Any, trainer: Any) -> dict[str, Any]:
    answers = [torch.randint(45, 200, (int(torch.randint(3, 8, ())),)).tolist() for _ in prompts]
    return {
        "prompt_ids": [trainer.processing_class(prompt)["input_ids"] for prompt in prompts],
        "completion_ids": answers,
        "logprobs": [[-5.0 - token / 1000 for token in answer] for answer in answers],
        "env_mask": [[int(i != 1) for i in range(len(answer))] for answer in answers],
        "worth": [float(sum(answer) % 7) for answer in answers],
    }


def worth(prompts: Any, worth: Any, **_: Any) -> Any:
    return [each if rounds.number(prompt) % 2 else 1.0 for prompt, each in zip(prompts, worth, strict=True)]


class Rolls:
    """A rollout function with a state, which is empty."""

    def __init__(self, convert: Callable[[Any], Any]) -> None:
        self.convert, self.last = convert, dict[str, Any]()

    def __len__(self) -> int:
        return 0

    def __call__(self, prompts: Any, trainer: Any) -> Any:
        self.last.clear()
        found = {n: self.convert(v) if n in OF_TOKENS else v for n, v in rollout(prompts, trainer).items()}
        self.last = {**found, "worth": [np.float32(each) for each in found["worth"]]}
        return UserDict(self.last)


def rolling(convert: Callable[[Any], Any]) -> Kind:
    def form(is_hostile: bool) -> Form:
        function = Rolls(convert) if is_hostile else rollout
        return Form({"rollout_func": function, "reward_funcs": worth}, skips=("RLOO", "sets", "R3", "all", "ahead"))

    return form


KINDS |= {f"rollout_{name}": rolling(convert) for name, convert in ROWS.items()}


@kind
def rollout_without_some_columns(is_hostile: bool) -> Form:
    """None, or no field, in every second call."""
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

    build = {"rollout_func": function, "reward_funcs": reward}
    return Form(build, skips=("RLOO", "sets", "R3", "all", "ahead"), resumes=False)  # it counts its calls


# runs


class Site(NamedTuple):
    """The folder and models of runs."""

    models: dict[str, Path]
    folder: Path
    server: Any = None

    def build(self, method: str, feature: str, form: Form, package: Any = trl_steady) -> Any:
        options = {**FEATURES[feature], "beta": 0.0, "max_steps": 6, "save_strategy": "steps", "save_steps": 3}
        options |= {"gradient_checkpointing": False, **({"num_generations": 4} if method == "PPO" else {})}
        build = {"train_dataset": tiny.dataset(), "reward_funcs": rounds.planted, **form.build}
        if self.server is not None:
            options["vllm_server_base_url"] = self.server.url
        if "rollout_func" in build and package is trl_steady:
            options["engine_check"] = None
        if "router_replay" in options:
            build["peft_config"] = LoraConfig(**tiny.LORA)  # TRL cannot resume a whole mixture
        args = tiny.arguments(getattr(package, f"{method}Config"), self.folder, **{**options, **form.options})
        name, functions = "moe" if "router_replay" in options else "dense", build.pop("reward_funcs")
        base = getattr(package, f"{method}Trainer")
        own = base if form.mixin is object else type("Own", (form.mixin, base), {})
        return own(str(self.models[name]), functions, args, processing_class=tiny.tokenizer(), **build)

    def run(self, method: str, feature: str, form: Form, resume: str | None = None) -> dict[str, Any]:
        torch.manual_seed(0)
        if self.server is not None:
            self.server.engine.syncs = 0
        trainer = self.build(method, feature, form)
        trainer.train(resume_from_checkpoint=resume)
        return outcome(trainer)


def outcome(trainer: Any) -> dict[str, Any]:
    """All that two runs must have in common, with values as text: what is logged may be NaN, or an array."""
    clocks = ("async/waited", "async/overlap")
    history = [{name: str(plain(v)) for name, v in row.items() if name not in clocks} for row in tiny.history(trainer)]
    return {
        "policy": tiny.parameters(trainer),
        "optimizer": trainer.optimizer.state_dict()["state"],
        "history": history[:-1],  # the summary tells of one process only
        "tables": {
            name: {column: [str(plain(v)) for v in values] for column, values in table.items()}
            for name, table in {**trainer._logs, "own": {}}.items()
            if isinstance(table, dict)
        },
    }


@contextlib.contextmanager
def site(feature: str, models: dict[str, Path], folder: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    if feature != "ahead":
        yield Site(models, folder)
        return
    server = request.getfixturevalue("server")
    with ahead.connected():
        ahead.Watched(server)
        yield Site(models, folder, server)


def table() -> Iterator[Any]:
    """Every cell. The quick ones have all features at once, and generation ahead."""
    for name, make in KINDS.items():
        skips = make(False).skips
        for method in TRAINERS:
            for feature in FEATURES:
                if method in skips or feature in skips or (method, feature) == ("RLOO", "ahead"):
                    continue
                is_quick = feature == "all" or (feature, method) == ("ahead", "GRPO")
                is_quick |= "all" in skips and feature == "dynamic"
                yield pytest.param(name, method, feature, marks=() if is_quick else pytest.mark.slow)


@pytest.mark.parametrize(("name", "method", "feature"), table())
def test_a_run_on_hostile_objects_is_that_on_plain_ones(
    models: dict[str, Path], tmp_path: Path, request: pytest.FixtureRequest, name: str, method: str, feature: str
) -> None:
    with site(feature, models, tmp_path, request) as at:
        expected = at.run(method, feature, KINDS[name](False))
        found = at.run(method, feature, KINDS[name](True))
        assert resumable.differences(expected, found) == []
        if KINDS[name](True).resumes:
            (checkpoint, *_) = sorted(tmp_path.glob("checkpoint-*"))
            resumed = at.run(method, feature, KINDS[name](True), str(checkpoint))
            assert resumable.differences(expected, resumed) == []


# errors


class Broken:
    """Fails in the first rollout, in one of these ways, until it is repaired."""

    def __init__(self, how: str) -> None:
        self.how, self.is_broken = how, True

    def reward(self, prompts: Any, completion_ids: Any, **_: Any) -> Any:
        found = rounds.planted(prompts, completion_ids)
        if self.is_broken and self.how == "reward raises":
            raise LookupError("no verdict")
        if self.is_broken and self.how == "reward stops":
            raise StopIteration("no further verdict")
        wrong = {"no rewards": None, "few rewards": iter(found[1:]), "text": np.array(["1"] * len(found))}
        return wrong.get(self.how, found) if self.is_broken else found

    def rows(self, batch: Any) -> Any:
        if self.is_broken:
            raise {"row lacks": KeyError("row"), "row beyond": IndexError("row")}[self.how]
        return batch

    def rollout(self, prompts: Any, trainer: Any) -> Any:
        found = rollout(prompts, trainer)
        if self.is_broken and self.how == "rollout lacks":
            del found["completion_ids"]
        if self.is_broken and self.how == "rollout raises":
            raise KeyError("completion_ids")
        return None if self.is_broken and self.how == "no rollout" else found

    def form(self) -> Form:
        build: dict[str, Any] = {"reward_funcs": self.reward}
        if self.how.startswith("row "):
            build["train_dataset"] = tiny.dataset().with_transform(self.rows)
        if "rollout" in self.how:
            build["rollout_func"] = self.rollout
        return Form(build, {"save_strategy": "no", "max_steps": 4})


REWARDS = ("reward raises", "reward stops", "no rewards", "few rewards", "text", "row lacks", "row beyond")
ROLLOUTS = ("rollout raises", "rollout lacks", "no rollout")
FAILURES = [
    *((how, method, "all") for how in REWARDS for method in TRAINERS),
    *((how, method, "ahead") for how in REWARDS for method in ("GRPO", "PPO")),
    *((how, method, "dynamic") for how in ROLLOUTS for method in ("GRPO", "PPO")),
]


@pytest.mark.parametrize(
    ("how", "method", "feature"), cases(FAILURES, [each for each in FAILURES if each[1] == "GRPO"])
)
def test_an_error_is_trls_and_leaves_nothing_behind(
    models: dict[str, Path], tmp_path: Path, request: pytest.FixtureRequest, how: str, method: str, feature: str
) -> None:
    """A trainer whose first rollout has failed trains as one whose first rollout has not."""
    said, ends, broken = [], [], Broken(how)
    with site(feature, models, tmp_path, request) as at:
        trainer = at.build(method, feature, broken.form())
        of_trl = Site(models, tmp_path).build(method.replace("PPO", "GRPO"), "off", broken.form(), trl)
        for each in (trainer, of_trl):
            with pytest.raises(Exception) as raised:
                each.train()
            said.append((raised.type, how == "no rollout" or str(raised.value)))
        assert said[0] == said[1]
        broken.is_broken = False
        for each in (trainer, at.build(method, feature, broken.form())):
            if at.server is not None:
                at.server.engine.syncs = 0
            torch.manual_seed(0)
            each.train()
            ends.append(tiny.parameters(each))
        assert resumable.differences(*ends) == []
