"""Dynamic sampling: rows of a rollout with everything that belongs to them."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import IterableDataset

from tests.features.dynamic_sampling import tools as rounds
from tests.features.dynamic_sampling.tools import PREFIX, build, chosen, everything, metric, second, sequences
from tests.features.router_replay import tools as routed
from tests.features.sampling_mask import tools as sampled
from tests.tools import agent, resumable, tiny
from trl_steady import StepRewards
from trl_steady.features.dynamic_sampling import _Prompts
from trl_steady.trl_bridge.resampling import CompletionRecord

# with a filter that keeps everything, it is as without it


async def later(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    return [None if sum(ids) % 3 else 1.0 for ids in completion_ids]


def steps(completion_ids: list[list[int]], **_: Any) -> list[Any]:
    two = lambda ids: StepRewards.at_tokens([sum(ids) % 3, 1.0], [1, len(ids)])
    return [two(ids) if len(ids) > 1 else 0.5 for ids in completion_ids]


def agent_rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Random answers with log-probs of an engine, tokens of a tool and a column for the reward functions."""
    prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    answers = [torch.randint(45, 200, (int(torch.randint(3, 8, ())),)).tolist() for _ in prompts]
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": answers,
        "logprobs": [[-5.0 - token / 1000 for token in answer] for answer in answers],
        "env_mask": [[int(i != 1) for i in range(len(answer))] for answer in answers],
        "worth": [float(sum(answer) % 7) for answer in answers],
    }


def worth(worth: list[float], **_: Any) -> list[float]:
    return worth


TWO = {"reward_funcs": [tiny.reward, second]}


