"""Reward functions that reward steps: the advantages that reach the loss, what is logged, what is refused."""

from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from torch import Tensor

from tests import advantage_oracles as oracles
from tests import tiny
from trl_steady import StepRewards

FORMULAS = ("process", "return_to_go")
SCALES = ("group", "batch", "none")
ANSWERS = ["one\ntwo\nthree", "one", "two\ntwo", "a\nb\nc\nd", "", "xy\nz", "\n", "last\none"]


def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Known texts, each with an end-of-sequence token; no two groups alike."""
    tokenizer = trainer.processing_class
    answers = [(ANSWERS * 8)[(5 * i) % len(ANSWERS) + i // 8] for i in range(len(prompts))]
    ids = [[*tokenizer(a)["input_ids"], tokenizer.eos_token_id] if a else [tokenizer.eos_token_id] for a in answers]
    return {"prompt_ids": [tokenizer(p)["input_ids"] for p in prompts], "completion_ids": ids, "logprobs": None}


def ends_of(text: str) -> list[int]:
    """Of its lines; a token is a byte here."""
    return [i + 1 for i, letter in enumerate(text[:-1]) if letter == "\n"] + ([len(text)] if text else [])


def values_of(text: str) -> list[float]:
    return [0.25 * (len(text) % 3) + j - 0.5 * (j % 2) for j in range(len(ends_of(text)))]


def lines(completions: list[str], **_: Any) -> list[StepRewards]:
    return [StepRewards(values_of(text), ends_of(text)) for text in completions]


def mixed(completions: list[str], **_: Any) -> list[StepRewards | float | None]:
    """A float for some, no verdict for others."""
    kinds = [lambda t: StepRewards(values_of(t), ends_of(t)), lambda t: float(len(t)), lambda t: None]
    return [kinds[i % 3](text) for i, text in enumerate(completions)]


async def judge(completion_ids: list[list[int]], **_: Any) -> list[StepRewards | None]:
    """Async, in tokens, and without a word on every fourth."""
    half = lambda ids: max(1, len(ids) // 2)
    return [
        StepRewards.at_tokens([sum(ids) % 7 / 7], [half(ids)]) if i % 4 else None
        for i, ids in enumerate(completion_ids)
    ]


class Length:
    """A callable object, scalar."""

    __name__ = "length"

    def __call__(self, completions: list[str], **_: Any) -> list[float | None]:
        return [None if i % 6 == 2 else len(text) / 10 for i, text in enumerate(completions)]


def rows(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{i // 4}+1="} for i in range(count)]


def build(models: dict[str, Path], tmp_path: Path, functions: Any, **options: Any) -> Any:
    build = {"reward_funcs": functions, "rollout_func": rollout, **options.pop("build", {})}
    return tiny.trainer(models["dense"], tmp_path, **{"loss_type": "gspo_token", **options, "build": build})


def steps_by_hand(functions: list[Any], weights: list[float], texts: list[str], ids: list[list[int]]) -> list[Any]:
    """(tokens, [(end, reward), ...]) of each completion, rewards that end at the same token added up."""
    import asyncio
    import inspect

    batch: list[Any] = []
    returned = []
    for function in functions:
        result = function(completions=texts, completion_ids=ids)
        returned.append(asyncio.run(result) if inspect.isawaitable(result) else result)
    for i, own in enumerate(ids):
        ends: dict[int, float] = {}
        for weight, result in zip(weights, returned, strict=True):
            reward = result[i]
            if reward is None:
                continue
            steps = [(len(own), reward)]
            if isinstance(reward, StepRewards):
                whole = (
                    len(texts[i]) if reward.unit == "characters" else -1
                )  # that end takes in the end-of-sequence token
                steps = [(len(own) if e == whole else e, v) for e, v in zip(reward.ends, reward.values, strict=True)]
            for end, value in steps:
                ends[end] = ends.get(end, 0.0) + weight * value
        unscored = all(result[i] is None for result in returned)
        batch.append(None if unscored else (len(own), sorted(ends.items())))
    return batch


def expected(batch: list[Any], formula: str, group_size: int, scale: str, like: Tensor) -> Tensor:
    result = torch.zeros_like(like)
    for i, values in enumerate(getattr(oracles, formula)(batch, group_size, scale)):
        result[i, : len(values)] = torch.tensor(values)
    return result


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("formula", FORMULAS)
def test_all_kinds_of_rewards_together(models: dict[str, Path], tmp_path: Path, formula: str, scale: str) -> None:
    """Steps in characters and in tokens, floats and None, sync and async, weighted."""
    functions, weights = [mixed, Length(), judge], [1.0, -0.5, 2.0]
    trainer = build(models, tmp_path, functions, reward_weights=weights, step_advantage=formula, scale_rewards=scale)
    output = trainer.rollout(rows(16))
    ids = [
        row[mask.bool()].tolist()
        for row, mask in zip(output["completion_ids"], output["completion_mask"], strict=True)
    ]
    texts = trainer.processing_class.batch_decode(ids, skip_special_tokens=True)
    batch = steps_by_hand(functions, weights, texts, ids)
    by_hand = expected(batch, formula, 4, scale, output["advantages"])
    assert torch.allclose(output["advantages"], by_hand, rtol=1e-5, atol=1e-6)
    assert len({len(steps) for _, steps in filter(None, batch)}) > 2 and "" in texts
    assert (output["advantages"].diff(dim=1) != 0).any()
    sums = [[getattr(r, "total", r) for r in f(completions=texts, completion_ids=ids)] for f in functions[:2]]
    logged = trainer._logs["rewards"]
    for name, column in zip(("mixed", "length"), sums, strict=True):
        assert list(logged[name]) == pytest.approx([float("nan") if v is None else v for v in column], nan_ok=True)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("loss_type", ["gspo_token", "dapo"])
def test_one_step_at_the_end_trains_as_a_float_does(
    models: dict[str, Path], tmp_path: Path, loss_type: str, formula: str, scale: str
) -> None:
    """Whole runs, bit for bit: two reward functions with weights, one that is silent now and then."""

    def silent(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        return [None if len(ids) % 3 == 0 else len(ids) / 7 for ids in completion_ids]

    def as_step(completion_ids: list[list[int]], **_: Any) -> list[Any]:
        values = silent(completion_ids)
        return [
            None if v is None else StepRewards.at_tokens([v], [len(ids)])
            for v, ids in zip(values, completion_ids, strict=True)
        ]

    as_step.__name__ = silent.__name__  # under which it is logged
    runs = []
    for function in (silent, as_step):
        options = {"loss_type": loss_type, "step_advantage": formula, "scale_rewards": scale, "max_steps": 5}
        trainer = tiny.trainer(
            models["dense"],
            tmp_path,
            build={"reward_funcs": [tiny.reward, function]},
            reward_weights=[0.3, 1.0],
            **options,
        )
        runs.append(tiny.train(trainer))
    whole, steps = runs
    without = [{k: v for k, v in row.items() if not k.startswith("steps/")} for row in tiny.history(steps)]
    assert without == tiny.history(whole)
    before, after = tiny.parameters(whole), tiny.parameters(steps)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert whole._last_rollout is None and steps._last_rollout["advantages"].dim() == 2


def test_what_trains_differs_between_the_formulas_and_from_the_sum(models: dict[str, Path], tmp_path: Path) -> None:
    def total(completions: list[str], **_: Any) -> list[float]:
        return [sum(values_of(text)) for text in completions]

    after = []
    for functions, formula in (([lines], "process"), ([lines], "return_to_go"), ([total], "process")):
        trainer = build(models, tmp_path, functions, step_advantage=formula, max_steps=2)
        after.append(torch.cat([p.flatten() for p in tiny.parameters(tiny.train(trainer)).values()]))
    assert not any(torch.equal(a, b) for a, b in ((after[0], after[1]), (after[0], after[2]), (after[1], after[2])))


@pytest.mark.parametrize("formula", FORMULAS)
def test_tokens_that_are_not_the_models_have_no_advantage(
    models: dict[str, Path], tmp_path: Path, formula: str
) -> None:
    """Two turns of an environment, and a completion that is masked out since it was cut off."""

    def with_environment(prompts: list[str], trainer: Any) -> dict[str, Any]:
        answers = [[50, 51, 52, 60 + i, 61, *([trainer.processing_class.eos_token_id] * (i != 2))] for i in range(4)]
        masks = [[1, 0, 0, *[1] * (len(a) - 3)] for a in answers]
        ids = [trainer.processing_class(p)["input_ids"] for p in prompts]
        return {"prompt_ids": ids, "completion_ids": answers, "logprobs": None, "env_mask": masks}

    def turns(completions: list[str], **_: Any) -> list[StepRewards]:
        return [StepRewards.per_turn([float(i), 1.0 - i % 2]) for i in range(len(completions))]

    trainer = build(
        models,
        tmp_path,
        [turns],
        build={"rollout_func": with_environment},
        step_advantage=formula,
        mask_truncated_completions=True,
    )
    output = trainer.rollout(rows(4))
    # the third counts in the others' means: it has two steps, whatever their tokens
    batch = [(6, [(1, float(i)), (6, 1.0 - i % 2)]) for i in range(4)]
    by_hand = expected(batch, formula, 4, "group", output["advantages"])
    own = output["tool_mask"].bool()
    assert own.tolist() == [[t not in (1, 2) and i != 2 for t in range(6)] for i in range(4)]
    assert torch.allclose(output["advantages"], by_hand.where(own, 0), rtol=1e-5)
    assert (by_hand[~own] != 0).any()


def test_an_evaluation_has_groups_of_its_own_size(models: dict[str, Path], tmp_path: Path) -> None:
    trainer = build(models, tmp_path, [lines], num_generations_eval=2, per_device_eval_batch_size=4)
    trainer.model.eval()
    output = trainer.rollout(rows(8))
    ids = [
        row[mask.bool()].tolist()
        for row, mask in zip(output["completion_ids"], output["completion_mask"], strict=True)
    ]
    texts = trainer.processing_class.batch_decode(ids, skip_special_tokens=True)
    batch = steps_by_hand([lines], [1.0], texts, ids)
    in_pairs, in_fours = (expected(batch, "return_to_go", n, "group", output["advantages"]) for n in (2, 4))
    assert torch.allclose(output["advantages"], in_pairs, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(in_pairs, in_fours)


def test_without_step_rewards_the_advantages_are_trls(models: dict[str, Path], tmp_path: Path) -> None:
    """Also in a rollout between two that have them; the table stays rectangular."""
    calls = []

    def sometimes(completions: list[str], **_: Any) -> list[Any]:
        calls.append(None)
        return lines(completions) if len(calls) != 2 else [sum(values_of(text)) for text in completions]

    trainer = build(models, tmp_path, [sometimes], log_completions=True)
    shapes = [trainer.rollout(rows(16))["advantages"].dim() for _ in range(3)]
    assert shapes == [2, 1, 2]
    logs = trainer._logs
    columns = [logs["prompt"], logs["advantages"], *logs["rewards"].values(), *logs["extra"].values()]
    assert {len(column) for column in columns} == {16}


def test_the_table_shows_what_was_trained_on(models: dict[str, Path], tmp_path: Path) -> None:
    trainer = build(models, tmp_path, [lines], log_completions=True, max_steps=1, step_advantage="process")
    outputs = []
    rollout = trainer.rollout
    vars(trainer)["rollout"] = lambda inputs: outputs.append(rollout(inputs)) or outputs[-1]
    trainer.train()
    (file,) = (tmp_path / "completions").glob("*.parquet")
    table = pandas.read_parquet(file)
    (output,) = outputs
    assert len(table) == 16
    for i, row in table.iterrows():
        mask = output["completion_mask"][i].bool()
        advantages = output["advantages"][i][mask]
        assert row["lines"] == pytest.approx(sum(values_of(row["completion"])))
        assert list(row["step_rewards"]) == pytest.approx(values_of(row["completion"]))
        assert row["advantage"] == pytest.approx(advantages.mean().item(), abs=1e-6)
        by_step = [advantages[end - 1].item() for end in row["step_ends"]]
        assert list(row["step_advantages"]) == pytest.approx(by_step, abs=1e-6)
        shown = trainer.last_step_advantages[i]
        assert "".join(text for text, _ in shown) == row["completion"]
        assert [value for _, value in shown] == advantages.tolist()
    counts = [len(ends_of(text)) for text in table["completion"]]
    (logged,) = [row["steps/mean_count"] for row in tiny.history(trainer) if "steps/mean_count" in row]
    assert logged == pytest.approx(sum(counts) / len(counts)) and len(set(counts)) > 2


def test_a_table_that_begins_with_other_rollouts_is_filled_up(models: dict[str, Path], tmp_path: Path) -> None:
    """Evaluations add batch after batch to one table."""
    calls = []

    def later(completions: list[str], **_: Any) -> list[Any]:
        calls.append(None)
        return lines(completions) if len(calls) > 2 else [1.0] * len(completions)

    trainer = build(models, tmp_path, [later], per_device_eval_batch_size=4)
    trainer.model.eval()
    for _ in range(3):
        trainer.rollout(rows(4))
    assert len(trainer._logs["prompt"]) == 12
    assert [value is None for value in trainer._logs["extra"]["step_rewards"]] == [True] * 8 + [False] * 4


SEQUENCE_LEVEL = [
    {"loss_type": "gspo"},
    *(
        {"loss_type": loss, "importance_sampling_level": "sequence"}
        for loss in ("grpo", "bnpo", "dapo", "luspo", "sapo")
    ),
]


@pytest.mark.parametrize("options", SEQUENCE_LEVEL)
def test_a_sequences_ratio_refuses_steps(models: dict[str, Path], tmp_path: Path, options: dict[str, Any]) -> None:
    trainer = build(models, tmp_path, [lines], **options)
    with pytest.raises(ValueError, match=r"function 'lines' returned StepRewards, .* Set loss_type='gspo_token'"):
        trainer.train()


@pytest.mark.parametrize(
    "options",
    [
        *({"loss_type": loss} for loss in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "gspo_token")),
        {"loss_type": "cispo", "importance_sampling_level": "sequence", "epsilon_high": 5.0},
    ],
)
def test_a_loss_that_takes_steps_gives_each_token_its_own(
    models: dict[str, Path], tmp_path: Path, options: dict[str, Any]
) -> None:
    """On-policy, the gradient at a token's log-prob is its advantage times a weight that does not depend on it."""
    trainer = build(models, tmp_path, [lines], **options)
    output = trainer.rollout(rows(8))
    vars(trainer)["current_gradient_accumulation_steps"] = 1
    score, found = trainer._get_per_token_logps_and_entropies, []

    def keep(*args: Any, **kwargs: Any) -> Any:
        logps, *others = score(*args, **kwargs)
        logps.retain_grad()
        found.append(logps)
        return logps, *others

    vars(trainer)["_get_per_token_logps_and_entropies"] = keep
    inputs = {**output, "old_per_token_logps": None}
    trainer.compute_loss(trainer.model, inputs).backward()
    (logps,) = found
    assert logps.grad is not None
    mask = output["completion_mask"].bool() & (output["advantages"] != 0)
    weights = torch.full_like(logps, torch.nan)
    weights[mask] = -logps.grad[mask] / output["advantages"][mask]
    assert (weights[mask] > 0).all()
    assert (logps.grad[output["advantages"] == 0] == 0).all()
    for row in weights:
        known = row[~row.isnan()]
        assert torch.allclose(known, known.mean(), rtol=1e-3) if len(known) else True


