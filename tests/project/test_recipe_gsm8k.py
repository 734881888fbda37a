"""GSM8K in recipes: its questions, and what the strict and the lenient score read."""

import random
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet
import pytest

from tests.project import recipe


@pytest.mark.parametrize("form", ["boxed", "hashes"])
@pytest.mark.parametrize(
    ("text", "truth", "strict", "lenient"),
    [
        ("18", 18, 1, 1),
        ("18.", 18, 1, 1),
        ("18.00", 18, 1, 1),
        ("180", 18, 0, 0),
        ("x = 18", 18, 1, 1),
        ("The answer is 18.", 18, 1, 1),
        ("$18", 18, 1, 1),
        ("\\$18", 18, 1, 1),
        ("\\text{\\$18}", 18, 1, 1),
        ("€ 18", 18, 1, 1),
        ("Rs.18", 18, 1, 1),
        ("18 dollars", 18, 1, 1),
        ("18\\text{ km}", 18, 1, 1),
        ("18 cm^2", 18, 0, 0),
        ("18%", 18, 1, 1),
        ("18\\%", 18, 1, 1),
        ("1,800", 1800, 1, 1),
        ("1{,}800", 1800, 1, 1),
        ("1,\\!234,567", 1234567, 1, 1),
        ("$1,800.00", 1800, 1, 1),
        ("1800", 1800, 1, 1),
        ("1 800", 1800, 0, 0),
        ("1.800", 1800, 0, 0),
        ("-18", -18, 1, 1),
        ("\u221218", -18, 1, 1),
        ("-$18", -18, 1, 1),
        ("$-18", -18, 1, 1),
        ("2.5", Fraction(5, 2), 1, 1),
        (".5", Fraction(1, 2), 1, 1),
        ("5/2", Fraction(5, 2), 1, 1),
        ("\\frac{5}{2}", Fraction(5, 2), 1, 1),
        ("-\\dfrac{5}{2}", Fraction(-5, 2), 1, 1),
        ("36/2", 18, 1, 1),
        ("18/0", 18, 0, 0),
        ("- 5", -5, 1, 1),
        ("\u20135", -5, 1, 1),
        ("\u2013 5", -5, 1, 1),
        ("\u2014 5", -5, 1, 1),
        ("-{5}", -5, 1, 1),
        ("{-}5", -5, 1, 1),
        ("-\\,5", -5, 1, 1),
        ("-\\ 5", -5, 1, 1),
        ("- \\$5", -5, 1, 1),
        ("x = - 5", -5, 1, 1),
        ("20 - 5", 5, 0, 1),
        ("20 \u2013 5", 5, 0, 1),
        ("3\u20135", 5, 0, 1),
        ("Total - 5", 5, 1, 1),
        ("\\frac{-3}{4}", Fraction(-3, 4), 1, 1),
        ("\\frac{- 3}{4}", Fraction(-3, 4), 1, 1),
        ("\\frac{3}{-4}", Fraction(-3, 4), 1, 1),
        ("-\\frac{-3}{4}", Fraction(3, 4), 1, 1),
        ("\\frac34", Fraction(3, 4), 1, 1),
        ("3/-4", Fraction(-3, 4), 1, 1),
        ("2 1/2", Fraction(5, 2), 1, 1),
        ("2\\frac{1}{2}", Fraction(5, 2), 1, 1),
        ("2 \\frac12", Fraction(5, 2), 1, 1),
        ("-2\\frac{1}{2}", Fraction(-5, 2), 1, 1),
        ("$-2 1/2", Fraction(-5, 2), 1, 1),
        ("2\u00bd", Fraction(5, 2), 1, 1),
        ("\u00be", Fraction(3, 4), 1, 1),
        ("2\\frac{3}{2}", Fraction(7, 2), 0, 0),
        ("18, 19", 19, 0, 1),
        ("18 or 19", 18, 0, 0),
        ("12 + 6", 18, 0, 0),
        ("20-2", 2, 0, 1),
        ("10^3", 1000, 0, 0),
        ("1e3", 1000, 0, 0),
        ("5 million", 5000000, 0, 0),
        ("eighteen", 18, 0, 0),
        ("", 18, 0, 0),
        pytest.param("9" * 5000, 18, 0, 0, id="more digits than Python converts"),
    ],
)
def test_the_scores_of_a_format(
    recipes: Any, text: str, truth: Fraction | int, strict: int, lenient: int, form: str
) -> None:
    pattern, whole = {
        "boxed": (recipes.gsm8k.BOXED, f"3 + 4 is seven. \\boxed{{{text}}} it is."),
        "hashes": (recipes.gsm8k.HASHES, f"3 + 4 is seven.\n#### {text}\nThis it is."),
    }[form]
    assert (recipes.gsm8k.strict(whole, pattern) == truth) == strict
    assert (recipes.gsm8k.lenient(whole) == truth) == lenient


