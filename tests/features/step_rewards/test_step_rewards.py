"""Reward functions that reward steps: the advantages that reach the loss, what is refused."""

import asyncio
import functools
import inspect
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.features.step_rewards.tools import build, ends_of, lines, rows, values_of
from tests.oracles import advantages as oracles
from tests.tools import tiny
from trl_steady import StepRewards
from trl_steady.features.step_rewards.feature import StepRewardsFeature


def expected(batch: list[Any], formula: str, group_size: int, scale: str, like: Tensor) -> Tensor:
    result = torch.zeros_like(like)
    for i, values in enumerate(getattr(oracles, formula)(batch, group_size, scale)):
        result[i, : len(values)] = torch.tensor(values)
    return result


@pytest.mark.parametrize(("formula", "scale"), [("process", "group"), ("return_to_go", "batch"), ("process", "none")])
def test_all_kinds_of_rewards_together(models: dict[str, Path], tmp_path: Path, formula: str, scale: str) -> None:
    """Steps in characters and in tokens, floats and None and an array, sync and async, weighted."""

    def steps_by_hand(functions: list[Any], weights: list[float], texts: list[str], ids: list[list[int]]) -> list[Any]:
        """(tokens, [(end, reward), ...]) of each completion, rewards that end at the same token added up."""
        batch: list[Any] = []
        returned = []
        for function in functions:
            result = function(completions=texts, completion_ids=ids)
            returned.append(asyncio.run(result) if inspect.isawaitable(result) else result)
        for i, tokens in enumerate(ids):
            ends: dict[int, float] = {}
            for weight, result in zip(weights, returned, strict=True):
                reward = result[i]
                if reward is None:
                    continue
                steps = [(len(tokens), reward)]
                if isinstance(reward, StepRewards):
                    # that end takes in the end-of-sequence token
                    whole = len(texts[i]) if reward.unit == "characters" else -1
                    pairs = zip(reward.ends, reward.values, strict=True)
                    steps = [(len(tokens) if end == whole else end, value) for end, value in pairs]
                for end, value in steps:
                    ends[end] = ends.get(end, 0.0) + weight * value
            unscored = all(result[i] is None for result in returned)
            batch.append(None if unscored else (len(tokens), sorted(ends.items())))
        return batch

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

    def array(completions: list[str], **_: Any) -> np.ndarray:
        return np.array([len(text) / 3 for text in completions])

    functions, weights = [mixed, Length(), functools.partial(judge), array], [1.0, -0.5, 2.0, 0.25]
    if formula == "return_to_go":  # without a number for each answer, some have tokens after their last step
        functions, weights = functions[:-1], weights[:-1]
    trainer = build(models, tmp_path, functions, reward_weights=weights, step_advantage=formula, scale_rewards=scale)
    output = trainer._generate_and_score_completions(rows(16))
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


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(
    ("loss_type", "formula", "scale"), [("gspo_token", "return_to_go", "group"), ("dapo", "process", "batch")]
)
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
    assert not whole.feature(StepRewardsFeature).rollout_with_steps
    assert steps.feature(StepRewardsFeature).rollout_with_steps[2].dim() == 2


@pytest.mark.parametrize("formula", ["process", "return_to_go"])
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
    output = trainer._generate_and_score_completions(rows(4))
    # the third counts in the others' means: it has two steps, whatever their tokens
    batch = [(6, [(1, float(i)), (6, 1.0 - i % 2)]) for i in range(4)]
    by_hand = expected(batch, formula, 4, "group", output["advantages"])
    is_own = output["tool_mask"].bool()
    assert is_own.tolist() == [[t not in (1, 2) and i != 2 for t in range(6)] for i in range(4)]
    assert torch.allclose(output["advantages"], by_hand.where(is_own, 0), rtol=1e-5)
    shown = [[value for _, value in completion] for completion in trainer.last_step_advantages]
    assert shown == [row[mask].tolist() for row, mask in zip(output["advantages"], is_own, strict=True)]
    assert (by_hand[~is_own] != 0).any()


