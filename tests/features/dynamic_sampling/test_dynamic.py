"""Dynamic sampling: which groups are replaced, what is logged of it, and what fails as without it."""

import contextlib
import math
import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from tests.features.dynamic_sampling import tools as rounds
from tests.features.dynamic_sampling.tools import PREFIX, build, chosen, everything, groups, metric, second, sequences
from tests.oracles import routes as routed_oracle
from tests.tools import tiny
from trl_steady import StepRewards
from trl_steady.features.dynamic_sampling import DynamicSampling, _Group, step_range

METHODS = pytest.mark.parametrize("method", ["GRPO", "RLOO"])


@pytest.mark.fast_rows(1)
@METHODS
def test_exactly_the_groups_without_a_signal_are_replaced(
    models: dict[str, Path], tmp_path: Path, method: str
) -> None:
    trainer = tiny.train(build(models["dense"], tmp_path, method, max_steps=20, beta=0.0))
    assert len(trainer.rollouts) == 5 and {len(each.rounds) for each in trainer.rollouts} >= {2}
    replaced = 0
    for rollout in trainer.rollouts:
        expected = chosen(rollout.rounds)
        answers = [answer for group in expected for answer in group]
        assert sequences(rollout.samples) == [(answer.prompt, answer.ids) for answer in answers]
        rewards = torch.tensor([[answer.reward for answer in group] for group in expected])
        own = rewards - rewards.mean(1, keepdim=True)
        # from the papers, with TRL's epsilon
        own = own * 4 / 3 if method == "RLOO" else own / (rewards.std(1, keepdim=True) + 1e-4)
        torch.testing.assert_close(rollout.samples["advantages"], own.flatten())
        replaced += sum(before != after for before, after in zip(groups(rollout.rounds[0]), expected, strict=True))
        if method == "RLOO":  # GRPO's rollout is on-policy, and TRL does not score it
            policy, reader, scores = routed_oracle.initial(models["dense"], rollout.weights), tiny.tokenizer(), []
            for answer in answers:
                before = reader(answer.prompt)["input_ids"]
                with torch.no_grad():
                    own_scores = routed_oracle.log_probs(policy, [*before, *answer.ids], len(before))
                scores.append(own_scores.sum())
            torch.testing.assert_close(rollout.samples["old_logps"], torch.stack(scores), rtol=1e-4, atol=1e-4)
    assert replaced >= 5
    counts = [(len(each.rounds), sum(map(len, each.rounds)) / 16) for each in trainer.rollouts]
    assert list(zip(metric(trainer, f"{PREFIX}rounds"), metric(trainer, f"{PREFIX}generated"), strict=True)) == counts


# which groups have a signal


def decisions(trainer: Any, rows: int = 16) -> list[bool]:
    """Which groups of one rollout the filter keeps in its first round."""
    found: list[list[bool]] = []
    feature = trainer.feature(DynamicSampling)
    decide = feature._are_kept

    def keep(*arguments: Any) -> torch.Tensor:
        found.append(decide(*arguments).tolist())
        return decide(*arguments)

    feature._are_kept = keep
    trainer.model.train()
    trainer._generate_and_score_completions([{"prompt": f"{i // 4}+1="} for i in range(rows)])
    return found[0]


def by_group(*values: list[Any]) -> Any:
    """A reward function with these values for the groups of a round, over and over."""

    def reward(completion_ids: list[list[int]], **_: Any) -> list[Any]:
        every = [value for group in values for value in group]
        return [every[i % len(every)] for i in range(len(completion_ids))]

    return reward


def step(*values: float) -> StepRewards:
    return StepRewards.at_tokens(list(values), list(range(1, len(values) + 1)))


NAN, UNEVEN = math.nan, [1.0, 1.0, 1.0, 2.0]


