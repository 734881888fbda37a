"""A reward that can be exploited: it rises while accuracy falls. Each chooses another model as the best.

python recipes/evaluation/hacked.py [--metric eval_reward] [--output_dir outputs/evaluation]
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset

sys.path.insert(0, str(Path(__file__).parents[1]))

from deepseekmath.chain import Chain, result
from trl_steady import GRPOConfig, GRPOTrainer
from trl_steady.report import History, diagnose
from trl_steady.report.symptoms import verdict


def looks_thorough(completions: list[str], **_: Any) -> list[float]:
    """Return the share of the ten digits that an answer has. Right answers repeat some."""
    return [len({*text} & {*"0123456789"}) / 10 for text in completions]


def accuracy(completions: list[str], problem: list[list[int]], **_: Any) -> list[tuple[bool, str | None]]:
    """Return if the last digit is the sum of the problem's digits modulo ten, and this digit."""
    found = [result(text) for text in completions]
    return [(last == str(sum(digits) % 10), last) for last, digits in zip(found, problem, strict=True)]


def main(output: Path, metric: str = "eval_accuracy", held_out: int = 200, **options: Any) -> GRPOTrainer:
    """Train, load the best model by a metric, and print what each metric chooses and what the report says."""
    task = Chain(output / "start")
    model, tokenizer = task.load(output / "base", quantised=False)
    splits = [[{"prompt": task.prompt(each), "problem": list(each)} for each in own] for own in task.split(held_out)]
    run: dict[str, Any] = {"output_dir": str(output), "max_steps": 60, "logging_steps": 1, "report_to": "none"}
    run |= {"per_device_train_batch_size": 64, "num_generations": 16, "max_completion_length": 11, "bf16": False}
    run |= {"learning_rate": 1e-3, "eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 200}
    run |= {"save_strategy": "steps", "save_steps": 3, "load_best_model_at_end": True, "log_line": True}
    run |= {"metric_for_best_model": metric, "eval_metrics": [accuracy], "disable_tqdm": True}
    run |= {"eval_generation": {"greedy": True}, "num_generations_eval": 1}
    training, evaluation = map(Dataset.from_list, splits)
    args = GRPOConfig(**{**run, **options})
    trainer = GRPOTrainer(model, looks_thorough, args, training, evaluation, processing_class=tokenizer)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "eval_accuracy" in row]
    for name in ("eval_accuracy", "eval_reward"):
        best = max(rows, key=lambda row: row[name])
        print(f"best by {name}: step {best['step']}, accuracy {best['eval_accuracy']:.1%}")
    print(verdict(diagnose(History(trainer.state.log_history, {"settings": args.to_dict()}))[0]))
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/evaluation"))
    parser.add_argument("--metric", default="eval_accuracy", choices=["eval_accuracy", "eval_reward"])
    main(*vars(parser.parse_args()).values())
