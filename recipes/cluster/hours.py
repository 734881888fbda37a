"""Print the table of recipes/cluster/README.md, and write it there: how long recipes for GPUs take, by arithmetic.

python recipes/cluster/hours.py

Nothing here is measured. The assumptions are the constants below. The README states the rates.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[1]
GPU = 400e12  # FLOP/s of an H100 in these passes, a guess; an A100 has about a third
SMALL_GPU = 60e12  # of 24 GB
MIXTURE_GPU = 100e12  # of 141 GB with a mixture of experts
ENGINE = 8000.0  # tokens a second from one vLLM
SMALL_ENGINE = 2000.0  # on a GPU of 24 GB
TOKEN = 0.05  # seconds for a token of a rollout by transformers
TOKEN_NF4 = 0.1
LONGEST = 0.006  # seconds for a token of one answer by vLLM, of which the longest has to wait
LORA = 10  # FLOPs for each parameter and token: old pass, forward, recomputed forward, backward
FULL = 12  # backward also computes the gradients of the weights
DISK = 1e9  # bytes a second


@dataclass(frozen=True)
class Model:
    """Sizes of a model, from its own config."""

    download: float
    """Gigabytes, in bf16."""
    active: float
    """Parameters that a token uses."""


MODELS = {
    "Qwen/Qwen2.5-0.5B-Instruct": Model(1.0, 0.494e9),
    "Qwen/Qwen2.5-7B-Instruct": Model(15.2, 7.62e9),
    "Qwen/Qwen3-4B": Model(8.0, 4.02e9),
    "deepseek-ai/deepseek-math-7b-instruct": Model(13.8, 6.91e9),
    "Qwen/Qwen3-30B-A3B": Model(61.1, 3.3e9),
}
SEQUENCE = {True: 400, False: 1300}
"""Tokens of a question with its answer: of GSM8K, of DeepMath."""
ANSWER = {True: 300, False: 1200}
TRAINERS = {"deepseekmath-7b": 8, "qwen3-30b-a3b-fsdp2": 6}
"""GPUs that train, if not one."""
CHECKPOINT = {"deepseekmath-7b": 100e9, "qwen3-30b-a3b-fsdp2": 490e9}
"""Bytes of a checkpoint, if it is not that of an adapter."""


@dataclass(frozen=True)
class Night:
    """The expected hours of a recipe."""

    download: float
    """Gigabytes of the model."""
    step: float
    """Seconds of an optimizer step with its share of a rollout."""
    hours: float
    """The run takes so many hours, with saves and evaluations."""
    lost: float
    """Minutes that a kill loses at most."""


def night(path: Path) -> Night:
    """Return what to expect of a recipe for GPUs."""
    options: dict[str, Any] = yaml.safe_load(path.read_text())
    name = path.stem
    model = MODELS[options.get("model_name") or options["model_name_or_path"]]
    is_gsm8k = options.get("task") == "gsm8k"
    trainers = TRAINERS.get(name, 1)
    answers = options["per_device_train_batch_size"] * options["gradient_accumulation_steps"] * trainers
    is_lora = options.get("use_peft") or options.get("lora_r", 0) > 0
    rate = _rate(name)
    flops = LORA if is_lora else FULL
    passes = answers * SEQUENCE[is_gsm8k] * model.active * flops / (rate * trainers)
    writing = _seconds_of_answers(options, name, answers, ANSWER[is_gsm8k])
    step = passes + writing
    if options.get("async_generate"):
        step = max(passes, writing)
    steps = options["max_steps"]
    saves = steps / options["save_steps"] * CHECKPOINT.get(name, 0) / DISK
    seconds = steps * step + saves + _seconds_of_evaluations(options, name)
    return Night(model.download, step, seconds / 3600, options["save_steps"] * step / 60)


def _rate(name: str) -> float:
    """Return the FLOP/s of a GPU."""
    if "24gb" in name:
        return SMALL_GPU
    if "a3b" in name:
        return MIXTURE_GPU
    return GPU


def _seconds_of_answers(options: dict[str, Any], name: str, answers: float, length: float) -> float:
    """Return the seconds in which a step's share of a rollout is written.

    A vLLM writes at its rate, and a rollout takes at least as long as its longest answer. transformers needs as long
    as the longest answer takes, for a whole rollout at once.
    """
    share = options["gradient_accumulation_steps"] / options.get("steps_per_generation", 1)
    if options.get("use_vllm"):
        engine = SMALL_ENGINE if "24gb" in name else ENGINE
        engines = TRAINERS.get(name, 1) if options["vllm_mode"] == "colocate" else 1
        longest = share * options["max_completion_length"] * LONGEST
        return max(answers * length / (engine * engines), longest)
    token = TOKEN_NF4 if options.get("quantised") else TOKEN
    return share * options["max_completion_length"] * token


def _seconds_of_evaluations(options: dict[str, Any], name: str) -> float:
    """Return the seconds of the evaluations before, during and after the training."""
    if options.get("task") != "gsm8k":
        return 0.0
    token = TOKEN_NF4 if options.get("quantised") else TOKEN
    seconds = 0.0
    if name not in TRAINERS:  # several processes do not answer before and after
        batches = -(-options["held_out"] // options["per_device_eval_batch_size"])
        seconds += 2 * batches * options["max_completion_length"] * token
    times = options["max_steps"] // options["eval_steps"] + options.get("eval_on_start", False)
    questions = min(options.get("eval_questions", options["held_out"]), options["held_out"])
    if options.get("use_vllm"):
        return seconds + times * _seconds_of_answers(options, name, questions, ANSWER[True])
    batches = -(-questions // options["per_device_eval_batch_size"])
    return seconds + times * batches * options["max_completion_length"] * token


HARDWARE = re.compile(r"NOT YET RUN(?:.|\n)*^# Hardware: (\w+) GPUs? of (\d+) GB", re.MULTILINE)


def recipes() -> list[Path]:
    """Return the recipes whose header names GPUs that nobody has run them on."""
    return [path for path in sorted(FOLDER.glob("*/*.yaml")) if HARDWARE.search(path.read_text())]


def gpus(path: Path) -> str:
    """Return the number of GPUs in the header of a recipe, and the gigabytes of each."""
    found = HARDWARE.search(path.read_text())
    assert found, path
    number = {"one": "1", "two": "2"}.get(found[1], found[1])
    return f"{number}x{found[2]}"


def table() -> str:
    """Return the table in Markdown."""
    lines = ["| recipe | GPUs x GB | download, GB | a step, s | the run, h | a kill loses, min |", "|---" * 6 + "|"]
    for path in recipes():
        found = night(path)
        name = path.relative_to(FOLDER).with_suffix("")
        times = f"{found.step:.0f} | {found.hours:.1f} | {found.lost:.0f}"
        lines.append(f"| [{name}](../{name}.yaml) | {gpus(path)} | {found.download:g} | {times} |")
    return "\n".join(lines)


PAGE = Path(__file__).with_name("README.md")


def filled(page: str) -> str:
    """Return the page with the table between its two comments."""
    before, rest = page.split("<!-- hours -->\n")
    after = rest.split("<!-- /hours -->")[1]
    return f"{before}<!-- hours -->\n{table()}\n<!-- /hours -->{after}"


if __name__ == "__main__":
    print(table())
    PAGE.write_text(filled(PAGE.read_text()))