@pytest.mark.fast_rows(2)
@pytest.mark.parametrize(
    ("values", "options", "expected"),
    [
        # eight equal rewards have a deviation of 6.5e-5 in float32, and a half of that is close to 0 for TRL
        ([[1000.1] * 4, [0.0, 0.0, 0.0, 1e-9], UNEVEN, [2.0] * 4], {}, [False, True, True, False]),
        # unscored answers enter no mean
        ([[None] * 4, [None, None, None, 1.0], [None, 1.0, 1.0, None], [None, 1.0, 2.0, None]], {}, [0, 0, 0, 1]),
        ([[NAN] * 4, [NAN, 1.0, 1.0, 1.0], [NAN, 1.0, 1.0, 2.0], UNEVEN], {}, [0, 0, 1, 1]),
        # RLOO clips rewards first
        (
            [[1.0, 3.0, 4.0, 9.0], [5.0, 6.0, 7.0, 8.0], UNEVEN, UNEVEN],
            {"reward_clip_range": (3.0, 4.0)},
            [1, 0, 0, 0],
        ),
        # and has a KL in its rewards, of which nothing is known yet
        ([[1.0] * 4, UNEVEN, [0.0] * 4, UNEVEN], {"method": "RLOO", "beta": 0.5}, [0, 1, 0, 1]),
        # the mean is between the two
        ([[0.0] * 4, [0.0, 0.0, 0.0, 1.0], [1.0] * 4, [None] * 4], {"dynamic_sampling_filter": (0, 1)}, [0, 1, 0, 0]),
        ([UNEVEN, [0.5] * 4, [0.0] * 4, UNEVEN], {"dynamic_sampling_filter": [0, 1]}, [0, 1, 0, 0]),
        # variances, with n - 1, of 0.25, 0.0025, 0 and 1/2: the last and the first have 99.7 % of their sum
        (
            [[0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.1], [1000.1] * 4, [None, None, 0.0, 1.0]],
            {"dynamic_sampling_filter": "reward_variance"},
            [1, 0, 0, 1],
        ),
        ([[1.0] * 4, [0.0] * 4, [0.5] * 4, [None] * 4], {"dynamic_sampling_filter": "reward_variance"}, [0, 0, 0, 0]),
    ],
)
def test_a_group_has_a_signal(
    models: dict[str, Path], tmp_path: Path, values: Any, options: dict[str, Any], expected: list[int]
) -> None:
    method = options.pop("method", "RLOO" if "reward_clip_range" in options else "GRPO")
    trainer = build(models["dense"], tmp_path, method, by_group(*values), **options)
    with pytest.warns() if str(values).count("nan") else contextlib.nullcontext():
        assert decisions(trainer) == [bool(each) for each in expected]


@pytest.mark.parametrize("formula", ["process", "return_to_go"])
def test_steps_with_equal_totals_have_a_signal(models: dict[str, Path], tmp_path: Path, formula: str) -> None:
    equal, other = [step(0.5, 0.5)] * 4, [step(1.0, 0.0), step(0.0, 1.0)] * 2
    reward = by_group(equal, other, [step(0.0, 0.0)] * 4, [step(0.0, 0.0)] * 3 + [step(0.5, -0.5)])
    options = {"loss_type": "gspo_token", "step_advantage": formula, "dynamic_sampling_filter": everything}
    # the advantages say which groups have one; answers of one token have one step
    trainer = build(models["dense"], tmp_path, reward=reward, **options)
    forced = {"max_new_tokens": 3, "min_new_tokens": 3, "eos_token_id": None}
    trainer.generation_config.update(**forced)
    trainer.model.train()
    samples = trainer._generate_and_score_completions([{"prompt": f"{i // 4}+1="} for i in range(16)])
    has_signal = samples["advantages"].view(4, -1).abs().amax(1) > 1e-6
    trainer.args.dynamic_sampling_filter = "zero_std"
    assert decisions(trainer) == has_signal.tolist() == [False, True, False, True]


def test_groups_of_large_variance_are_kept(models: dict[str, Path], tmp_path: Path) -> None:
    trainer = build(models["dense"], tmp_path, max_steps=12, dynamic_sampling_filter="reward_variance")
    teaching = 0  # groups that "zero_std" would keep
    for rollout in tiny.train(trainer).rollouts:
        keeps = rounds.of_large_variance(groups(rollout.rounds[0]))
        expected = chosen(rollout.rounds, keeps)
        answers = [(answer.prompt, answer.ids) for group in expected for answer in group]
        assert sequences(rollout.samples) == answers
        found = [group for answers in rollout.rounds for group in groups(answers)]
        teaching += sum(rounds.differs(group) and not keeps(group) for group in found)
    assert teaching


def test_with_several_functions_steps_count_beside_the_others() -> None:
    """Two functions of 1 each give 2 where their steps end at one token, and 1 elsewhere."""
    low, high = step_range([step(1.0, 1.0), 1.0])
    assert low < high
    assert step_range([step(0.0, 0.0), 0.0]) == (0.0, 0.0) == step_range([step(0.0), None])
    assert step_range([step(1.0, 1.0)]) == (1.0, 1.0)
    assert all(map(math.isnan, (*step_range([1.0, 2.0]), *step_range([step()]))))