def run(models: dict[str, Path], output: Path, *, model: str = "dense", **options: Any) -> Any:
    return tiny.train(tiny.trainer(models[model], output, **options))


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(
    ("name", "options"),
    {
        "RLOO": {
            "method": "RLOO",
            "beta": 0.1,
            "normalize_advantages": True,
            "build": TWO,
            "reward_weights": [1.0, 0.5],
        },
        "PPO": {"method": "PPO", "num_generations": 4, "kl_target": 0.5, "bootstrap_truncated": True},
        "per function": {"multi_objective_aggregation": "normalize_then_sum", "build": TWO, "log_completions": True},
        "later": {"build": {"reward_funcs": [tiny.reward, later]}, "mask_truncated_completions": True},
        "steps": {"loss_type": "gspo_token", "build": {"reward_funcs": steps}},
        "R3": {"model": "moe", "router_replay": "R3", "num_iterations": 2, "keep_sampling_mask": True, "top_k": 5},
        "agent": {"build": {"rollout_func": agent_rollout, "reward_funcs": worth}, "geometric_mask_range": (0.1, 9.0)},
    }.items(),
)
def test_a_filter_that_keeps_everything_changes_nothing(
    models: dict[str, Path], tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    off = run(models, tmp_path, **options)
    on = run(models, tmp_path, **options, dynamic_sampling=True, dynamic_sampling_filter=everything)
    assert resumable.differences(tiny.parameters(off), tiny.parameters(on)) == []
    without = [{key: v for key, v in row.items() if not key.startswith(PREFIX)} for row in tiny.history(on)]
    assert resumable.differences(tiny.history(off), without) == []
    assert {v for n in ("rounds", "kept", "generated") for v in metric(on, PREFIX + n)} == {1}
    tables = [[{**of} if isinstance(of, dict) else list(of) for of in each._logs.values()] for each in (off, on)]
    assert str(tables[0]) == str(tables[1]) and len(off._logs["prompt"]) == 16  # as text, because they have NaN


# what travels with a row


def test_columns_are_those_of_the_rows_that_were_chosen(models: dict[str, Path], tmp_path: Path) -> None:
    """Log-probs of an engine, tokens of tools, a column of the rollout function, and cells of the table."""

    def valued(
        worth: list[float], prompts: list[str], completion_ids: list[list[int]], log_extra: Any, **_: Any
    ) -> list[float]:
        assert worth == [sum(ids) % 7 for ids in completion_ids]  # also of rows that share a row of the data set
        log_extra("worth", worth)
        return [value if rounds.number(p) % 2 else 1.0 for p, value in zip(prompts, worth, strict=True)]

    keywords = {"rollout_func": agent_rollout}
    options = {"engine_check": None, "off_policy_mask_threshold": 9.0, "max_steps": 8}
    trainer = tiny.train(build(models["dense"], tmp_path, reward=valued, keywords=keywords, **options))
    for rollout in trainer.rollouts:
        answers = [answer for group in chosen(rollout.rounds) for answer in group]
        assert sequences(rollout.samples) == [(answer.prompt, answer.ids) for answer in answers]
        for row, answer in enumerate(answers):
            own = rollout.samples["sampling_per_token_logps"][row][: len(answer.ids)]
            assert own.tolist() == pytest.approx([-5.0 - token / 1000 for token in answer.ids])
            assert rollout.samples["tool_mask"][row][:3].tolist() == [1, 0, 1]
    table = trainer._logs
    of_tokens = [float(sum(answer.ids) % 7) for answer in answers]
    assert list(table["extra"]["worth"]) == of_tokens
    assert list(table["rewards"]["valued"]) == [answer.reward for answer in answers]
    assert list(table["prompt"]) == [answer.prompt for answer in answers]
    assert any(len(rollout.rounds) > 1 for rollout in trainer.rollouts)


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(
    "convert",
    [
        lambda values: tuple(np.array(row, np.float32 if isinstance(row[0], float) else None) for row in values),
        lambda values: map(list, values),
    ],
    ids=["arrays", "map"],
)
def test_a_rollout_func_may_return_columns_of_any_kind(models: dict[str, Path], tmp_path: Path, convert: Any) -> None:
    """Not being a list is not being absent: environments' tokens stay masked, and log-probs correct."""

    def of_kind(*arguments: Any) -> dict[str, Any]:
        return {n: v if n == "worth" else convert(v) for n, v in agent_rollout(*arguments).items()}

    def some(prompts: list[str], completion_ids: list[Any], **_: Any) -> list[float]:
        return rounds.planted(prompts, [list(map(int, ids)) for ids in completion_ids])

    plain, other = (
        run(models, tmp_path, dynamic_sampling=True, build={"rollout_func": each, "reward_funcs": some}, max_steps=8)
        for each in (agent_rollout, of_kind)
    )
    assert resumable.differences(tiny.history(plain), tiny.history(other)) == []
    assert resumable.differences(tiny.parameters(plain), tiny.parameters(other)) == []
    assert max(metric(plain, f"{PREFIX}rounds")) > 1 and metric(plain, "mismatch/kl")


def test_what_reward_functions_change_is_not_trained(models: dict[str, Path], tmp_path: Path) -> None:
    """TRL makes tensors of tokens before. Rows of a group share nothing, as those that a data loader draws."""
    data = tiny.dataset().map(lambda row: {"tasks": [row["prompt"], "end"]})

    def spoils(prompts: list[str], completion_ids: list[list[int]], tasks: list[list[str]], **_: Any) -> list[float]:
        assert [each.pop() for each in tasks] == ["end"] * len(tasks)
        rewards = rounds.planted(prompts, completion_ids)
        for ids in completion_ids:
            ids[:] = [ids[0] + 1]
        return rewards

    def spares(prompts: list[str], completion_ids: list[list[int]], tasks: list[list[str]], **_: Any) -> list[float]:
        return rounds.planted(prompts, completion_ids)

    ends = []
    for reward in (spoils, spares):
        keywords = {"reward_funcs": reward, "train_dataset": data}
        ends.append(run(models, tmp_path, dynamic_sampling=True, build=keywords, max_steps=8))
    assert resumable.differences(*map(tiny.parameters, ends)) == []
    assert max(metric(ends[0], f"{PREFIX}rounds")) > 1


def test_a_stream_that_can_be_read_once_ends_in_an_error(models: dict[str, Path], tmp_path: Path) -> None:
    rows = iter([*tiny.dataset(64)])

    def once() -> Iterator[Any]:
        yield from rows

    def equal(prompts: list[str], **_: Any) -> list[float]:
        return [1.0] * len(prompts)

    keywords = {"train_dataset": IterableDataset.from_generator(once), "reward_funcs": equal}
    with pytest.raises(ValueError, match="dynamic_sampling=True: a pass over train_dataset gave no row"):
        run(models, tmp_path, dynamic_sampling=True, build=keywords, max_steps=50)


def test_the_table_has_no_column_of_rejected_rows(models: dict[str, Path], tmp_path: Path) -> None:
    def once(prompts: list[str], completion_ids: list[list[int]], log_extra: Any, **_: Any) -> list[float]:
        if not trainer.rounds:
            log_extra("first", [1.0] * len(prompts))
        return rounds.planted(prompts, completion_ids)

    trainer = build(models["dense"], tmp_path, reward=once, dynamic_sampling_max_rounds=9)
    trainer.model.train()
    rejected = [prompt for prompt in tiny.dataset()["prompt"] if rounds.number(prompt) % 2 == 0]
    samples = trainer._generate_and_score_completions(
        [{"prompt": prompt} for prompt in rejected[:4] for _ in range(4)]
    )
    assert all(rounds.number(prompt) % 2 for prompt, _ in sequences(samples))
    assert not trainer._logs["extra"] and list(trainer._logs["prompt"]) == [prompt for prompt, _ in sequences(samples)]


@pytest.mark.filterwarnings("ignore:sampling leaves tokens out")
def test_routes_and_kept_sets_are_those_with_which_the_rows_were_sampled(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """Random routes tell each row apart, also under R3, where the model would choose others."""

    class Both(sampled.Sampled, routed.Random):
        pass

    options = {"router_replay": "R3", "top_p": 0.8, "max_steps": 8, "router_aux_loss_coef": 0.0}
    build = {"reward_funcs": rounds.planted}
    trainer = tiny.train(sampled.build(models["moe"], tmp_path, Both, dynamic_sampling=True, build=build, **options))
    later, policy = 0, sampled.models(models["moe"], trainer)
    assert len(trainer.updates) == 8
    for update in trainer.updates:
        turns, draws = trainer.turns[update.rollout], trainer.draws[update.rollout]
        routes = [{tuple(routed.ids): routed.values for routed in turn} for turn in turns]
        sets: dict[tuple[int, ...], list[Any]] = {}
        for drawn in (drawn for turn in draws for drawn in turn):
            sets.setdefault(tuple(drawn.ids), []).append(drawn.sets)
        before = policy(trainer.rollouts[update.rollout][0])
        for row in sampled.rows(update):
            ids = tuple(row.ids)
            numbers = [number for number, known in enumerate(routes) if ids in known]
            later += numbers[0] > 0
            given = routed.of_rollout(routes[numbers[0]][ids])
            assert row.routes is not None and torch.equal(row.routes, given) and row.sets in sets[ids]
            scores = sampled.scores(before, row, routes=row.routes)
            old = row.values["old_per_token_logps"].double()
            torch.testing.assert_close(old, sampled.log_probs(scores, row), **sampled.CLOSE)
    assert later > 8  # rows of further rounds


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("setup", ["tools", "environment"])
def test_turns_of_agents_travel_with_their_rows(tmp_path: Path, setup: str) -> None:
    """Answers in several turns, with tools, in rounds that end after different numbers of turns."""

    def by_turns(completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[Any]:
        """The number of turns; groups in which it is the same for all are idle."""
        turns = [sum(message["role"] == "assistant" for message in completion) for completion in completions]
        seen.append(list(zip(map(tuple, completion_ids), turns, strict=True)))
        return turns

    seen: list[list[Any]] = []
    resets: list[int] = []

    class Calculator(agent.Calculator):
        def reset(self, **columns: Any) -> str:
            super().reset(**columns)
            resets.append(1)
            return ""

        get_reward = None  # type: ignore[assignment]

    data = agent.dataset(agent.one_by_one)
    given = {"tools": agent.tools([])} if setup == "tools" else {"environment_factory": Calculator}
    keywords = {"train_dataset": data, "processing_class": None, "reward_funcs": by_turns, **given}
    options = {"loss_type": "grpo", "num_generations": 2, "max_completion_length": 160, "min_p": 0.1, "max_steps": 4}
    options |= {
        "learning_rate": 1e-5,
        "steps_per_generation": 2,
        "per_device_train_batch_size": 8,
        "num_iterations": 2,
    }
    options |= {"keep_sampling_mask": True}
    model = agent.save_model(tmp_path / "model")
    trainer = tiny.trainer(model, tmp_path, dynamic_sampling=True, build=keywords, **options)
    trainer.model.train()
    samples = trainer._generate_and_score_completions([{"prompt": row["prompt"]} for row in data for _ in range(2)])
    pairs = [[answers[start : start + 2] for start in range(0, len(answers), 2)] for answers in seen]
    differs = lambda group: group[0][1] != group[1][1]
    later = [group for answers in pairs[1:] for group in answers if differs(group)]
    expected = [group if differs(group) or not later else later.pop(0) for group in pairs[0]]
    assert len(seen) > 1 and expected != pairs[0]
    assert len(resets) == (sum(map(len, seen)) if setup == "environment" else 0)
    pairs = zip(samples["completion_ids"], samples["completion_mask"], strict=True)
    found = [tuple(ids[mask.bool()].tolist()) for ids, mask in pairs]
    assert found == [ids for group in expected for ids, _ in group]
    masks = zip(samples["tool_mask"], found, strict=True)
    is_tool = [[not flag for flag in mask[: len(ids)].tolist()] for mask, ids in masks]
    for ids, tools, (_, turns) in zip(found, is_tool, [row for group in expected for row in group], strict=True):
        spans = agent.turns(list(ids))
        assert len(spans) == turns
        assert tools == [not any(start <= t < end for start, end in spans) for t in range(len(ids))]
    for sets, tools in zip(samples["kept_tokens"], is_tool, strict=True):  # a token of a tool has none
        counts = sets[1].diff()[: len(tools)].tolist()
        assert [count == 0 for count in counts] == tools


def test_a_stream_goes_on_after_an_error_of_one_read() -> None:
    """A script may catch the error, here in the second pass, and train on with the same trainer."""
    rows = [{"prompt": str(number)} for number in range(6)]
    errors = [False, True, False]

    def unsteady() -> Iterator[Any]:
        fails = errors.pop(0) if errors else False
        yield from rows[:3]
        if fails:
            raise ConnectionError("the network is down")
        yield from rows[3:]

    def prompts(generator: Any) -> _Prompts:
        data = IterableDataset.from_generator(generator)
        return _Prompts(SimpleNamespace(train_dataset=data, args=SimpleNamespace(seed=0)))  # type: ignore[arg-type]

    steady = prompts(lambda: iter(rows))
    expected = [draw() for draw in steady.take(12)]
    found = prompts(unsteady)
    taken = [draw() for draw in found.take(4)]
    with pytest.raises(ConnectionError):
        found.take(4)
    taken += [draw() for draw in found.take(8)]
    assert taken == expected and found.position == steady.position


def test_a_row_that_goes_to_another_process_takes_no_tensor_of_this_gpu() -> None:
    gpu = torch.device("meta")
    row = CompletionRecord(
        inputs={"prompt": "a", "image": [torch.ones(2, device=gpu)]},
        prompt=[{"role": "user", "content": "a"}],
        completion="b",
        generated=([1, 2], None),
        returned=(torch.tensor(1.0, device=gpu), 0.5),
        rewards=[1.0, 0.5],
        token_values={"routes": torch.ones(3, 2)},
        extra={"column": torch.zeros(1, device=gpu)},
    )
    back = replace(row, inputs={"prompt": "a", "image": [torch.ones(2)]}, returned=(torch.tensor(1.0), 0.5)).on("meta")
    assert back.inputs["image"][0].device == back.returned[0].device == gpu and back.returned[1] == 0.5
    assert back.generated == ([1, 2], None) and back.prompt == row.prompt
    # beside those of this process, which are recorded on the CPU
    assert back.token_values["routes"].device.type == "cpu"
