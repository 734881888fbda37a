"""What a reference that moves costs, ours and TRL's side by side in one run: bytes, a refresh, a step.

    python tests/benchmarks/reference.py [--rounds 10] [--batch 8] [--prompt 64] [--completion 32] [--random]

SmolLM2-135M-Instruct, unquantised. A step is the reference's pass over a rollout, and loss and backward on it. The
variants take turns, so that a drift of the machine's speed meets all; ratios are to TRL's full-model reference, round
by round. `--random` takes a small random model in place of SmolLM2.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM
from trl.trainer.callbacks import SyncRefModelCallback
from trl.trainer.utils import use_adapter

import trl_steady

sys.path += [str(Path(__file__).parents[2]), str(Path(__file__).parents[2] / "recipes")]
from tests.benchmarks.seam import CUDA, rollouts
from tests.tools import tiny

from trl_steady.reference.tensors import adapter_pairs, model_pairs, move


class Variant(NamedTuple):
    trainer: Any
    refresh: Callable[[], None]
    reference_bytes: int


def save_model(folder: Path, random: bool) -> None:
    if random:
        torch.manual_seed(0)
        sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 8}
        config = LlamaConfig(**{**tiny.SIZES, **sizes, "num_key_value_heads": 8, "initializer_range": 0.02})
        LlamaForCausalLM(config).save_pretrained(folder)
        tiny.tokenizer().save_pretrained(folder)
    else:
        from common import smollm2

        smollm2.load(folder, quantised=False)


def build(package: Any, folder: Path, options: argparse.Namespace, *, lora: bool, moves: bool) -> Any:
    args = package.GRPOConfig(
        str(folder / "out"),
        beta=0.04,
        sync_ref_model=moves,
        ref_model_mixup_alpha=1.0,
        per_device_train_batch_size=options.batch,
        num_generations=options.batch,
        gradient_checkpointing=False,
        use_cpu=not CUDA,
        bf16=CUDA,
        report_to="none",
        model_init_kwargs={"dtype": "float32"},
    )
    peft_config = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM") if lora else None
    dataset = Dataset.from_dict({"prompt": ["a"]})
    built = package.GRPOTrainer(str(folder), tiny.reward, args, dataset, peft_config=peft_config)
    built.current_gradient_accumulation_steps = 1  # set by the training loop, which does not run here
    return built


def size(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def variants(folder: Path, options: argparse.Namespace) -> dict[str, Variant]:
    theirs = build(trl, folder, options, lora=False, moves=True)
    ours = build(trl_steady, folder, options, lora=False, moves=True)
    frozen = build(trl, folder, options, lora=True, moves=False)
    adapter = build(trl_steady, folder, options, lora=True, moves=True)
    sync = SyncRefModelCallback.sync_target_model
    full, small = model_pairs(ours.model, ours.ref_model), adapter_pairs(adapter.model)
    whole = size(theirs.ref_model.parameters())
    return {
        "full, TRL": Variant(theirs, lambda: sync(theirs.model, theirs.ref_model, 1.0), whole),
        "full, ours": Variant(ours, lambda: move(full, 1.0), size(pair.reference for pair in full)),
        "LoRA, TRL (frozen: the base)": Variant(frozen, lambda: None, 0),
        "LoRA, ours": Variant(adapter, lambda: move(small, 1.0), size(pair.reference for pair in small)),
    }


def seconds(work: Callable[[], Any]) -> float:
    if CUDA:
        torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter() - started


def step(trainer: Any, inputs: dict[str, torch.Tensor]) -> None:
    """The reference's pass as TRL makes it, then loss and backward."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    tokens = inputs["completion_ids"].size(1)
    with torch.no_grad():
        if trainer.ref_model is not None:
            logps = trainer._get_per_token_logps_and_entropies(trainer.ref_model, ids, mask, tokens)[0]
        else:
            with use_adapter(trainer.model, "ref" if "ref" in trainer.model.peft_config else None):
                logps = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, tokens)[0]
    trainer.model.zero_grad()
    trainer.compute_loss(trainer.model, {**inputs, "ref_per_token_logps": logps}).backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rounds", 10), ("batch", 8), ("prompt", 64), ("completion", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--random", action="store_true")
    options = parser.parse_args()
    device = torch.cuda.get_device_name() if CUDA else f"CPU, {torch.get_num_threads()} threads"
    print(f"{device}; torch {torch.__version__}, trl {trl.__version__}; {options}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), options.random)
        built = variants(Path(folder), options)
        model_bytes = size(built["full, TRL"].trainer.model.parameters())
        inputs = rollouts(options, built["full, TRL"].trainer.model.device)
        steps: dict[str, list[float]] = {name: [] for name in built}
        refreshes: dict[str, list[float]] = {name: [] for name in built}
        for _ in range(options.rounds + 1):
            for name, variant in built.items():
                steps[name].append(seconds(lambda v=variant: step(v.trainer, inputs)))
                refreshes[name].append(seconds(variant.refresh))
    print(f"model: {model_bytes / 2**20:,.1f} MiB; medians of {options.rounds} rounds, the first left out")
    for name, variant in built.items():
        ratios = [mine / trls for mine, trls in zip(steps[name], steps["full, TRL"], strict=True)][1:]
        low, median, high = statistics.quantiles(ratios, n=4)
        share = variant.reference_bytes / model_bytes
        refresh, took = (statistics.median(times[name][1:]) for times in (refreshes, steps))
        print(
            f"{name:29s} reference {variant.reference_bytes / 2**20:7.1f} MiB = {share:6.1%} of the model; "
            f"refresh {refresh * 1e3:7.2f} ms; step {took:6.3f} s = {median:.3f} of TRL's full ({low:.3f}, {high:.3f})"
        )


if __name__ == "__main__":
    main()
