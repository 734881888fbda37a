"""GSM8K with math-verify's reward, for a 7B model on a GPU, and the evaluation of any model on it.

Model and questions come from the hub, or from folders. `TRL_STEADY_GSM8K` names the folder of the questions, which has
train.parquet and test.parquet. This evaluates a hub model, a checkpoint or an adapter greedily on all test questions:

python recipes/common/gsm8k.py --model_name Qwen/Qwen2.5-0.5B-Instruct
"""

import json
import os
import re
import sys
import time
import unicodedata
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, set_seed
from trl.rewards import accuracy_reward

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import evaluate, report, run, small_model, smollm2
from trl_steady import GRPOConfig, GRPOTrainer
from trl_steady.report.compare import interval

# follows each question; the models of the configs know this instruction (DeepSeekMath's model card has it)
INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."

BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")  # what INSTRUCTION asks for
HASHES = re.compile(r"####(.*)")  # the end of the worked answers
# The bounds are far above GSM8K's numbers, and below the length at which Python refuses to convert text.
_WHOLE = r"\d{1,30}(?:,\d{3}(?!\d)){0,9}"
_DIGITS = rf"(?:{_WHOLE}(?:\.\d{{1,30}})?|(?<![\w.])\.\d{{1,30}})"
_DASHES = "-\u2010-\u2013\u2212\ufe63\uff0d"  # hyphens, the en dash, minus signs
_OVER, _UNDER = (
    rf"\s?(?:\{{\s?(?P<{name}_minus>[{_DASHES}]?)\s?(?P<{name}>{_DIGITS})\s?\}}|(?P<{name}_digit>\d))"
    for name in ("over", "under")
)
_NUMBER = re.compile(
    rf"(?=[{_DASHES}\u2014\\$\u20ac\u00a3.\d])"  # for speed
    rf"(?:(?P<minus>[{_DASHES}\u2014])(?P<gap>[ \t]{{0,3}})\{{?(?=[\\$\u20ac\u00a3.\d]))?"
    r"(?:\\?[$\u20ac\u00a3]\s?)?"
    rf"(?:(?P<whole>{_WHOLE})(?:[ \t]{{0,3}}(?=\\[dtc]?frac)|[ \t]{{1,3}}(?=\d{{1,30}}\s?/\s?\d)))?"
    rf"(?:\\[dtc]?frac{_OVER}{_UNDER}"
    rf"|(?P<number>{_DIGITS})(?:\s?/\s?(?P<divisor_minus>[{_DASHES}]?)(?P<divisor>{_DIGITS}))?)",
    re.ASCII,
)
# A dash with a space behind it is a sign only after these. Elsewhere it subtracts, begins a list item or separates.
_BEFORE_SIGN = re.compile(
    r"(?:^|[=:(\[{$#*,|<>\"'\u2192\u2248]|\b(?:is|are|was|were|be|equals?|of|to|by|at|as|gets?|gives?|makes?|has|have))"
    r"[ \t]*\Z"
)


def numbers(text: str) -> list[Fraction]:
    """Return the numbers of a text: 1,000 and 1{,}000, 2.5, -3, 3/4 and \\frac{3}{4}, 2 1/2. Words are not read."""
    text = _plain(text)
    found: list[Fraction] = []
    for match in _NUMBER.finditer(text):
        values = _values(match)
        if values and match["minus"] and _is_sign(text, match):
            values[0] = -values[0]
        found += values
    return found


def _plain(text: str) -> str:
    """Return a text without LaTeX's spaces and without braces that change no number."""
    text = text.replace("{,}", ",")
    text = re.sub(r"\\[,!]", "", text)
    text = re.sub(r"\\[;: ]|~", " ", text)
    text = re.sub(rf"\{{([{_DASHES}])\}}", r"\1", text)
    return re.sub("[\u00bc-\u00be\u2150-\u215e]", _as_fraction, text)