@pytest.mark.parametrize(
    ("text", "truth", "strict", "lenient"),
    [
        ("So it is $\\boxed {18}$.", 18, 1, 1),
        ("\\boxed{17}. No: \\boxed{18}", 18, 1, 1),
        ("\\boxed{18}. I checked it 2 times.", 18, 1, 0),
        ("\\boxed{18", 18, 0, 1),
        ("#### 18", 18, 0, 1),
        ("The answer is 18.", 18, 0, 1),
        ("18 apples and 2 pears", 18, 0, 0),
        ("So the change is - 18", -18, 0, 1),
        ("They are:\n- 17 pears\n- 18 apples", 18, 0, 1),
        ("It took 3 1/2 hours", Fraction(7, 2), 0, 1),
        ("Eighteen.", 18, 0, 0),
        ("", 18, 0, 0),
    ],
)
def test_the_scores_of_a_text(recipes: Any, text: str, truth: Fraction | int, strict: int, lenient: int) -> None:
    """The prompt asks for a box."""
    assert (recipes.gsm8k.strict(text) == truth) == strict
    assert (recipes.gsm8k.lenient(text) == truth) == lenient


def test_questions_come_from_the_folder_that_is_named(
    recipes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "data").mkdir()
    for split, rows in {"train": recipe.GSM8K[:5], "test": recipe.GSM8K[5:]}.items():
        datasets.Dataset.from_list(rows).to_parquet(folder / f"{split}.parquet")
    monkeypatch.setenv("TRL_STEADY_GSM8K", str(folder))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    assert list(recipes.gsm8k.questions("train")) == [recipes.gsm8k.example(row) for row in recipe.GSM8K[:5]]
    assert list(recipes.gsm8k.questions("test")) == [recipes.gsm8k.example(row) for row in recipe.GSM8K[5:]]


def worked() -> list[str]:
    """Return all worked answers."""
    files = [Path(str(recipe.GSM8K_FOLDER)) / f"{split}.parquet" for split in ("train", "test")]
    return [answer for file in files for answer in pyarrow.parquet.read_table(file)["answer"].to_pylist()]


def boxed(answer: str) -> str:
    """Return a worked answer in the form that the prompt asks for."""
    return re.sub(r"#### (.*)", r"So it is \\boxed{\1}.", answer)


@recipe.needs_gsm8k
def test_every_worked_answer_is_right(recipes: Any) -> None:
    strict, lenient, hashes = recipes.gsm8k.strict, recipes.gsm8k.lenient, recipes.gsm8k.HASHES
    answers = worked()
    assert len(answers) == 8792
    for answer in answers:
        row = recipes.gsm8k.example({"question": "", "answer": answer})
        truth = Fraction(answer.split("#### ")[1].replace(",", ""))
        assert strict(answer, hashes) == strict(boxed(answer)) == lenient(answer) == lenient(boxed(answer)) == truth
        assert lenient(row["solution"]) == truth  # what an evaluation compares with


@recipe.needs_gsm8k
def test_a_thousand_corrupted_answers_are_wrong(recipes: Any) -> None:
    rng = random.Random(0)

    def drop(number: str) -> str:
        """Return a number without one of its digits. A single digit becomes another one."""
        digits = number.removeprefix("-")
        place = rng.randrange(len(digits))
        return digits[:place] + digits[place + 1 :] if len(digits) > 1 else str((int(digits) + 1) % 10)

    # each takes the final number, without commas
    corruptions: dict[str, Callable[[str], str]] = {
        "another": lambda number: str(int(number) + rng.randint(1, 99)),
        "sign": lambda number: str(-int(number) or -1),
        "digit dropped": drop,
        "digit added": lambda number: f"{number}{rng.randint(1, 9)}",
        "fraction": lambda number: f"{int(number) or 1}/7",
        "decimal": lambda number: f"{number}.5",
        "two": lambda number: f"{number} or {number}1",
    }
    kinds = [*corruptions, "no number", "no end"]
    for index, answer in enumerate(rng.sample(worked(), 1000)):
        kind, (reasons, _, number) = kinds[index % len(kinds)], answer.partition("#### ")
        if kind in corruptions:
            text = f"{reasons}#### {corruptions[kind](number.replace(',', ''))}"
        else:
            text = re.sub(r"\d", "?", reasons) + "#### unknown" * (kind == "no number")
        truth = recipes.gsm8k.lenient(number)
        for form, own in ((recipes.gsm8k.HASHES, text), (recipes.gsm8k.BOXED, boxed(text))):
            assert truth not in (None, recipes.gsm8k.strict(own, form), recipes.gsm8k.lenient(own)), (kind, own)


@recipe.needs_gsm8k
def test_the_real_questions_load(recipes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    for split, rows in {"train": 7473, "test": 1319}.items():
        found = recipes.gsm8k.questions(split)
        assert len(found) == rows and found.column_names == ["prompt", "solution"]
        assert all(row["prompt"][0]["content"].endswith(recipes.gsm8k.INSTRUCTION) for row in found.select(range(9)))
