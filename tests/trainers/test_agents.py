"""Rewards per assistant turn through TRL's tool loop and its environments: a tiny model that really calls tools."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch import Tensor

import trl_steady
from tests.oracles import advantages as advantage_oracles
from tests.tools import agent, tiny
from trl_steady import StepRewards

GROUP = 4
# tokens for two calls in one turn with their results, and no more; those of the second of two turns have no room
NO_ANSWER, HALF_AN_ANSWER = 70, 73
MIN_P = 0.1
BATCH = 32  # completions of a rollout: a group for each row of the dataset
ORACLES = {"process": advantage_oracles.process, "return_to_go": advantage_oracles.return_to_go}

Completion = list[agent.Message]
Steps = dict[int, float] | None  # end -> reward; None = no verdict


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return agent.save_model(tmp_path_factory.mktemp("agent"))


class Recorded(trl_steady.GRPOTrainer):
    """Ours, which keeps what left its rollouts."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.rollouts: list[dict[str, Any]] = []
        self.completions: list[list[Completion]] = []

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: list[Any], ids: list[list[int]]) -> Tensor:
        self.completions.append(completions)
        return super()._calculate_rewards(inputs, prompts, completions, ids)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        self.rollouts.append({k: v.clone() for k, v in output.items() if isinstance(v, Tensor)})
        return output


def trainer(model: Path, output_dir: Path, reward_funcs: Any = None, **options: Any) -> Recorded:
    """Of two updates with each rollout."""
    build = {"tools": agent.tools([]), "train_dataset": agent.dataset(agent.one_by_one, agent.both_at_once)}
    build |= options.pop("build", {})
    defaults: dict[str, Any] = {
        "loss_type": "gspo_token",
        "per_device_train_batch_size": BATCH // 2,
        "steps_per_generation": 2,
        "num_generations": GROUP,
        "max_completion_length": 160,
        "min_p": MIN_P,  # at temperature 1, but nothing that was not learned
        "learning_rate": 1e-5,
        "max_steps": 2,
        "gradient_checkpointing": False,
    }
    arguments = tiny.arguments(trl_steady.GRPOConfig, output_dir, **{**defaults, **options})
    reader = agent.tokenizer()
    return Recorded(str(model), reward_funcs, args=arguments, processing_class=reader, **build)


def by_message(completion: Completion) -> list[float]:
    """What the assistant's messages are worth."""
    own = [message for message in completion if message["role"] == "assistant"]
    return [agent.worth(message, number) for number, message in enumerate(own)]


def per_turn(completions: list[Completion], **_: Any) -> list[StepRewards]:
    return [StepRewards.per_turn(by_message(completion)) for completion in completions]


class Row(NamedTuple):
    """A completion as it leaves a rollout."""

    prompt: list[int]
    ids: list[int]
    own: list[int]  # TRL's tool mask
    advantages: list[float]


def rows(batch: dict[str, Any]) -> list[Row]:
    """Without padding, where nothing but 0 may stand."""
    assert batch["advantages"].shape == batch["completion_ids"].shape == batch["tool_mask"].shape
    assert batch["advantages"].dim() == 2
    result = []
    for i, mask in enumerate(batch["completion_mask"].bool()):
        length = len(agent.unpadded(batch["completion_ids"][i].tolist()))
        assert not mask[length:].any() and (mask[:length].all() or not mask.any())
        assert (batch["advantages"][i, length:] == 0).all()
        prompt = batch["prompt_ids"][i][batch["prompt_mask"][i].bool()]
        columns = (batch[name][i, :length].tolist() for name in ("completion_ids", "tool_mask", "advantages"))
        result.append(Row(prompt.tolist(), *columns))
    return result


def advantages(completions: Sequence[Row], steps: Sequence[Steps], formula: str) -> list[list[float]]:
    """By the oracle, 0 at the tools' tokens as the text has them."""
    batch = [
        None if of_one is None else (max(agent.turns(row.ids)[-1][1], *of_one), sorted(of_one.items()))
        for row, of_one in zip(completions, steps, strict=True)
    ]
    expected = []
    for row, values in zip(completions, ORACLES[formula](batch, GROUP, "group"), strict=True):
        own = [t for start, end in agent.turns(row.ids) for t in range(start, end)]
        expected.append([values[t] if values and t in own else 0.0 for t in range(len(row.ids))])
    return expected


def at_turns(row: Row, values: Sequence[float]) -> dict[int, float]:
    """Steps that end where the row's turns do."""
    return {end: value for (_, end), value in zip(agent.turns(row.ids), values, strict=True)}


def close(values: list[list[float]]) -> Any:
    return [pytest.approx(row, rel=1e-4, abs=1e-5) for row in values]


class Run(NamedTuple):
    trainer: Recorded
    calls: agent.Calls
    formula: str