def _as_fraction(sign: re.Match[str]) -> str:
    """Return a character such as \u00bd as " 1/2"."""
    return " " + unicodedata.normalize("NFKC", sign[0]).replace("\u2044", "/")


def _values(match: re.Match[str]) -> list[Fraction]:
    """Return the number of a match without its sign. It is two if a fraction behind a number is not below 1."""
    if match["number"] is None:
        over = _value(match["over"] or match["over_digit"], match["over_minus"])
        under = _value(match["under"] or match["under_digit"], match["under_minus"])
    else:
        over = _value(match["number"])
        under = _value(match["divisor"] or "1", match["divisor_minus"])
    found: list[Fraction] = []
    if match["whole"] is not None:
        found.append(_value(match["whole"]))
    if under == 0:
        return found
    fraction = over / under
    if found and 0 < fraction < 1:
        return [found[0] + fraction]
    return [*found, fraction]


def _value(digits: str, minus: str | None = None) -> Fraction:
    value = Fraction(digits.replace(",", ""))
    if minus:
        return -value
    return value


def _is_sign(text: str, match: re.Match[str]) -> bool:
    """Return True if the dash of a match is a sign. Behind a number or a word, it is a minus or a hyphen."""
    start = match.start("minus")
    if match["gap"] or match["minus"] == "\u2014":
        return _BEFORE_SIGN.search(text, max(start - 12, 0), start) is not None
    return re.match(r"[\w)}]", text[max(start - 1, 0) : start], re.ASCII) is None


def strict(text: str, form: re.Pattern[str] = BOXED) -> Fraction | None:
    """Return the one number in the last answer of the asked form, or None. Units, $ and % are skipped."""
    marked = form.findall(text)
    found = numbers(marked[-1]) if marked else []
    return found[0] if len(found) == 1 else None


def lenient(text: str) -> Fraction | None:
    """Return the last number of a text, or None."""
    return (numbers(text) or [None])[-1]


SCORES = {"strict": strict, "lenient": lenient}


def example(row: dict[str, str]) -> dict[str, Any]:
    """Return the prompt as messages, and the number at the end of the answer."""
    message = {"role": "user", "content": f"{row['question']}\n{INSTRUCTION}"}
    return {"prompt": [message], "solution": row["answer"].split("####")[-1].strip()}


def questions(split: str) -> Dataset:
    """Load GSM8K's questions: 7,473 in `train` and 1,319 in `test`."""
    folder = os.environ.get("TRL_STEADY_GSM8K")
    rows = load_dataset(*([folder] if folder else ["openai/gsm8k", "main"]), split=split)
    return rows.map(example, remove_columns=rows.column_names)


def train(
    recipe: Any, args: GRPOConfig, callbacks: run.Callbacks, *, reward: Any = None
) -> tuple[GRPOTrainer, run.Results]:
    """Train. `reward` replaces math-verify's reward.

    One process answers `held_out` test questions greedily before and after, as `main` does. Several do not.
    """
    started = time.monotonic()
    accuracy_reward([], [])  # if math-verify is missing, fail before the weights are loaded
    problems, test = questions("train"), questions("test")
    test = test.select(range(min(recipe.held_out, len(test))))
    trainer = GRPOTrainer(
        recipe.model_name,
        reward or accuracy_reward,
        args,
        problems,
        test.select(range(min(recipe.eval_questions or len(test), len(test)))),
        quantization_config=smollm2.nf4(double=args.use_vllm) if recipe.quantised else None,
        peft_config=recipe.adapter,
    )
    run.rehearse(trainer)
    is_alone = trainer.accelerator.num_processes == 1
    before = right_answers(trainer, test) if is_alone else {}
    training = time.monotonic()
    run.train(trainer, callbacks(trainer))
    trained = time.monotonic()
    after = right_answers(trainer, test) if is_alone else {}
    found: run.Results = {"problems": {"training": len(problems), "held out": len(test)}}
    if is_alone:
        rows = {name: report.difference(before[name], after[name]) for name in SCORES}
        print(f"\n{report.table(rows)}\n", flush=True)
        found["accuracy"] = {name: row._asdict() for name, row in rows.items()}
        both = {name: {"before": before[name], "after": after[name]} for name in SCORES}
        found["95 % intervals"] = {
            name: {when: interval(r[:, 0]) for when, r in own.items()} for name, own in both.items()
        }
        found["right answers to each held-out problem"] = {
            name: {when: small_model.counts(right) for when, right in own.items()} for name, own in both.items()
        }
    seconds = {"training": trained - training, "in all": time.monotonic() - started}
    return trainer, {**found, "seconds": {name: round(each) for name, each in seconds.items()}}


