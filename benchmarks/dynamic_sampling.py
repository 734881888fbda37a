"""Measure seconds and generated answers for each optimizer step with dynamic sampling, by the share z of idle groups.

    python benchmarks/dynamic_sampling.py [--rounds 10] [--groups 8] [--size 4] [--completion 64] [--random]

SmolLM2-135M, fully fine-tuned in float32 (on CUDA under bf16 autocast), or with --random a small random model. A step
begins with a rollout that transformers generates, without a stop token, so that all answers are equally long. A group
is idle with probability z, by lot. Trainers with and without the option take turns, so that a drift of the machine's
speed meets both; their ratio is round by round. Without the option, a share z of the groups trains nothing.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import trl_steady

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.tools import tiny

from benchmarks import measuring

IDLE = (0.0, 0.3, 0.6, 0.9)


class Lot:
    """A reward function that draws which groups are idle, and counts the answers."""

    __name__ = "lot"

    def __init__(self, idle: float, size: int) -> None:
        self.idle, self.size, self.answers, self.steps = idle, size, 0, 0
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        self.answers += len(completions)
        count = len(completions) // self.size
        has_signal = torch.rand(count, generator=self.generator) >= self.idle
        return [float(i * has_signal[i // self.size]) for i in range(len(completions))]


def build(options: argparse.Namespace, folder: Path, lot: Lot, *, is_on: bool) -> Any:
    batch = options.groups * options.size
    parts = {
        "processing_class": AutoTokenizer.from_pretrained(folder),
        "reward_funcs": lot,
        "train_dataset": tiny.dataset(),
    }
    return measuring.build(
        trl_steady,
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        folder,
        parts,
        dynamic_sampling=is_on,
        num_generations=options.size,
        per_device_train_batch_size=batch,
        generation_kwargs={"min_new_tokens": options.completion},
        max_completion_length=options.completion,
    )


def step(trainer: Any, lot: Lot) -> None:
    measuring.window(trainer)
    lot.steps += 1
    trainer.model.zero_grad()


def main() -> None:
    numbers = {"rounds": 10, "groups": 8, "size": 4, "completion": 64}
    options = measuring.parser(__doc__, "random", **numbers).parse_args()
    measuring.heading(options)
    with tempfile.TemporaryDirectory() as name:
        measuring.save_model(Path(name), options.random)
        for idle in IDLE:
            lots = {is_on: Lot(idle, options.size) for is_on in (True, False)}
            trainers = {is_on: build(options, Path(name), lot, is_on=is_on) for is_on, lot in lots.items()}
            work = {str(is_on): lambda t=trainers[is_on], lot=lots[is_on]: step(t, lot) for is_on in lots}
            found = measuring.in_turns(work, options.rounds)
            ratio = measuring.quartiles(found["True"], found["False"])
            answers = {is_on: lot.answers / lot.steps for is_on, lot in lots.items()}
            missing = trainers[True].metrics.state()["mean", "dynamic_sampling/unfilled"]
            print(
                f"z = {idle}: {answers[True]:.1f} answers a step, without {answers[False]:.1f}; "
                f"{statistics.median(found['True']):.2f} s a step, without {statistics.median(found['False']):.2f} s, "
                f"ratio {ratio['median']:.2f} (quartiles {ratio['low']:.2f}, {ratio['high']:.2f}); "
                f"groups without a signal {missing[0] / missing[1]:.0%}, without {idle:.0%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
