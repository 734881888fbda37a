"""Evaluation in recipes: means and intervals, generation in batches, and the files."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.project import recipe
from tests.tools import tiny


def test_scores_are_means_with_intervals_over_problems(recipes: Any) -> None:
    found = recipes.evaluate.scores([["a", "b"]] * 50 + [["a", "a"]] * 50, ["a"] * 100)
    assert [point["k"] for point in found["pass@k"]] == [1, 2]
    assert [point["mean"] for point in found["pass@k"]] == [0.75, 1.0]
    one, two = found["maj@k"]
    assert one["mean"] == two["mean"] == 0.75  # with two votes, a tie is as good as one vote
    # a problem gives 1/2 or 1 with equal odds: standard error 1/4 / sqrt(100)
    assert two["low"] == pytest.approx(0.75 - 1.96 * 0.025, abs=5e-3)
    assert two["high"] == pytest.approx(0.75 + 1.96 * 0.025, abs=5e-3)


def test_batches_and_the_models_settings_change_no_answer(recipes: Any, models: dict[str, Path]) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(models["dense"]).train()
    prompts = ["ab", "abcdefgh", "12+3=", "a"]
    alone = [recipes.evaluate.completions(model, tiny.tokenizer(), [text], max_new_tokens=12)[0] for text in prompts]
    assert len({text for (text,) in alone}) == len(prompts)
    settings = {"repetition_penalty": 1.9, "do_sample": True, "top_k": 3, "temperature": 0.5, "min_p": 1.0}
    settings |= {"num_beams": 2, "no_repeat_ngram_size": 1, "min_new_tokens": 12}
    model.generation_config.update(**settings)
    for batch in (1, 3, 4):
        together = recipes.evaluate.completions(model, tiny.tokenizer(), prompts, max_new_tokens=12, batch=batch)
        assert together == alone
    (sampled,) = recipes.evaluate.completions(model, tiny.tokenizer(), prompts[:1], samples=8, max_new_tokens=12)
    assert len({*sampled}) > 1  # min_p would leave one
    assert model.training and model.generation_config.to_dict().items() >= settings.items()


def test_gsm8k_is_evaluated_into_a_table_a_picture_and_json(
    recipes: Any, gsm8k: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[list[Any]] = []

    def completions(model: Any, tokenizer: Any, prompts: list[Any], *, samples: int, **_: Any) -> list[list[str]]:
        asked.append(real(model, tokenizer, prompts, samples=samples, **_))  # of a random model: no numbers
        return [[f"\\boxed{{{1000 + i}}}", f"It is {1000 + i}."][:samples] for i in range(len(prompts))]

    real = recipes.evaluate.completions
    monkeypatch.setattr(recipes.evaluate, "completions", completions)
    few = {"questions": 6, "samples": 2, "max_completion_length": 4, "batch": 5, "dtype": "float32"}
    arguments = recipes.gsm8k.Arguments(str(gsm8k), output_dir=str(tmp_path / "out"), **few)
    found = recipes.gsm8k.main(arguments)
    assert [len(own) for own in asked[0]] == [2] * 6
    means = {name: [point["mean"] for point in own["pass@k"]] for name, own in found.items()}
    assert means == {"strict": [0.5, 1.0], "lenient": [1.0, 1.0]}
    written = json.loads((tmp_path / "out/evaluation.json").read_text())
    assert written["scores"] == found and written["questions"] == 6 and written["model_name"] == str(gsm8k)
    assert recipe.is_picture(tmp_path / "out/evaluation.png")
    printed = capsys.readouterr()
    assert "| strict | 1 | 50.0% | 50.0% to 50.0% | 50.0% | 50.0% to 50.0% |" in printed.out
    assert "3/3" in printed.err  # the progress: 12 answers, 5 at a time
