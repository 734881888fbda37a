"""What replaying routes costs: optimizer steps of a mixture of experts, with replay and without, side by side.

    python benchmarks/replay.py [--rounds 15] [--batch 8] [--window 2] [--prompt 64] [--completion 192]
        [--json PATH]

A random Qwen3-MoE of 64 experts, 8 a token, fully fine-tuned in float32 (on CUDA under bf16 autocast). A step is all
that TRL's `training_step` does for the micro-batches of an optimizer step that begins with a rollout: log-probs of the
old policy, then forward, loss and backward of each micro-batch; a `rollout_func` stands in for the sampling. With
replay on, the old policy's routes are recorded and replayed, so that both do the same work. They take turns, so that a
drift of the machine's speed meets both; the ratios are round by round. Generation by transformers is timed with its
routes recorded, as R3 needs it, and not.
"""

import argparse
import contextlib
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import trl_steady

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.tools import tiny

from benchmarks import measuring
from benchmarks.gpu.block import Figure
from benchmarks.measuring import CUDA
from trl_steady.features.router_replay.feature import RouterReplay
from trl_steady.trl_bridge.patching import patched

SMALL = {
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 128,
    "initializer_range": 0.05,
}


def build(options: argparse.Namespace, folder: str) -> Any:
    """A trainer whose rollouts are always the same."""
    torch.manual_seed(0)
    with torch.device("cuda" if CUDA else "cpu"):
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**tiny.SIZES, **SMALL}))
    generator = torch.Generator().manual_seed(0)
    count = options.batch * options.window
    lengths = torch.randint(options.completion // 2, options.completion + 1, (count,), generator=generator).tolist()
    rollout = {
        "prompt_ids": measuring.random_ids([options.prompt] * count, generator),
        "completion_ids": measuring.random_ids(lengths, generator),
        "logprobs": None,
    }
    parts = {"processing_class": tiny.tokenizer(), "rollout_func": lambda prompts, trainer: dict(rollout)}
    return measuring.build(
        trl_steady,
        model,
        folder,
        parts,
        router_replay="R2",
        num_iterations=2,  # with one, TRL needs no log-probs of the old policy
        gradient_accumulation_steps=options.window,
        steps_per_generation=options.window,
        per_device_train_batch_size=options.batch,
        num_generations=options.batch,
    )


def step(trainer: Any, replay: str | None) -> float:
    """The gradients' norm after the micro-batches of an optimizer step that begins with a rollout."""
    trainer.model.zero_grad()
    with patched(trainer.args, {"router_replay": replay}):
        measuring.window(trainer)
    return measuring.grad_norm(trainer)


def generate(trainer: Any, replay: str | None) -> None:
    """Tokens for one micro-batch of prompts, with their routes recorded or not."""
    prompts = torch.randint(50, 200, (trainer.args.per_device_train_batch_size, 32), generator=torch.manual_seed(0))
    recording = trainer.feature(RouterReplay).routers(trainer.model).record() if replay else contextlib.nullcontext()
    with recording, torch.no_grad():
        trainer.model.generate(
            prompts.to(trainer.model.device), max_new_tokens=32, min_new_tokens=32, do_sample=False, use_cache=True
        )


def compared(what: str, work: Callable[[str | None], Any], replay: str, rounds: int) -> float:
    """The median ratio of with to without."""
    found = measuring.in_turns({"with": lambda: work(replay), "without": lambda: work(None)}, rounds)
    ratio = measuring.quartiles(found["with"], found["without"])
    print(
        f"{what}: time with / without {ratio['median']:.3f} (quartiles {ratio['low']:.3f}, {ratio['high']:.3f}; "
        f"{rounds} rounds; without {statistics.median(found['without']):.2f} s)"
    )
    return ratio["median"]


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    numbers = {"rounds": 15, "batch": 8, "window": 2, "prompt": 64, "completion": 192}
    parser = measuring.parser(__doc__, **numbers)
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


def main() -> None:
    options = parsed()
    measuring.heading(options)
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(options, folder)
        norms = {replay: step(trainer, replay) for replay in (None, "R2")}
        print(f"gradient norm without replay {norms[None]:.8g}, replaying the policy's own routes {norms['R2']:.8g}")
        of_step = compared("optimizer step", lambda replay: step(trainer, replay), "R2", options.rounds)
        of_generation = compared("generation", lambda replay: generate(trainer, replay), "R3", options.rounds)
    figures = [
        Figure("optimizer step: seconds with R2 over seconds without", of_step),
        Figure("generation: seconds with routes recorded over seconds without", of_generation),
        Figure("gradient norm with R2 over the norm without", norms["R2"] / norms[None]),
    ]
    measuring.record(options.json, figures)


if __name__ == "__main__":
    main()