def right_answers(trainer: GRPOTrainer, rows: Dataset) -> dict[str, np.ndarray]:
    """Return (questions, 1) of 0 and 1 for each score. The policy answers greedily."""
    args = trainer.args
    with trainer.accelerator.autocast():  # which the trained model does by itself
        answers = evaluate.completions(
            trainer.model,
            trainer.processing_class,
            rows["prompt"],
            max_new_tokens=args.max_completion_length,
            batch=args.per_device_eval_batch_size,
            chat_template_kwargs=args.chat_template_kwargs,
        )
    truths = [lenient(solution) for solution in rows["solution"]]
    found = {}
    for name, read in SCORES.items():
        right = [[read(text) == truth for text in own] for own, truth in zip(answers, truths, strict=True)]
        found[name] = np.array(right, dtype=float)
        print(f"           held out, greedy, {name}: {found[name].mean():.1%} right", flush=True)
    return found


@dataclass
class Arguments:
    """Arguments of an evaluation."""

    model_name: str = field(metadata={"help": "A hub name or a folder: of a model, or of an adapter."})
    quantised: bool = field(default=False, metadata={"help": "Quantise the base model to NF4."})
    dtype: str = field(default="bfloat16", metadata={"help": "Type of the weights that are not quantised."})
    questions: int = field(default=1319, metadata={"help": "How many of the test questions."})
    samples: int = field(default=0, metadata={"help": "Answers to each question; 0: one, greedy."})
    temperature: float = field(default=1.0, metadata={"help": "Temperature of the samples."})
    max_completion_length: int = field(default=512, metadata={"help": "Tokens of an answer."})
    batch: int = field(default=64, metadata={"help": "Answers at once."})
    chat_template_kwargs: str = field(default="{}", metadata={"help": "JSON: those of the training's config."})
    seed: int = field(default=0, metadata={"help": "Seed of the samples."})
    output_dir: str = field(default="outputs/gsm8k", metadata={"help": "For evaluation.json and evaluation.png."})


def main(args: Arguments) -> dict[str, run.Results]:
    """Evaluate a model on test questions, with the strict and the lenient score."""
    set_seed(args.seed)
    options = {"dtype": args.dtype, "device_map": "cuda:0" if torch.cuda.is_available() else None}
    if args.quantised:
        options["quantization_config"] = smollm2.nf4()
    model = AutoModelForCausalLM.from_pretrained(args.model_name, **options)
    tokenizer = AutoTokenizer.from_pretrained(args.model_name)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    rows = questions("test")
    rows = rows.select(range(min(args.questions, len(rows))))
    found = evaluate.evaluate(
        model,
        tokenizer,
        rows["prompt"],
        [lenient(solution) for solution in rows["solution"]],
        SCORES,
        samples=args.samples,
        temperature=args.temperature,
        max_new_tokens=args.max_completion_length,
        batch=args.batch,
        chat_template_kwargs=json.loads(args.chat_template_kwargs),
    )
    evaluate.write(Path(args.output_dir), found, **asdict(args))
    return found


if __name__ == "__main__":
    main(*HfArgumentParser(Arguments).parse_args_into_dataclasses())
