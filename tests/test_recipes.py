"""Recipes: every YAML parses, the task is what it says, and the whole script runs on a tiny model."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from trl import TrlParser

import trl_steady
from tests import tiny

ROOT = Path(__file__).parents[1]
YAMLS = sorted(ROOT.glob("recipes/**/*.yaml"))


@pytest.fixture
def gspo(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of recipes/gspo, as its script sees them."""
    pytest.importorskip("matplotlib", reason="needs the recipes extra")
    monkeypatch.syspath_prepend(str(ROOT / "recipes/gspo"))
    names = ("task", "smollm2", "report", "train")
    modules = {name: importlib.import_module(name) for name in names}
    yield type("Recipe", (), modules)
    for name in names:
        sys.modules.pop(name)


def parse(gspo: Any, path: Path, *command: str) -> tuple[Any, trl_steady.GRPOConfig]:
    parser = TrlParser((gspo.train.RecipeArguments, trl_steady.GRPOConfig))
    return parser.parse_args_and_config(["--config", str(path), "--use_cpu", "true", *command])


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.stem)
def test_a_recipe_parses_and_says_where_it_comes_from(gspo: Any, path: Path, recwarn: pytest.WarningsRecorder) -> None:
    _, args = parse(gspo, path)
    assert (args.epsilon, args.epsilon_high) == (3e-4, 4e-4)
    assert not args.is_on_policy
    assert [str(w.message) for w in recwarn if w.category is UserWarning] == []
    header = path.read_text().split("\n\n")[0]
    assert all(word in header for word in ("Paper:", "Hardware:", "Expect:"))


def test_training_and_held_out_problems_are_disjoint_also_turned_round(gspo: Any) -> None:
    train, test = gspo.task.split(200)
    assert len(test) == len(set(test)) == 200 and len(train) == len(set(train)) == 2 * (90 * 89 // 2 - 3 - 200)
    both_ways = {pair for problem in test for pair in (problem, problem[::-1])}
    assert not both_ways & set(train) and not both_ways & set(gspo.task.EXAMPLES)
    assert gspo.task.split(200) == (train, test)
    assert 60 < sum(a > b for a, b in test) < 140  # either place holds the answer


@pytest.mark.parametrize(
    ("completion", "right"),
    [
        (" 45\n", True),
        ("45", True),
        (" 45\nmax(1, 2)", True),
        (" 45 ", True),
        (" 4\n5", False),
        (" 455\n", False),
        ("", False),
    ],
)
def test_an_answer_is_the_first_line(gspo: Any, completion: str, right: bool) -> None:
    assert gspo.task.is_right((12, 45), completion) is right


def test_the_interval_is_that_of_paired_problems(gspo: Any) -> None:
    before = np.tile([[1.0, 0.0]], (100, 1))
    after = np.concatenate([np.ones((50, 2)), np.tile([[1.0, 0.0]], (50, 1))])
    found = gspo.report.difference(before, after)
    # each problem gains 1/2 or 0 with equal odds: mean 1/4, standard error 1/4 / sqrt(100)
    assert found.before == 0.5 and found.after == 0.75 and found.difference == 0.25
    assert found.low == pytest.approx(0.25 - 1.96 * 0.025, abs=5e-3)
    assert found.high == pytest.approx(0.25 + 1.96 * 0.025, abs=5e-3)


def test_the_script_runs_from_end_to_end_on_a_tiny_model(
    gspo: Any,
    models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(models["dense"])
    # a random model is never right, and without a difference in reward there is nothing to learn
    monkeypatch.setattr(gspo.task, "is_right", lambda problem, text: len(text) % 2 == 0)
    monkeypatch.setattr(gspo.smollm2, "load", lambda folder, quantised: (model, tiny.tokenizer()))
    recipe, args = parse(
        gspo,
        YAMLS[0],
        *("--output_dir", str(tmp_path), "--max_steps", "8", "--per_device_train_batch_size", "8"),
        *("--held_out", "10", "--samples", "2"),
    )
    results = gspo.train.main(recipe, args)
    printed = capsys.readouterr().out
    assert printed.count("step ") >= 8 and "accuracy on held-out problems" in printed
    assert json.loads((tmp_path / "results.json").read_text())["seed"] == 0
    assert list(results["held-out greedy accuracy by step"]) == [0, 4, 8]
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
    plain = transformers.AutoModelForCausalLM.from_pretrained(models["dense"])
    adapter = peft.PeftModel.from_pretrained(plain, str(tmp_path / "adapter"))
    assert any(value.abs().max() > 0 for name, value in adapter.named_parameters() if "lora_B" in name)


@pytest.mark.slow
def test_smollm2_loads_quantised_and_trains_through_every_layer(gspo: Any, tmp_path: Path) -> None:
    model, tokenizer = gspo.smollm2.load(tmp_path)
    assert sum(p.dtype == torch.uint8 for p in model.parameters()) == 7 * 30
    embeddings = torch.randn(1, 4, model.config.hidden_size).requires_grad_()
    model.train()(inputs_embeds=embeddings).logits.sum().backward()
    assert embeddings.grad is not None and embeddings.grad.abs().max() > 0
    assert tokenizer.decode(tokenizer("max(10, 20) =")["input_ids"]) == "max(10, 20) ="
