"""What users get wrong in models, data and functions: each message comes before the first step and names a way out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForSequenceClassification

from tests.tools import tiny
from trl_steady import StepRewards

INF, NAN = float("inf"), float("nan")


def rewarding(reward: Callable[[], object]) -> dict[str, Any]:
    def careless(completions: list[str], **_: Any) -> list[Any]:
        return [reward() for _ in completions]

    return {"loss_type": "gspo_token", "build": {"reward_funcs": careless}}


def rolling(**change: Any) -> dict[str, Any]:
    def roll(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = {"prompt_ids": [[50, 51]] * len(prompts), "completion_ids": [[60, 61, 62]] * len(prompts)}
        return {**ids, "logprobs": None, **change}

    return {"build": {"rollout_func": roll}}


def scoring(score: float) -> dict[str, Any]:
    """A reward model that scores all completions so."""
    model = Qwen2ForSequenceClassification(Qwen2Config(**{**tiny.SIZES, "num_labels": 1, "name_or_path": "rm"}))
    model.score.register_forward_hook(lambda module, inputs, logits: torch.full_like(logits, score))
    return {"build": {"reward_funcs": [model], "reward_processing_classes": [tiny.tokenizer()]}}


ERRORS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "minus inf": (lambda: rewarding(lambda: -INF), r"'careless' is -inf .*completion 0 .*Return a finite"),
    "beyond float32": (lambda: rewarding(lambda: 1e39), r"is inf \(in float32\)"),
    "a model's inf": (lambda: scoring(INF), r"'rm' is inf"),
    "an infinite sum": (lambda: rewarding(lambda: StepRewards.at_tokens([3e38] * 2, [1, 2])), "is inf"),
    "steps, normalised": (
        lambda: {
            **rewarding(lambda: StepRewards([1], [1])),
            "multi_objective_aggregation": "normalize_then_sum",
        },
        r"StepRewards, .*Set .*='sum_then_norm",
    ),
    "an end too far": (lambda: rewarding(lambda: StepRewards([1], [999])), r"999, .* of reward function 'careless'"),
    "three log-probs": (lambda: rolling(logprobs=[[-1.0] * 3] * 3), "logprobs of lengths .*one value for each token"),
    "short masks": (lambda: rolling(env_mask=[[1]] * 16), "env_mask of lengths .*one value for each token"),
    "no log-probs": (
        lambda: {**rolling(), "token_veto_threshold": 1e-4},
        r"=0\.0001 needs the sampler's log-probs.*Return 'logprobs'",
    ),
    "two answers": (
        lambda: rolling(prompt_ids=[[50]] * 32, completion_ids=[[60]] * 32),
        r"rollout_func returned completion_ids of lengths .* for 16 prompts.*one completion",
    ),
    "no answer": (
        lambda: rolling(completion_ids=[[], *[[60, 61, 62]] * 15]),
        r"rollout_func returned completion_ids of lengths \[0, 3.*one token or more",
    ),
    "a taken name": (
        lambda: {"build": {"train_dataset": tiny.dataset().add_column("completions", ["?"] * 16)}},
        "gives a column 'completions', but .*Rename the column",
    ),
    "two rows": (lambda: {"build": {"train_dataset": tiny.dataset(2)}}, r"has 2 rows, .* needs 4 prompts .*set a sm"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_a_mistake_is_named_before_the_first_step(models: dict[str, Path], tmp_path: Path, name: str) -> None:
    options, message = ERRORS[name]
    trainer = tiny.trainer(models["dense"], tmp_path, max_steps=1, **options())
    with pytest.raises(ValueError, match=message):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_frozen_model_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(models["dense"]).requires_grad_(False)
    with pytest.raises(ValueError, match=r"no trainable parameter.*Set requires_grad=True"):
        tiny.trainer(model, tmp_path, build={"processing_class": tiny.tokenizer()})


def test_what_teaches_nothing_is_warned_of(models: dict[str, Path], tmp_path: Path) -> None:
    trainer = tiny.trainer(models["dense"], tmp_path, max_steps=1, **scoring(NAN))
    with pytest.warns(UserWarning, match="'rm' is nan, .*Check the weights"):
        trainer.train()


def wants_answer(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [1.0] * len(completions)


async def wants_answer_later(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [1.0] * len(completions)


def adds_text(completions: list[str], **_: Any) -> list[float]:
    return [1.0 + completion for completion in completions]  # type: ignore[operator]


@pytest.mark.parametrize("function", [wants_answer, wants_answer_later, adds_text])
def test_a_function_that_wants_a_missing_column_is_told_what_there_is(
    models: dict[str, Path], tmp_path: Path, function: Callable[..., Any]
) -> None:
    """An error in the function's own code gets no such note."""
    with pytest.raises(TypeError, match="answer" if function is not adds_text else "unsupported operand") as caught:
        tiny.trainer(models["dense"], tmp_path, build={"reward_funcs": function}).train()
    notes = getattr(caught.value, "__notes__", [])
    told = [
        note for note in notes if "passes to a reward function by name: prompts, completions, completion_i" in note
    ]
    assert len(told) == (function is not adds_text)
