"""Request seeds with vLLM's stand-in: which completion is sampled with which seed. Real answers are in tests/vllm."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import trl_steady
from tests.features.dynamic_sampling import tools as rounds
from tests.features.generate_ahead import tools as ahead
from tests.features.generate_ahead.tools import Watched
from tests.tools import engines, tiny
from tests.tools.cases import cases
from tests.tools.engines import COMPLETIONS, MASKED, TOKENS, Engine, Server
from trl_steady.core.types import Rollout, Turn
from trl_steady.features.request_seeds import RequestSeeds
from trl_steady.trl_bridge.generation import generate_continuations
from trl_steady.trl_bridge.vllm_seeds import engine_seed

engine, server, mixture = engines.engine, engines.server, engines.mixture
over_http, flagged = engines.over_http, engines.flagged
Seeds = list[list[int | None]]
Train = Callable[..., Any]
SEEDED: dict[str, Any] = {**engines.UNCHECKED, "vllm_request_seeds": True}
GROUP = 4
# a rollout is four groups
ONE_STEP: dict[str, Any] = {"per_device_train_batch_size": 16, "steps_per_generation": 1}
WINDOWS: dict[str, dict[str, Any]] = {
    "a window of four steps": {},
    "two passes": {"steps_per_generation": 2, "num_iterations": 2, "per_device_train_batch_size": 8},
    "four rollouts a step": {**ONE_STEP, "gradient_accumulation_steps": 4, "max_steps": 4},
    "a short last step in each epoch": {
        **{"per_device_train_batch_size": 8, "steps_per_generation": 2, "gradient_accumulation_steps": 3},
        **{"max_steps": -1, "num_train_epochs": 3},
    },
}


@pytest.fixture
def colocated(models: dict[str, Path], tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Trains with an engine in this process, whose answers depend on prompts and seeds only."""
    engines.colocate(engine, monkeypatch)
    obey_seeds(engine)

    def train(resume: str | None = None, **options: Any) -> tuple[Any, Seeds]:
        engine.seeds.clear()
        engines.alone(monkeypatch)
        trainer = tiny.trainer(models["dense"], tmp_path, **{**SEEDED, "vllm_mode": "colocate", **options})
        trainer.train(resume_from_checkpoint=resume)
        engines.alone(monkeypatch)
        return trainer, list(engine.seeds)

    return train


def obey_seeds(engine: Engine) -> None:
    engine.obeys_seeds = True
    engine.spoken = lambda prompt, number: spoken(prompt, number)


def spoken(prompt: list[int], number: int) -> list[int]:
    random = torch.Generator().manual_seed(sum(prompt) + number)
    return torch.randint(40, 250, (int(torch.randint(1, 9, (), generator=random)),), generator=random).tolist()


def flat(seeds: Seeds) -> list[int]:
    found = [seed for of_call in seeds for seed in of_call]
    assert None not in found
    return [seed for seed in found if seed is not None]


def test_runs_of_two_seeds_share_no_seed_of_a_completion(colocated: Train) -> None:
    _, first = colocated(seed=1, max_steps=12)
    _, again = colocated(seed=1, max_steps=12)
    _, second = colocated(seed=2, max_steps=12)
    assert [len(each) for each in first] == [16, 16, 16] and again == first
    every = flat(first) + flat(second)
    assert len({*every}) == len(every) == 96 and min(every) >= 0 and max(every) < 2**53


@pytest.mark.parametrize(("window", "options"), cases(WINDOWS.items(), fast=1))
def test_a_resumed_run_samples_with_the_seeds_of_the_run_that_never_stopped(
    colocated: Train, tmp_path: Path, window: str, options: dict[str, Any]
) -> None:
    data = {"build": {"train_dataset": tiny.dataset(16)}}
    options = {"max_steps": 10, "save_strategy": "steps", "save_steps": 1, "learning_rate": 1e-3, **data, **options}
    whole, seeds = colocated(**options)
    assert len({*flat(seeds)}) == len(flat(seeds)) and len(seeds) >= 3
    for step in (2, whole.state.max_steps - 2):
        resumed, rest = colocated(resume=str(tmp_path / f"checkpoint-{step}"), **options)
        assert 0 < len(rest) < len(seeds) and rest == seeds[-len(rest) :]
        after = tiny.parameters(resumed)
        assert all(torch.equal(after[name], value) for name, value in tiny.parameters(whole).items())


