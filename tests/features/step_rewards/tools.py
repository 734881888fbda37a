"""Known texts in groups, and reward functions that reward their lines."""

from pathlib import Path
from typing import Any

from tests.tools import tiny
from trl_steady import StepRewards

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


def rows(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{i // 4}+1="} for i in range(count)]


def build(models: dict[str, Path], tmp_path: Path, functions: Any, **options: Any) -> Any:
    build = {"reward_funcs": functions, "rollout_func": rollout, **options.pop("build", {})}
    return tiny.trainer(models["dense"], tmp_path, **{"loss_type": "gspo_token", **options, "build": build})
