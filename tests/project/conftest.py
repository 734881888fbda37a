"""Small models in place of those of the recipes."""

from pathlib import Path
from typing import Any

import datasets
import pytest
import transformers

import trl_steady
from tests.project import recipe
from tests.tools import tiny


@pytest.fixture
def smollm2(recipes: Any, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The recipes, with a tiny model in place of SmolLM2."""

    def load(folder: Path, quantised: bool) -> tuple[Any, Any]:
        return transformers.AutoModelForCausalLM.from_pretrained(folder), tiny.tokenizer()

    def right_lines(problem: Any, text: str) -> list[bool]:
        return [len(line) % 2 == 0 for line in recipes.sums.lines(text).texts]

    # a random model is never right, and without a difference in reward there is nothing to learn
    monkeypatch.setattr(recipes.task, "is_right", lambda problem, text: len(text) % 2 == 0)
    monkeypatch.setattr(recipes.sums, "outcome_reward", lambda problem, text: float(len(text) % 2 == 0))
    monkeypatch.setattr(recipes.sums, "lines", trl_steady.rewards.by_regex("[a-z]"))
    monkeypatch.setattr(recipes.sums, "right_lines", right_lines)
    monkeypatch.setattr(recipes.smollm2, "load", lambda _, quantised: load(models["dense"], quantised))
    monkeypatch.setattr(recipes.smollm2, "reload", load)
    return recipes


@pytest.fixture
def digits(recipes: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The recipes, whose task of digits has two layers of four experts after two steps of a warm start."""
    monkeypatch.setattr(recipes.digits, "WORKED_STEPS", 2)
    monkeypatch.setattr(recipes.digits, "WORKED_BATCH", 8)
    few = {"hidden_size": 16, "num_hidden_layers": 2, "head_dim": 4}
    monkeypatch.setattr(recipes.digits, "SIZE", recipes.digits.SIZE | few)
    experts = {"num_experts": 4, "moe_intermediate_size": 8}
    monkeypatch.setattr(recipes.digits, "EXPERTS", recipes.digits.EXPERTS | experts)
    # so small a model is never right, and without a difference in reward there is nothing to learn
    monkeypatch.setattr(recipes.digits.Digits, "is_right", lambda _, problem, text: sum(map(ord, text)) % 2 == 0)
    return recipes


@pytest.fixture
def gsm8k(recipes: Any, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model with a chat template, for recipes of GSM8K, of which there are eight problems."""
    monkeypatch.setattr(recipes.gsm8k, "load_dataset", lambda *_, split: datasets.Dataset.from_list(recipe.GSM8K))
    monkeypatch.setattr(recipes.gsm8k, "accuracy_reward", recipe.by_length)
    return recipe.chatty(models["dense"], tmp_path / "chatty")