@pytest.mark.parametrize(("aggregation", "expected"), [("sum_then_normalize", False), ("normalize_then_sum", True)])
def test_functions_that_cancel(models: dict[str, Path], tmp_path: Path, aggregation: str, expected: bool) -> None:
    up, down = by_group([0.0, 1.0, 2.0, 3.0]), by_group([0.0, -1.0, -2.0, -3.0])
    trainer = build(models["dense"], tmp_path, reward=[up, down], multi_objective_aggregation=aggregation)
    assert decisions(trainer) == [expected] * 4
    weightless = {"multi_objective_aggregation": aggregation, "reward_weights": [0.0, 0.0]}
    assert decisions(build(models["dense"], tmp_path, reward=[up, down], **weightless)) == [False] * 4


def test_a_group_without_loss_tokens_has_no_signal(models: dict[str, Path], tmp_path: Path) -> None:
    trainer = build(models["dense"], tmp_path, reward=by_group(UNEVEN), mask_truncated_completions=True)
    trainer.generation_config.update(max_new_tokens=2, min_new_tokens=2, eos_token_id=None)
    assert decisions(trainer) == [False] * 4


def long(rewards: torch.Tensor, rows: list[dict[str, Any]]) -> bool:
    """Filter by a group with the columns of the data set. At the top level, as the option needs it."""
    assert rewards.shape == (4,) and len(rows) == 4 and len({row["prompt"] for row in rows}) == 1
    assert {row["level"] for row in rows} == {rounds.number(rows[0]["prompt"]) % 3}
    assert [len(row["completion"]) for row in rows] == rewards.tolist()
    return rows[0]["level"] > 0 and rewards.max().item() > 1


def test_a_function_decides_by_rewards_and_rows(models: dict[str, Path], tmp_path: Path) -> None:
    data = tiny.dataset()
    data = data.add_column("level", [i % 3 for i in range(len(data))])
    lengths = lambda completions, **_: [float(len(text)) for text in completions]
    options = {"dynamic_sampling_filter": long, "max_steps": 12}
    trainer = tiny.train(build(models["dense"], tmp_path, reward=lengths, keywords={"train_dataset": data}, **options))
    keeps = lambda group: rounds.number(group[0].prompt) % 3 > 0 and max(answer.reward for answer in group) > 1
    for rollout in trainer.rollouts:
        answers = [answer for group in chosen(rollout.rounds, keeps) for answer in group]
        assert sequences(rollout.samples) == [(answer.prompt, answer.ids) for answer in answers]
    assert any(len(rollout.rounds) > 1 for rollout in trainer.rollouts)


# rounds, metrics and statistics


def test_nothing_is_kept(models: dict[str, Path], tmp_path: Path) -> None:
    trainer = build(models["dense"], tmp_path, reward=by_group([1.0]), max_steps=8)
    with pytest.warns(UserWarning, match="3 rounds gave no group") as warned:
        trainer.train()
    assert sum("gave no group" in str(warning.message) for warning in warned) == 1 and len(trainer.rollouts) == 2
    for rollout in trainer.rollouts:
        assert [len(answers) for answers in rollout.rounds] == [16, 16, 16]
        assert sequences(rollout.samples) == [(answer.prompt, answer.ids) for answer in rollout.rounds[0]]
        assert rollout.samples["advantages"].tolist() == [0.0] * 16  # so that skip_zero_weight may skip them
    for name, value in {"kept": 0, "rounds": 3, "generated": 3, "unfilled": 1, "solved": 0, "hopeless": 0}.items():
        assert metric(trainer, PREFIX + name) == [value, value], name
    assert trainer.state.global_step == 8 and metric(trainer, "frac_reward_zero_std") == [1.0, 1.0]