def test_an_evaluation_has_groups_of_its_own_size(models: dict[str, Path], tmp_path: Path) -> None:
    trainer = build(models, tmp_path, [lines], num_generations_eval=2, per_device_eval_batch_size=4)
    trainer.model.eval()
    output = trainer._generate_and_score_completions(rows(8))
    ids = [
        row[mask.bool()].tolist()
        for row, mask in zip(output["completion_ids"], output["completion_mask"], strict=True)
    ]
    texts = trainer.processing_class.batch_decode(ids, skip_special_tokens=True)
    batch = []
    for text, tokens in zip(texts, ids, strict=True):
        ends = [len(tokens) if end == len(text) else end for end in ends_of(text)]  # with the end-of-sequence token
        batch.append((len(tokens), [*zip(ends, values_of(text), strict=True)]))
    in_pairs, in_fours = (expected(batch, "return_to_go", n, "group", output["advantages"]) for n in (2, 4))
    assert torch.allclose(output["advantages"], in_pairs, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(in_pairs, in_fours)


@pytest.mark.parametrize("by_callback", [False, True])
def test_a_sequences_ratio_refuses_steps(models: dict[str, Path], tmp_path: Path, by_callback: bool) -> None:
    level = {"importance_sampling_level": "sequence"}
    trainer = build(models, tmp_path, [lines], loss_type="dapo", **({} if by_callback else level))
    if by_callback:
        vars(trainer).update(level)
    with pytest.raises(ValueError, match=r"'lines' returned StepRewards, .* Set loss_type='gspo_token'"):
        trainer.train()


@pytest.mark.parametrize(
    "options",
    [
        *({"loss_type": loss} for loss in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "gspo_token")),
        {"loss_type": "cispo", "importance_sampling_level": "sequence", "epsilon_high": 5.0},
        {"loss_type": "luspo", "importance_sampling_level": "token"},
    ],
)
def test_a_loss_that_takes_steps_gives_each_token_its_own(
    models: dict[str, Path], tmp_path: Path, options: dict[str, Any]
) -> None:
    """On-policy, the gradient at a token's log-prob is its advantage times a weight that does not depend on it."""
    trainer = build(models, tmp_path, [lines], **options)
    output = trainer._generate_and_score_completions(rows(8))
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


@pytest.mark.parametrize(("formula", "count"), [("process", 1), ("return_to_go", 0)])
def test_a_formula_without_step_rewards_says_so(
    models: dict[str, Path], tmp_path: Path, formula: str, count: int
) -> None:
    trainer = build(models, tmp_path, [tiny.reward], step_advantage=formula)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer._generate_and_score_completions(rows(4))
    assert sum(f"step_advantage={formula!r} has no effect" in str(w.message) for w in caught) == count


def test_a_rollout_that_failed_leaves_nothing_behind(models: dict[str, Path], tmp_path: Path) -> None:
    calls: list[None] = []

    def first_in_steps(completions: list[str], **_: Any) -> list[Any]:
        calls.append(None)
        return lines(completions) if len(calls) == 1 else [1.0] * len(completions)

    def fails_at_first(completions: list[str], **_: Any) -> list[float]:
        if len(calls) == 1:
            raise ConnectionError
        return [1.0] * len(completions)

    trainer = build(models, tmp_path, [first_in_steps, fails_at_first])
    with pytest.raises(ConnectionError):
        trainer._generate_and_score_completions(rows(4))
    assert trainer._generate_and_score_completions(rows(4))["advantages"].dim() == 1


def test_rewards_may_be_calculated_without_a_rollout(models: dict[str, Path], tmp_path: Path) -> None:
    trainer = build(models, tmp_path, [lines])
    texts = ["a\nb", "c"]
    ids = [trainer.processing_class(text)["input_ids"] for text in texts]
    rewards = trainer._calculate_rewards(rows(2), ["p", "q"], texts, ids)
    assert rewards.tolist() == [[sum(values_of(text))] for text in texts]
