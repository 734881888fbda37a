"""What our seam costs: a micro-batch's loss and backward, ours and TRL's sequence level side by side in one run.

Both have a KL, an off-policy mask and metrics, and neither leaves out padding.

    python benchmarks/seam.py [--pairs 30] [--batch 16] [--prompt 64] [--completion 64] [--smollm2]

Both trainers get the same fixed rollouts. They take turns, so that a drift of the machine's speed meets both; what is
printed is the ratio pair by pair. `--smollm2` takes the recipe's NF4 model in place of a small random one.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import trl
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM

import trl_steady

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.tools import tiny

from benchmarks import measuring
from benchmarks.measuring import CUDA


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


def step(trained: Any, inputs: dict[str, Any]) -> None:
    trained.model.zero_grad()
    trained.compute_loss(trained.model, inputs).backward()


# our own KL, metrics and mask beside TRL's KL, metrics and mask
SHARED: dict[str, Any] = {"beta": 0.04, "use_bias_correction_kl": True, "off_policy_mask_threshold": 0.1}


def main() -> None:
    options = measuring.parser(__doc__, "smollm2", pairs=30, batch=16, prompt=64, completion=64).parse_args()
    measuring.heading(options)
    with tempfile.TemporaryDirectory() as folder:
        for loss in ("gspo", "gspo_token", "gmpo"):
            theirs = trainer(trl, options, folder, loss_type="grpo", importance_sampling_level="sequence", **SHARED)
            ours = trainer(trl_steady, options, folder, trim_padding=False, loss_type=loss, **SHARED)
            inputs = rollouts(options, ours.model.device)
            work = {name: lambda t=each, i=inputs: step(t, i) for name, each in (("ours", ours), ("TRL", theirs))}
            found = measuring.in_turns(work, options.pairs)
            ratio = measuring.quartiles(found["ours"], found["TRL"])
            print(
                f"{loss:10s} time ours / TRL {ratio['median']:.3f} (quartiles {ratio['low']:.3f}, "
                f"{ratio['high']:.3f}; {options.pairs} pairs)"
            )


if __name__ == "__main__":
    main()