def test_a_resume_by_the_same_trainer_has_the_seeds_of_a_run_that_never_stopped(
    colocated: Train, models: dict[str, Path], tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rollout of the step that has failed is not the second one of that step."""
    fails = {5}

    def fails_once(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
        if trainer_state.global_step in fails:
            fails.clear()
            raise RuntimeError("out of memory")
        return [float(len(text)) for text in completions]

    options: dict[str, Any] = {**ONE_STEP, "max_steps": 8, "save_strategy": "steps", "save_steps": 1}
    _, seeds = colocated(**options)
    options |= {**SEEDED, "vllm_mode": "colocate", "build": {"reward_funcs": fails_once}}
    trainer = tiny.trainer(models["dense"], tmp_path / "fails", **options)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train()
    engine.seeds.clear()
    engines.alone(monkeypatch)
    trainer.train(resume_from_checkpoint=True)
    assert engine.seeds == seeds[5:]


def test_rounds_of_dynamic_sampling_have_seeds_of_their_own(colocated: Train) -> None:
    options = {"dynamic_sampling": True, "build": {"reward_funcs": rounds.planted}}
    _, seeds = colocated(max_steps=12, **options)
    assert len(seeds) > 3 and len({*flat(seeds)}) == len(flat(seeds))
    _, again = colocated(max_steps=12, **options)
    assert again == seeds


def test_evaluations_have_seeds_of_their_own_and_change_none_of_the_training(colocated: Train) -> None:
    _, seeds = colocated(max_steps=12)
    evaluated = {"eval_strategy": "steps", "eval_steps": 2, "build": {"eval_dataset": tiny.dataset(2)}}
    sizes = {"per_device_eval_batch_size": 8, "num_generations_eval": 4}
    _, both = colocated(max_steps=12, **evaluated, **sizes)
    assert [each for each in both if len(each) == 16] == seeds
    assert len([each for each in both if len(each) == 8]) == 6 and len({*flat(both)}) == len(flat(both))


def test_continuations_outside_a_rollout_have_seeds_of_their_own(colocated: Train) -> None:
    trainer, seeds = colocated(max_steps=4)
    calls: Seeds = trainer.vllm_generation.llm.engine.seeds
    calls.clear()
    place = trainer.feature(RequestSeeds)._place
    for _ in range(2):
        generate_continuations(trainer, [[60, 70]] * 3, batch_size=3)
    assert (place.kind, place.calls) == (
        "training",
        1,
    )  # further calls of a rollout in progress would have other seeds
    assert [len(each) for each in calls] == [3, 3]
    assert len({*flat(seeds + calls)}) == 16 + 6


@pytest.mark.parametrize("given", ["generation_kwargs", "vllm_engine_kwargs"])
def test_a_seed_that_is_given_for_the_engine_takes_the_place_of_the_runs(colocated: Train, given: str) -> None:
    _, expected = colocated(seed=3)
    trainer, seeds = colocated(seed=7, **{given: {"seed": 3}})
    assert seeds == expected
    assert trainer.vllm_generation.llm.asked["seed"] == (3 if given == "vllm_engine_kwargs" else 0)
    _, without = colocated(seed=7)
    assert {*flat(without)}.isdisjoint(flat(expected))


def test_seeds_of_engines_are_those_of_no_other(colocated: Train) -> None:
    assert [engine_seed(seed, 0, engines=1) for seed in (0, 7, 2**32 - 1)] == [0, 7, 2**32 - 1]
    found = [engine_seed(seed, number, engines=4) for seed in range(5) for number in range(4)]
    assert len({*found}) == 20 and 0 <= engine_seed(2**40, 3, 4) < 2**32


def test_without_the_option_vllm_gets_no_seed(colocated: Train) -> None:
    trainer, seeds = colocated(vllm_request_seeds=False, vllm_engine_kwargs={"seed": 5})
    assert {seed for each in seeds for seed in each} == {None} and len(seeds) == 2
    assert trainer.vllm_generation.llm.asked["seed"] == 5


def test_full_determinism_switches_seeds_on(tmp_path: Path) -> None:
    def seeds_requests(**options: Any) -> bool:
        return tiny.arguments(trl_steady.GRPOConfig, tmp_path, **options).seeds_requests  # type: ignore[attr-defined]

    assert seeds_requests(use_vllm=True, full_determinism=True) and not seeds_requests(full_determinism=True)
    assert not seeds_requests(use_vllm=True)
    assert not seeds_requests(use_vllm=True, full_determinism=True, vllm_request_seeds=False)


def test_a_rollout_func_that_calls_the_engine_is_left_alone(colocated: Train) -> None:
    def generate(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        ids, completions, logprobs, _ = trainer.vllm_generation.generate(ids, None, GROUP)
        return {
            "prompt_ids": ids,
            "completion_ids": completions,
            "logprobs": [[each[0] for each in of_tokens] for of_tokens in logprobs],
        }

    trainer, seeds = colocated(build={"rollout_func": generate})
    assert trainer.args.seeds_requests
    assert {seed for each in seeds for seed in each} == {None} and len(seeds) == 2


# a server


def asked(server: Server) -> list[tuple[tuple[int, ...], int]]:
    """Prompts and seeds of the requests, which come in any order."""
    return sorted((tuple(body["prompt"][0]), body["seed"]) for body in server.requests[COMPLETIONS])


@pytest.mark.parametrize("method", ["GRPO", "RLOO"])
def test_a_server_gets_the_seeds_and_gives_the_answers_of_a_colocated_engine(
    models: dict[str, Path], tmp_path: Path, colocated: Train, server: Server, method: str
) -> None:
    """vLLM samples completion i of a prompt with the seed plus i, so that it has that of its row."""
    here, seeds = colocated(max_steps=8, method=method)
    build = {"train_dataset": tiny.dataset(16)}
    address: dict[str, Any] = {"vllm_mode": "server", "vllm_server_base_url": server.url}
    there = tiny.train(
        tiny.trainer(models["dense"], tmp_path, max_steps=8, method=method, build=build, **SEEDED, **address)
    )
    bodies = server.requests[COMPLETIONS]
    assert {(len(body["prompt"]), body["n"]) for body in bodies} == {(1, GROUP)}
    assert sorted(seed for _, seed in asked(server)) == sorted(seed for each in seeds for seed in each[::GROUP])
    expected = tiny.parameters(here)
    assert all(torch.equal(value, expected[name]) for name, value in tiny.parameters(there).items())


def test_prompts_that_a_server_gets_one_by_one_have_their_seeds(flagged: Train, server: Server) -> None:
    sampled: dict[str, Any] = {"keep_sampling_mask": True, "top_k": 50, "top_p": 0.9}
    trainer: Any = tiny.train(flagged(vllm_request_seeds=True, max_steps=8, **sampled))
    firsts = [body["sampling_params"]["seed"] for body in server.requests[TOKENS]]
    sizes = {body["sampling_params"]["n"] for body in server.requests[TOKENS]}
    assert len(sizes) == 1 and len(trainer.rollouts) >= 2
    seeds = [first + i for first in firsts for i in range(*sizes)]
    assert len({*seeds}) == len(seeds) > 16 and server.flag(MASKED)


def test_a_seed_of_the_user_is_the_servers_too_without_the_option(over_http: Train, server: Server) -> None:
    tiny.train(over_http(vllm_request_seeds=False, generation_kwargs={"seed": 3}))
    bodies = server.requests[COMPLETIONS]
    assert bodies and {body["seed"] for body in bodies} == {3} and min(len(body["prompt"]) for body in bodies) > 1


@pytest.fixture
def watched(server: Server) -> Iterator[Watched]:
    with ahead.connected():
        yield Watched(server)


AHEAD: dict[str, dict[str, Any]] = {
    "four rollouts a step": {**WINDOWS["four rollouts a step"], "build": {"train_dataset": tiny.dataset(32)}},
    "a short last step in each epoch": WINDOWS["a short last step in each epoch"],
    "two passes": {"num_iterations": 2, "gradient_accumulation_steps": 2, "max_steps": 20},
    "dynamic sampling": {"dynamic_sampling": True, "max_steps": 12, "build": {"reward_funcs": rounds.planted}},
    "evaluations": {
        **{"eval_strategy": "steps", "eval_steps": 2, "build": {"eval_dataset": tiny.dataset(1)}},
        **{"per_device_eval_batch_size": 4, "num_generations_eval": 4, "max_steps": 12},
    },
}


@pytest.mark.parametrize(("kind", "options"), cases(AHEAD.items(), fast=2))
def test_a_rollout_that_is_asked_ahead_has_the_seeds_that_it_would_have_later(
    models: dict[str, Path], tmp_path: Path, server: Server, watched: Watched, kind: str, options: dict[str, Any]
) -> None:
    """A request other than the one that was sent ahead would be asked again, with a warning, which is an error."""
    found: list[list[tuple[tuple[int, ...], int]]] = []
    for is_ahead in (False, True):
        server.requests.clear()
        seeded = {"vllm_request_seeds": True, "learning_rate": 0.0, **options}
        trainer = tiny.train(ahead.build(server.url, models["dense"], tmp_path, is_ahead=is_ahead, **seeded))
        found.append(asked(server))
    behind = [row["async/versions_behind"] for row in tiny.history(trainer) if "async/versions_behind" in row]
    assert sum(behind) > 0 and found[0] == found[1]
    seeds = [first + i for _, first in found[0] for i in range(GROUP)]
    assert len({*seeds}) == len(seeds)


@pytest.mark.slow
def test_a_resume_takes_what_was_asked_ahead_with_its_seeds(
    models: dict[str, Path], tmp_path: Path, server: Server, watched: Watched
) -> None:
    options: dict[str, Any] = {"vllm_request_seeds": True, "save_strategy": "steps", "save_steps": 1, "max_steps": 16}
    whole = tiny.train(ahead.build(server.url, models["dense"], tmp_path, **options))
    seeds = asked(server)
    server.requests.clear()
    again = ahead.build(server.url, models["dense"], tmp_path, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert whole.state.global_step == again.state.global_step == 16
    assert 0 < len(asked(server)) < len(seeds) and not Counter(asked(server)) - Counter(seeds)


# several processes


def stand_in(process: int, **options: Any) -> Any:
    """The part of a trainer that the feature reads."""
    return SimpleNamespace(
        model=SimpleNamespace(training=True),
        awaits_backward=True,
        state=SimpleNamespace(global_step=3),
        accelerator=SimpleNamespace(process_index=process),
        vllm_mode="colocate",
        vllm_generation=SimpleNamespace(first_seed=None),
        **options,
    )


def of_turns(trainer: Any, args: Any, turns: list[int]) -> list[list[int]]:
    """The seeds of this process's rows in turns of two rollouts, which have so many rows."""
    feature, found = RequestSeeds(trainer, args), []

    def generate(turn: Turn) -> None:
        first = trainer.vllm_generation.first_seed
        found.append(list(range(first, first + len(turn.prompt_ids))))

    for _ in range(2):
        rollout = Rollout()
        feature.on_rollout_begin(rollout)
        for rows in turns:
            feature.around_generate(Turn([[1]] * rows, rollout), generate)
    return found


def test_rows_of_processes_and_turns_of_tools_share_no_seed(tmp_path: Path) -> None:
    args = tiny.arguments(trl_steady.GRPOConfig, tmp_path, vllm_request_seeds=True, use_vllm=True)
    first, second = of_turns(stand_in(0), args, [8, 5, 1]), of_turns(stand_in(1), args, [8, 2, 2])
    every = list(itertools.chain(*first, *second))
    assert len({*every}) == len(every) == 2 * (14 + 12)
    assert first[0][-1] + 1 == second[0][0]  # the rows of one process follow those of the other


def test_processes_of_one_engine_sample_with_the_same_seeds(tmp_path: Path) -> None:
    args = tiny.arguments(
        trl_steady.GRPOConfig, tmp_path, vllm_request_seeds=True, use_vllm=True, vllm_tensor_parallel_size=2
    )
    found = [of_turns(stand_in(process), args, [8]) for process in range(4)]
    assert found[0] == found[1] != found[2] == found[3]
    assert found[2][0][0] - found[0][0][0] == 16  # an engine gets the prompts of both
