"""GSPO with LoRA on SmolLM2-135M-Instruct in NF4, on whatever device is there.

python recipes/gspo/train.py --config recipes/gspo/smollm2-135m-comparison.yaml [--seed 1] [--output_dir ...]
"""

import copy
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import report
import smollm2
import task
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import PrinterCallback, TrainerCallback
from trl import TrlParser

from trl_steady import GRPOConfig, GRPOTrainer

PACKAGES = ("trl-steady", "trl", "transformers", "torch", "peft", "bitsandbytes", "accelerate")
BATCH = 200  # answers generated at once in an evaluation


@dataclass
class RecipeArguments:
    """What the recipe adds to `GRPOConfig`."""

    quantised: bool = field(default=True, metadata={"help": "NF4 base, else an unquantised one."})
    lora_r: int = field(default=16, metadata={"help": "Rank of the adapters."})
    lora_alpha: int = field(default=32, metadata={"help": "Scale of the adapters, times the rank."})
    held_out: int = field(default=200, metadata={"help": "Held-out problems, the same for every seed."})
    samples: int = field(default=4, metadata={"help": "Answers to each held-out problem at the training temperature."})


@torch.no_grad()
def right_answers(trainer: GRPOTrainer, problems: Sequence[tuple[int, int]], *, samples: int) -> np.ndarray:
    """(problems, samples) of 0 and 1; `samples=0` decodes greedily, once.

    The preamble, three quarters of each prompt, is read once and its cache handed to every answer.
    """
    model, tokenizer, args = trainer.model.eval(), trainer.processing_class, trainer.args
    asked = [problem for problem in problems for _ in range(max(samples, 1))]
    how = {"do_sample": True, "temperature": args.temperature, "top_k": 0} if samples else {"do_sample": False}
    preamble = tokenizer(task.PREAMBLE, return_tensors="pt").to(model.device)
    read = model(**preamble, use_cache=True).past_key_values
    scores: list[bool] = []
    for start in range(0, len(asked), BATCH):
        batch = asked[start : start + BATCH]
        inputs = tokenizer([task.prompt(problem) for problem in batch], return_tensors="pt").to(model.device)
        cache = copy.deepcopy(read)
        cache.batch_repeat_interleave(len(batch))
        answers = model.generate(**inputs, past_key_values=cache, max_new_tokens=args.max_completion_length, **how)
        texts = tokenizer.batch_decode(answers[:, inputs["input_ids"].size(1) :])
        scores += [task.is_right(problem, text) for problem, text in zip(batch, texts, strict=True)]
    model.train()
    return np.array(scores, dtype=float).reshape(len(problems), -1)


class Progress(TrainerCallback):
    """One line an update, and a greedy check on held-out problems after each rollout."""

    def __init__(self, problems: Sequence[tuple[int, int]]) -> None:
        self.problems, self.checks, self.started = problems, {}, time.monotonic()
        self.trainer: GRPOTrainer

    def check(self, step: int) -> None:
        """Greedy accuracy now."""
        self.checks[step] = float(right_answers(self.trainer, self.problems, samples=0).mean())
        print(f"           held out, greedy: {self.checks[step]:.1%} of {len(self.problems)} right", flush=True)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Print the update that was logged."""
        if not logs or "ratio/sequence_mean" not in logs:
            return
        reward = f"  right {logs['reward']:.1%}" if logs.get("reward") is not None else ""
        print(
            f"step {state.global_step:3d}/{state.max_steps}  {time.monotonic() - self.started:4.0f} s"
            f"  ratio {logs['ratio/sequence_min']:.4f} .. {logs['ratio/sequence_max']:.4f}"
            f"  clipped {logs['clip_ratio/region_mean']:.0%}{reward}",
            flush=True,
        )
        if state.global_step % args.steps_per_generation == 0:
            self.check(state.global_step)


def reward(completions: list[str], problem: list[list[int]], **_: Any) -> list[float]:
    """1 for a right answer."""
    return [float(task.is_right(tuple(p), text)) for p, text in zip(problem, completions, strict=True)]


def main(recipe: RecipeArguments, args: GRPOConfig) -> dict[str, Any]:
    """Evaluate, train, evaluate, report; returns what is written to `results.json`."""
    started = time.monotonic()
    print("Loading SmolLM2-135M-Instruct" + (" and quantising it to NF4" if recipe.quantised else ""), flush=True)
    output = Path(args.output_dir)
    model, tokenizer = smollm2.load(output / "base", quantised=recipe.quantised)
    newline = tokenizer.encode("\n", add_special_tokens=False)
    model.generation_config.eos_token_id = [*newline, tokenizer.eos_token_id]  # an answer ends with its line
    train, test = task.split(recipe.held_out)
    progress = Progress(test[: len(test) // 2])
    trainer = GRPOTrainer(
        model,
        reward,
        args,
        Dataset.from_list([{"prompt": task.prompt(problem), "problem": list(problem)} for problem in train]),
        processing_class=tokenizer,
        callbacks=[progress],
        peft_config=LoraConfig(
            r=recipe.lora_r, lora_alpha=recipe.lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
    )
    progress.trainer = trainer
    trainer.remove_callback(PrinterCallback)
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:  # TRL makes the adapters of a quantised base bf16, where small updates round away
            parameter.data = parameter.data.float()
    loaded = time.monotonic()

    print(f"Before: {len(test)} held-out problems, {recipe.samples} samples each, and greedily", flush=True)
    torch.manual_seed(args.seed)
    before = {n: right_answers(trainer, test, samples=n) for n in (recipe.samples, 0)}
    evaluated = time.monotonic()
    print(f"Training: {args.max_steps} updates, {args.steps_per_generation} for each rollout", flush=True)
    progress.started = time.monotonic()
    progress.checks[0] = float(before[0][: len(progress.problems)].mean())
    trainer.train()
    trained = time.monotonic()
    print("After", flush=True)
    after = {n: right_answers(trainer, test, samples=n) for n in (recipe.samples, 0)}

    names = {recipe.samples: f"sampled at temperature {args.temperature:g}, {recipe.samples} each", 0: "greedy"}
    rows = {name: report.difference(before[n], after[n]) for n, name in names.items()}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    results = {
        "seed": args.seed,
        "device": device,
        "versions": {package: version(package) for package in PACKAGES},
        "problems": {"training": len(train), "held out": len(test)},
        "accuracy": {name: row._asdict() for name, row in rows.items()},
        "seconds": {
            "loading": round(loaded - started),
            "evaluation before": round(evaluated - loaded),
            "training": round(trained - evaluated),
            "in all": round(time.monotonic() - started),
        },
        "recipe": asdict(recipe),
        "held-out greedy accuracy by step": progress.checks,
        "history": trainer.state.log_history,
    }
    trainer.save_model(str(output / "adapter"))
    report.picture(
        str(output / "training.png"), trainer.state.log_history, progress.checks, rows[names[recipe.samples]]
    )
    (output / "results.json").write_text(json.dumps(results, indent=1))
    print(f"\n{report.table(rows)}\n\n{output}: base/, adapter/, training.png, results.json", flush=True)
    return results


if __name__ == "__main__":
    main(*TrlParser((RecipeArguments, GRPOConfig)).parse_args_and_config())