def test_normalising_each_reward_by_itself_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    trainer = build(models, tmp_path, [lines], multi_objective_aggregation="normalize_then_sum")
    with pytest.raises(
        ValueError, match=r"'lines' returned StepRewards.*multi_objective_aggregation='sum_then_normalize'"
    ):
        trainer.train()


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (lambda text: StepRewards([1.0], [len(text) + 1]), r"completion 0 has 13 characters\. Ends lie within"),
        (lambda text: StepRewards.at_tokens([1.0], [15]), r"completion 0 has 14 tokens\."),
        (lambda text: StepRewards([1.0], [1]), r"completion 4 is empty"),
        (lambda text: StepRewards.per_turn([1.0, 1.0]), r"has 2 values, and completion 0 has 1 assistant turns\."),
    ],
)
def test_steps_that_are_not_there_are_refused_by_name(
    models: dict[str, Path], tmp_path: Path, steps: Any, message: str
) -> None:
    def strict(completions: list[str], **_: Any) -> list[StepRewards]:
        return [steps(text) for text in completions]

    trainer = build(models, tmp_path, [strict], max_completion_length=100)
    with pytest.raises(ValueError, match=f"reward function 'strict': .*{message}"):
        trainer.train()


def test_a_step_behind_the_cut_is_refused_with_the_cut(models: dict[str, Path], tmp_path: Path) -> None:
    def hopeful(completion_ids: list[list[int]], **_: Any) -> list[StepRewards]:
        return [StepRewards.at_tokens([1.0], [9]) for _ in completion_ids]

    trainer = tiny.trainer(
        models["dense"], tmp_path, loss_type="gspo_token", build={"reward_funcs": hopeful}, max_completion_length=3
    )
    with pytest.raises(ValueError, match=r"has 3 tokens \(it has reached max_completion_length=3\)"):
        trainer.train()


@pytest.mark.parametrize("formula", FORMULAS)
def test_a_group_without_steps_is_said_and_changes_nothing(
    models: dict[str, Path], tmp_path: Path, formula: str
) -> None:
    def first_group_only(completions: list[str], **_: Any) -> list[StepRewards]:
        return [
            StepRewards([float(i)], [1]) if i < 4 and t else StepRewards([], []) for i, t in enumerate(completions)
        ]

    trainer = build(models, tmp_path, [first_group_only], step_advantage=formula)
    with pytest.warns(UserWarning, match="no completion of a group of 4 has a step"):
        advantages = trainer.rollout(rows(8))["advantages"]
    assert (advantages[4:] == 0).all() and (advantages[:4] != 0).any()


def test_a_run_with_steps_resumes_inside_a_rollout(models: dict[str, Path], tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6, "num_iterations": 2}
    whole = tiny.train(build(models, tmp_path, [lines, tiny.reward], **options))
    resumed = build(models, tmp_path, [lines, tiny.reward], **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    before, after = tiny.parameters(whole), tiny.parameters(resumed)
    assert all(torch.equal(after[name], before[name]) for name in before)
