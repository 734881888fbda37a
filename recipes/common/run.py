"""Code around a training run: arguments, resuming, and the files written at the end."""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from transformers import PrinterCallback as PrinterCallback  # for the recipe `stress`
from transformers import TrainerCallback as TrainerCallback
from trl import TrlParser

from trl_steady import GRPOConfig, GRPOTrainer
from trl_steady.cli import dry_run
from trl_steady.cli.main import main as trl_steady

Results = dict[str, Any]
Callbacks = Callable[[GRPOTrainer], Sequence[TrainerCallback]]  # takes the trainer, returns the recipe's callbacks

PACKAGES = ("trl-steady", "trl", "transformers", "torch", "peft", "bitsandbytes", "accelerate")


@dataclass
class RecipeArguments:
    """Arguments of a recipe that `GRPOConfig` does not have."""

    quantised: bool = field(default=True, metadata={"help": "Quantise the base model to NF4."})
    lora_r: int = field(default=16, metadata={"help": "Rank of the adapters; 0 trains the whole model."})
    lora_alpha: int = field(default=32, metadata={"help": "LoRA alpha: the scale of the adapters times their rank."})
    held_out: int = field(default=200, metadata={"help": "Number of held-out problems, the same for every seed."})
    eval_questions: int | None = field(
        default=None, metadata={"help": "Held-out questions of GSM8K in evaluations while training. By default, all."}
    )
    samples: int = field(default=4, metadata={"help": "Answers to each held-out problem at the training temperature."})
    check_every: int = field(default=1, metadata={"help": "Rollouts between two checks on held-out problems."})

    @property
    def adapter(self) -> LoraConfig | None:
        """LoRA on every linear layer, or None to train the whole model."""
        if not self.lora_r:
            return None
        return LoraConfig(
            r=self.lora_r, lora_alpha=self.lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM"
        )


def start(main: Callable[..., Results], *kinds: type) -> None:
    """Run a recipe with the arguments of the command line, which `kinds` have. `--dry-run` may be one of them."""
    asked = [word for word in sys.argv[1:] if word.split("=")[0] == "--dry-run"]
    if asked:
        sys.exit(trl_steady(["run", *sys.argv]))
    main(*TrlParser(kinds).parse_args_and_config())


def is_dry_run() -> bool:
    """Return True under `trl-steady run --dry-run`, which leaves out all that comes before a training."""
    return dry_run.IS_ON


def refuse_dry_run(parser: argparse.ArgumentParser, instead: str) -> None:
    """End with an error if a dry run of many runs is asked for."""
    if is_dry_run() or "--dry-run" in sys.argv:
        parser.error(f"many runs have no dry run. {instead}")


def rehearse(trainer: GRPOTrainer) -> None:
    """In a dry run, end here, before the evaluation that comes first in a recipe."""
    if is_dry_run():
        trainer.train()


def starting_model(start: Path, folder: Path, build: Callable[[], Any], teach: Callable[[Any, Any], None]) -> Path:
    """Return the folder of a task's starting model. If `start` has none, teach one, and save it there.

    Args:
        start: The folder.
        folder: For the model that nobody has taught, which a dry run takes.
        build: Returns that model and its tokenizer.
        teach: Trains them, so that the model half knows the task.
    """
    if (start / "model.safetensors").exists():
        return start
    model, tokenizer = build()
    if is_dry_run():
        print(f"dry run: the warm start is left out, and nothing is saved in {start}", flush=True)
        start = folder
    else:
        teach(model, tokenizer)
    tokenizer.save_pretrained(start)
    model.save_pretrained(start)
    return start


def updates_per_rollout(args: GRPOConfig) -> int:
    """Return the number of optimizer steps that one rollout feeds."""
    return max(1, args.steps_per_generation * args.num_iterations // args.gradient_accumulation_steps)


def logged(history: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, list[float | None]]:
    """Return the values of some metrics in the rows of updates, with four digits. Leave out metrics without one."""
    found: dict[str, list[float | None]] = {}
    for name in names:
        values = [row[name] for row in history if name in row and "loss" in row]
        if values:
            found[name] = [None if value is None else float(f"{value:.4g}") for value in values]
    return found


def train(trainer: GRPOTrainer, callbacks: Sequence[TrainerCallback]) -> None:
    """Train. With `resume_from_checkpoint: true`, resume from the last complete checkpoint, if there is one.

    If the cluster ends the run early (`enable_jit_checkpoint`), the recipe ends too, without results.
    """
    for callback in callbacks:
        trainer.add_callback(callback)
    wanted: str | bool | None = trainer.args.resume_from_checkpoint
    if str(wanted).lower() == "true":
        wanted = trainer.checkpoints.newest() is not None  # True takes the newest that is complete
    trainer.train(resume_from_checkpoint=wanted)
    if trainer.preemption.is_stopping:
        sys.exit()


def finish(trainer: GRPOTrainer, recipe: RecipeArguments, found: Results) -> Results:
    """Write the policy and `results.json`, and return the contents of `results.json`.

    Args:
        trainer: The trainer after training.
        recipe: The recipe's arguments, in addition to `trainer.args`.
        found: The measurements of the task.
    """
    output = Path(trainer.args.output_dir)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    results = {
        "seed": trainer.args.seed,
        "device": device,
        "versions": {package: version(package) for package in PACKAGES},
        **found,
        "recipe": asdict(recipe),
        "history": trainer.state.log_history,
    }
    policy = output / ("adapter" if recipe.adapter else "model")
    trainer.save_model(str(policy))
    if trainer.is_world_process_zero():
        (output / "results.json").write_text(json.dumps(results, indent=1))
        page = ", report.html" * trainer.args.training_report
        print(f"{policy}, results.json{page}", flush=True)
    return results
