"""What our seam costs: a micro-batch's loss and backward, ours and TRL's sequence level side by side in one run.

Both have a KL, an off-policy mask and metrics, and neither leaves out padding.

    python tests/benchmarks/seam.py [--pairs 30] [--batch 16] [--prompt 64] [--completion 64] [--smollm2]

Both trainers get the same fixed rollouts. They take turns, so that a drift of the machine's speed meets both; what is
printed is the ratio pair by pair. `--smollm2` takes the recipe's NF4 model in place of a small random one.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import trl
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM

import trl_steady

sys.path += [str(Path(__file__).parents[2])]
from tests.benchmarks import measuring
from tests.benchmarks.measuring import CUDA
from tests.tools import tiny
from tests.tools.syncs import counted


def trainer(package: Any, options: argparse.Namespace, folder: str, **loss: Any) -> Any:
    if options.smollm2:
        from common import smollm2

        model, tokenizer = smollm2.load(Path(folder))
    else:
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**{**tiny.SIZES, **measuring.SMALL})).to("cuda" if CUDA else "cpu")
        tokenizer = tiny.tokenizer()
    low, high = (None, None) if loss["loss_type"] == "gmpo" else (3e-4, 4e-4)
    clip = {"epsilon": low, "epsilon_high": high}
    batch = {"per_device_train_batch_size": options.batch, "num_generations": options.batch}
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    parts = {"processing_class": tokenizer, "peft_config": lora}
    return measuring.build(package, model, folder, parts, **batch, steps_per_generation=4, **clip, **loss)


def rollouts(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    ids = lambda length: torch.randint(50, 200, (options.batch, length), generator=generator)
    lengths = torch.randint(1, options.completion + 1, (options.batch, 1), generator=generator)
    mask = (torch.arange(options.completion) < lengths).int()
    inputs = {
        "prompt_ids": ids(options.prompt),
        "prompt_mask": torch.ones(options.batch, options.prompt, dtype=torch.int),
        "completion_ids": ids(options.completion),
        "completion_mask": mask,
        "advantages": torch.randn(options.batch, generator=generator),
        "ref_per_token_logps": -5 * torch.rand(options.batch, options.completion, generator=generator),
        "old_per_token_logps": -5 * torch.rand(options.batch, options.completion, generator=generator),
        "num_items_in_batch": mask.sum(),
    }
    return {name: value.to(device) for name, value in inputs.items()}


def step(trained: Any, inputs: dict[str, Any]) -> tuple[float, float]:
    """Seconds, and on CUDA the peak of bytes above those resident before."""
    trained.model.zero_grad()
    resident = 0
    if CUDA:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        resident = torch.cuda.memory_allocated()
    started = time.perf_counter()
    trained.compute_loss(trained.model, inputs).backward()
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter() - started, torch.cuda.max_memory_allocated() - resident if CUDA else 0


# our own KL, metrics and mask beside TRL's KL, metrics and mask
SHARED: dict[str, Any] = {"beta": 0.04, "use_bias_correction_kl": True, "off_policy_mask_threshold": 0.1}
THEIRS: dict[str, Any] = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
OURS: tuple[dict[str, Any], ...] = tuple({"loss_type": loss_type} for loss_type in ("gspo", "gspo_token", "gmpo"))


def counts(ours: Any, inputs: dict[str, Any]) -> str:
    """Count the calls that make processes wait for one another, or the CPU for its GPU, in a micro-batch and a log."""
    with counted() as micro_batch:
        ours.compute_loss(ours.model, inputs).backward()
    with counted() as log:
        ours.log({"loss": 0.0})
    collectives, transfers = ({who: of[who] for who in ("trl_steady", "trl")} for of in
                              (micro_batch.collectives, micro_batch.transfers))  # fmt: skip
    return (
        f"in a micro-batch: collectives {collectives}, device-to-host transfers {transfers}; "
        f"in a log: collectives {log.collectives['trl_steady']}"
    )


def main() -> None:
    options = measuring.parser(__doc__, "smollm2", pairs=30, batch=16, prompt=64, completion=64).parse_args()
    measuring.heading(options)
    with tempfile.TemporaryDirectory() as folder:
        for loss in OURS:
            theirs = trainer(trl, options, folder, **{**THEIRS, **SHARED})
            ours = trainer(trl_steady, options, folder, trim_padding=False, **{**loss, **SHARED})
            inputs = rollouts(options, ours.model.device)
            for warming in (ours, theirs, ours, theirs):
                step(warming, inputs)
            pairs = [(step(ours, inputs), step(theirs, inputs)) for _ in range(options.pairs)]
            ratio = measuring.quartiles(*([pair[who][0] for pair in pairs] for who in (0, 1)))
            tokens = options.batch * (options.prompt + options.completion)
            speeds = [tokens / statistics.median(pair[who][0] for pair in pairs) for who in (0, 1)]
            print(
                f"{loss['loss_type']:10s} time ours / TRL {ratio['median']:.3f} (quartiles {ratio['low']:.3f}, "
                f"{ratio['high']:.3f}; {len(pairs)} pairs); "
                f"tokens a second {speeds[0]:,.0f} ours, {speeds[1]:,.0f} TRL"
            )
            print(f"{'':10s} {counts(ours, inputs)}")
            if CUDA:
                peaks = [max(pair[who][1] for pair in pairs) / 2**20 for who in (0, 1)]
                print(f"{'':10s} peak memory above resident {peaks[0]:,.1f} MiB ours, {peaks[1]:,.1f} MiB TRL")


if __name__ == "__main__":
    main()