@pytest.fixture(scope="module", params=["return_to_go", "process"])
def run(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    calls: agent.Calls = []
    build = {"tools": agent.tools(calls)}
    recorded = trainer(
        model, tmp_path_factory.mktemp("run"), per_turn, step_advantage=request.param, build=build, max_steps=4
    )
    tiny.train(recorded)
    return Run(recorded, calls, request.param)


@pytest.mark.fast_rows(1)
def test_the_model_calls_both_tools_in_one_turn_or_two_or_not_at_all(run: Run) -> None:
    """The rest of this file shows nothing otherwise."""
    completions = [completion for rollout in run.trainer.completions for completion in rollout]
    turns = [len(by_message(completion)) for completion in completions]
    groups = [turns[start : start + GROUP] for start in range(0, len(turns), GROUP)]
    assert set(turns) == {1, 2, 3} and any(len(set(group)) > 1 for group in groups)
    results = [message["name"] for completion in completions for message in completion if message["role"] == "tool"]
    assert set(results) == {"add", "double"} and sorted(results) == sorted(name for name, _ in run.calls)
    at_once = [[m["role"] for m in completion] for completion in completions if len(completion) == 4]
    assert ["assistant", "tool", "tool", "assistant"] in at_once


def test_each_turn_has_one_advantage_and_tools_have_none(run: Run) -> None:
    assert len(run.trainer.rollouts) == 2
    several = []
    for rollout, completions in zip(run.trainer.rollouts, run.trainer.completions, strict=True):
        found = rows(rollout)
        assert len(found) == BATCH
        for row in found:
            own = [False] * len(row.ids)
            for start, end in agent.turns(row.ids):
                own[start:end] = [True] * (end - start)
                assert len(set(row.advantages[start:end])) == 1
            assert row.own == own
            assert all(a == 0 for a, is_own in zip(row.advantages, own, strict=True) if not is_own)
            several.append(len({row.advantages[start] for start, _ in agent.turns(row.ids)}))
        steps = [at_turns(row, by_message(completion)) for row, completion in zip(found, completions, strict=True)]
        assert [row.advantages for row in found] == close(advantages(found, steps, run.formula))
        assert sum(any(row.advantages) for row in found) >= BATCH // 2
    assert max(several) == 3  # turns of one completion differ


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(
    ("room", "masked", "formula"), [(HALF_AN_ANSWER, True, "process"), (NO_ANSWER, False, "return_to_go")]
)
def test_a_turn_that_is_cut_is_a_turn(model: Path, tmp_path: Path, room: int, masked: bool, formula: str) -> None:
    """Where it is masked out its rewards count in the baseline of the others, and it learns nothing."""
    options = {"step_advantage": formula, "max_completion_length": room, "mask_truncated_completions": masked}
    recorded = trainer(model, tmp_path, per_turn, **options)
    tiny.train(recorded)
    [rollout], [completions] = recorded.rollouts, recorded.completions
    found = rows(rollout)
    steps = [at_turns(row, by_message(completion)) for row, completion in zip(found, completions, strict=True)]
    cut = [len(row.ids) == room for row in found]
    assert any(cut) and any(completion[-1].get("tool_calls") for completion in completions)
    assert any(completion[-1]["role"] == "tool" for completion in completions) is (room == NO_ANSWER)
    expected = advantages(found, steps, formula)
    if masked:
        expected = [[0.0] * len(row) if is_cut else row for row, is_cut in zip(expected, cut, strict=True)]
    assert [row.advantages for row in found] == close(expected)
    assert any(any(row.advantages) for row, is_cut in zip(found, cut, strict=True) if is_cut) is not masked


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("environment", [agent.Calculator, agent.AsyncCalculator])
def test_an_environment_rewards_turns(model: Path, tmp_path: Path, environment: type[agent.Calculator]) -> None:
    def in_environment(environment: type[agent.Calculator]) -> dict[str, Any]:
        prompts = agent.dataset(agent.one_by_one)  # which do not call twice in a turn
        return {"environment_factory": environment, "train_dataset": prompts, "tools": None}

    calls: list[agent.Calls] = []

    def watch(completions: list[Completion], environments: list[agent.Calculator], **_: Any) -> list[None]:
        calls.extend(list(one.calls) for one in environments)
        return [None] * len(completions)

    recorded = trainer(model, tmp_path, watch, build=in_environment(environment))
    tiny.train(recorded)
    [rollout], [completions] = recorded.rollouts, recorded.completions
    found = rows(rollout)
    steps = [at_turns(row, agent.by_calls(of_one)) for row, of_one in zip(found, calls, strict=True)]
    assert {len(of_one) for of_one in steps} == {1, 2, 3} and len(completions) == BATCH
    assert [row.advantages for row in found] == close(advantages(found, steps, "return_to_go"))
    assert recorded.reward_func_names == ["watch", environment.__name__]
    assert list(recorded._logs["rewards"][environment.__name__]) == [sum(agent.by_calls(one)) for one in calls]