LARGE, SMALL = [0.0, 0.0, 9.0, 9.0], [0.0, 0.0, 0.0, 1.0]


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(
    ("values", "chosen_filter", "said"),
    [
        # one group has 98 % of the variance, and the groups of further rounds are as the others
        (
            [LARGE, SMALL, SMALL, SMALL],
            "reward_variance",
            r"Bound the rewards, or set dynamic_sampling_filter='zero_std'",
        ),
        ([SMALL, [0.0] * 4, [0.0] * 4, [0.0] * 4], "zero_std", "easier or harder prompts, more rounds, or a wider"),
        ([SMALL, [0.0] * 4, [0.0] * 4, [0.0] * 4], (0, 0.3), "easier or harder prompts, more rounds, or a wider"),
        ([SMALL, SMALL, [0.0] * 4, [0.0] * 4], "zero_std", None),
    ],
)
def test_a_rollout_of_rejected_groups_is_said_once(
    models: dict[str, Path], tmp_path: Path, values: list[Any], chosen_filter: Any, said: str | None
) -> None:
    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        if trainer.rounds:
            return values[-1] * (len(completion_ids) // 4)
        return [value for group in values for value in group]

    options = {"dynamic_sampling_filter": chosen_filter, "max_steps": 8}
    trainer = build(models["dense"], tmp_path, reward=reward, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    found = [str(each.message) for each in caught if "after 3 rounds" in str(each.message)]
    assert len(trainer.rollouts) == 2
    if said is None:
        assert found == []
        return
    (message,) = found
    assert re.search(rf"after 3 rounds, 3 of the 4 groups of a rollout .* rejects\..*{said}", message)
    assert trainer.feature(DynamicSampling).notes == [message]


def test_a_round_asks_for_what_is_missing_by_the_share_that_was_kept(models: dict[str, Path], tmp_path: Path) -> None:
    plan: list[list[int]] = []  # for each round, which groups have a signal

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [i * float(plan[len(trainer.rounds)][i // 4]) for i in range(len(completion_ids))]

    trainer = build(models["dense"], tmp_path, reward=reward, dynamic_sampling_max_rounds=5)
    trainer.model.train()
    for groups_with_a_signal, expected in (
        ([[1, 1, 1, 0], [1, 1]], [16, 8]),  # 1 missing of 4, 3/4 were kept: ceil(4/3) = 2
        # 3 missing, 1/4 kept: 12, but at most the batch; then 1, 3/8: 3, but at most 2
        ([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1]], [16, 16, 8]),
        ([[1, 1, 0, 0], [1, 1, 1, 1]], [16, 16]),  # 2 missing, half kept: 4
        ([[0, 0, 0, 0], [1, 1, 1, 1]], [16, 16]),  # nothing kept: at most the batch
    ):
        plan[:] = groups_with_a_signal
        trainer._generate_and_score_completions([{"prompt": f"{i // 4}+1="} for i in range(16)])
        assert [len(answers) for answers in trainer.rollouts[-1].rounds] == expected


@pytest.mark.fast_rows(1)
@METHODS
def test_statistics_are_those_before_the_filter(models: dict[str, Path], tmp_path: Path, method: str) -> None:
    """Each rollout has one value, that of its first round. Tokens are those of all rounds."""
    keywords = {"reward": [rounds.planted, second], "reward_weights": [1.0, 0.0], "logging_steps": 1}
    trainer = tiny.train(build(models["dense"], tmp_path, method, **keywords, beta=0.1, max_steps=12))
    rows = [row for row in trainer.state.log_history if "reward" in row]
    tokens = 0
    for rollout, row in zip(trainer.rollouts, rows, strict=True):
        first = rollout.rounds[0]
        rewards = [answer.reward for answer in first]
        assert row["reward"] == row["rewards/planted/mean"] == pytest.approx(sum(rewards) / 16, rel=1e-6)
        assert row["reward_std"] == pytest.approx(torch.tensor(rewards).std().item(), rel=1e-5)
        idle = [not rounds.differs(group) for group in groups(first)]
        assert row["frac_reward_zero_std"] == sum(idle) / 4
        lengths = [len(answer.ids) for answer in first]
        assert row["completions/mean_length"] == sum(lengths) / 16 and row["completions/max_length"] == max(lengths)
        assert row["longest"] == max(lengths)
        ends = {*tiny.SIZES["eos_token_id"]}
        assert row["completions/clipped_ratio"] == sum(answer.ids[-1] not in ends for answer in first) / 16
        tokens += sum(len(answer.prompt) + len(answer.ids) for answers in rollout.rounds for answer in answers)
        assert row["num_tokens"] == tokens
        every = [group for answers in rollout.rounds for group in groups(answers)]
        assert row[f"{PREFIX}kept"] == sum(map(rounds.differs, every)) / len(every)
        left = [group for group in chosen(rollout.rounds) if not rounds.differs(group)]
        assert row[f"{PREFIX}unfilled"] == len(left) / 4
    kl = [row["kl"] for row in trainer.state.log_history if "kl" in row]
    assert any(value != 0 for value in kl) and not any(value is None for row in rows for value in row.values())
    assert any(len(rollout.rounds) > 1 for rollout in trainer.rollouts)


def test_solved_and_hopeless_groups(models: dict[str, Path], tmp_path: Path) -> None:
    """Those that earn all the best or the worst reward that any answer has earned so far."""
    reward = by_group([1.0] * 4, [0.5] * 4, [0.0] * 4, [0.0] * 4)
    trainer = tiny.train(build(models["dense"], tmp_path, reward=reward, dynamic_sampling_max_rounds=2))
    assert metric(trainer, f"{PREFIX}solved") == [0.25, 0.25] and metric(trainer, f"{PREFIX}hopeless") == [0.5, 0.5]


class Placed(NamedTuple):
    """A completion, and the device of its tensors."""

    text: str
    device: str

    def on(self, device: str) -> "Placed":
        return Placed(self.text, device)


@pytest.mark.parametrize("owner", [0, 1])
def test_the_first_rejected_slots_are_filled_whichever_process_found_the_group(
    monkeypatch: pytest.MonkeyPatch, owner: int
) -> None:
    """Four groups of two, on two processes that are run one after the other. The first and the third are rejected.

    No tensor goes to another process on a GPU, which that process may not see.
    """
    sent: list[Any] = []
    monkeypatch.setattr(
        "trl_steady.features.dynamic_sampling.gather_object", lambda moves: [*sent, *(sent.extend(moves) or moves)]
    )
    completions: dict[int, list[Any]] = {}
    for rank in (owner, 1 - owner):
        completions[rank] = list(range(4 * rank, 4 * rank + 4))
        feature = object.__new__(DynamicSampling)
        accelerator = SimpleNamespace(process_index=rank, device=f"cuda:{rank}")
        feature.trainer = SimpleNamespace(accelerator=accelerator, num_generations=2)  # type: ignore[assignment]
        own: dict[int, Any] = {i: Placed(text, f"cuda:{rank}") for i, text in enumerate(("first", "second"))}
        feature._fill(completions[rank], [0, 2], [_Group([owner, owner], own if rank == owner else {})])
    assert completions[0][:2] == [Placed("first", "cuda:0"), Placed("second", "cuda:0")]
    assert completions[0][2:] + completions[1] == [2, 3, 4, 5, 6, 7]
    assert {placed.device for _, _, placed in sent} == ({"cpu"} if owner else set())


# errors


@pytest.mark.fast_rows(1)
@METHODS
@pytest.mark.parametrize(
    ("value", "error"),
    [(RuntimeError("no verdict"), "no verdict"), (math.inf, "reward of 'reward' is inf")],
    ids=["raises", "infinite"],
)
def test_an_error_of_a_later_round_is_that_of_the_first(
    models: dict[str, Path], tmp_path: Path, method: str, value: Any, error: str
) -> None:
    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        if len(trainer.rounds) == at and isinstance(value, Exception):
            raise value
        return [value if len(trainer.rounds) == at else 1.0 for _ in completion_ids]

    said = []
    for at in (0, 1):
        trainer = build(models["dense"], tmp_path, method, reward)
        before = dict(vars(trainer))
        with pytest.raises((RuntimeError, ValueError), match=re.escape(error)) as raised:
            trainer.train()
        said.append(str(raised.value))
        patched = ("_generate", "_calculate_rewards", "_get_per_token_logps_and_entropies", "_rollout")
        assert not {*patched} & vars(trainer).keys() and len(trainer.rounds) == at + (value == math.inf)
        assert all(vars(trainer)[name] is before[name] for name in ("_logs", "reward_funcs"))
    assert said[0] == said[1]


def test_nan_in_a_later_round_is_said_once_and_no_reward(models: dict[str, Path], tmp_path: Path) -> None:
    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [math.nan if trainer.rounds and i % 4 else float(i * (i // 4 % 2)) for i in range(len(completion_ids))]

    trainer = build(models["dense"], tmp_path, reward=reward, max_steps=4)
    with pytest.warns(UserWarning, match="is nan") as warned:
        trainer.train()
    assert sum("is nan" in str(each.message) for each in warned) == 1
    assert metric(trainer, f"{PREFIX}unfilled") == [0.5]  # groups with one answer that is scored


# other callers


def test_evaluation_is_not_filtered_and_leaves_training_alone(models: dict[str, Path], tmp_path: Path) -> None:
    keywords = {"eval_dataset": tiny.dataset(4)}
    trainer = build(models["dense"], tmp_path, keywords=keywords, per_device_eval_batch_size=16)
    trainer.evaluate()
    (rollout,) = trainer.rollouts
    assert len(rollout.rounds) == 1 and not any(PREFIX in name for row in trainer.state.log_history for name in row)
