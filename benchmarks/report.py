"""Measure the cost of `training_report` and `log_line` on the demo's model, with and without them in turns.

    python benchmarks/report.py [--rounds 12] [--random]

A round is the demo's rollout of 64 answers and its four updates, with a log after each update. Pages are written at
saves, which take at most 1 % of the time, and at the end, which is not measured here. `--random` takes a small random
model in place of SmolLM2.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

import trl_steady

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import measuring
from trl_steady.features.training_report import TrainingReport
from trl_steady.report.page import write

UPDATES = 4


def trainer(model: Path, folder: str, **options: Any) -> Any:
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    parts = {"processing_class": AutoTokenizer.from_pretrained(model), "peft_config": lora}
    batch = {"per_device_train_batch_size": 16, "num_generations": 8, "max_completion_length": 4, "beta": 0.04}
    weights = AutoModelForCausalLM.from_pretrained(model)
    return measuring.build(trl_steady, weights, folder, parts, steps_per_generation=UPDATES, **batch, **options)


def rollout(trained: Any) -> None:
    """Make a rollout and its updates, and log each."""
    rows = [{"prompt": f"{i // 8} + {i % 5} ="} for i in range(16 * UPDATES)]
    trained._step, trained._buffered_inputs = 0, None
    for _ in range(UPDATES):
        loss = trained.training_step(trained.model, rows, None)
        trained.state.global_step += 1
        trained.log({"loss": loss.item(), "grad_norm": measuring.grad_norm(trained)})
        trained.model.zero_grad()


def watched(trained: Any) -> list[float]:
    """Return a list to which each call of the report in a run adds its seconds."""
    took: list[float] = []
    part, clock = trained.feature(TrainingReport), trained.metrics.clock

    def timed(work: Any) -> Any:
        def timing(*arguments: Any) -> Any:
            started = time.perf_counter()
            found = work(*arguments)
            took.append(time.perf_counter() - started)
            return found

        return timing

    for of, names in ((part, ("on_rewards", "on_rollout_end", "on_log")), (clock, ("_begin", "read"))):
        vars(of).update({name: timed(getattr(of, name)) for name in names})
    return took


def main() -> None:
    options = measuring.parser(__doc__, "random", rounds=12).parse_args()
    measuring.heading(options)
    with tempfile.TemporaryDirectory() as folder:
        measuring.save_model(Path(folder, "model"), options.random)
        both = {"without": {}, "with": {"training_report": True, "log_line": True}}
        trainers = {name: trainer(Path(folder, "model"), folder, **more) for name, more in both.items()}
        work = {name: lambda t=each: rollout(t) for name, each in trainers.items()}
        inside = watched(trainers["with"])
        found = measuring.in_turns(work, options.rounds)
        share = sum(inside) / (options.rounds + 1) / statistics.median(found["with"])
        print(f"the report's own calls take {share:.2%} of a rollout and its updates")
        ratio = measuring.quartiles(found["with"], found["without"])
        print(f"time with / without {ratio['median']:.4f} (quartiles {ratio['low']:.4f}, {ratio['high']:.4f})")
        history = trainers["with"].feature(TrainingReport)._history()
        started = time.perf_counter()
        write(Path(folder, "report.html"), "run", history)
        print(f"a rollout takes {min(found['without']):.1f} s, a page {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
