"""What a reference that moves costs, ours and TRL's side by side in one run: bytes, a refresh, a step.

    python benchmarks/reference.py [--rounds 10] [--batch 8] [--prompt 64] [--completion 32] [--random]

SmolLM2-135M-Instruct, unquantised. A step is the reference's pass over a rollout, and loss and backward on it. The
variants take turns, so that a drift of the machine's speed meets all; ratios are to TRL's full-model reference, round
by round. `--random` takes a small random model in place of SmolLM2.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import trl
from peft import LoraConfig
from trl.trainer.callbacks import SyncRefModelCallback
from trl.trainer.utils import use_adapter

import trl_steady

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import measuring
from benchmarks.seam import rollouts
from trl_steady.features.reference.tensors import paired, refresh


class Variant(NamedTuple):
    trainer: Any
    refresh: Callable[[], None]
    reference_bytes: int


def build(package: Any, folder: Path, options: argparse.Namespace, *, lora: bool, moves: bool) -> Any:
    peft_config = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM") if lora else None
    return measuring.build(
        package,
        str(folder),
        folder / "out",
        {"peft_config": peft_config},
        beta=0.04,
        sync_ref_model=moves,
        ref_model_mixup_alpha=1.0,
        per_device_train_batch_size=options.batch,
        num_generations=options.batch,
        model_init_kwargs={"dtype": "float32"},
    )


def size(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def variants(folder: Path, options: argparse.Namespace) -> dict[str, Variant]:
    theirs = build(trl, folder, options, lora=False, moves=True)
    ours = build(trl_steady, folder, options, lora=False, moves=True)
    frozen = build(trl, folder, options, lora=True, moves=False)
    adapter = build(trl_steady, folder, options, lora=True, moves=True)
    sync = SyncRefModelCallback.sync_target_model
    full, small = paired(ours.model, ours.ref_model), paired(adapter.model)
    whole = size(theirs.ref_model.parameters())
    return {
        "full, TRL": Variant(theirs, lambda: sync(theirs.model, theirs.ref_model, 1.0), whole),
        "full, ours": Variant(ours, lambda: refresh(full, 1.0), size(pair.reference for pair in full)),
        "LoRA, TRL (frozen: the base)": Variant(frozen, lambda: None, 0),
        "LoRA, ours": Variant(adapter, lambda: refresh(small, 1.0), size(pair.reference for pair in small)),
    }


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
    options = measuring.parser(__doc__, "random", rounds=10, batch=8, prompt=64, completion=32).parse_args()
    measuring.heading(options)
    with tempfile.TemporaryDirectory() as folder:
        measuring.save_model(Path(folder), options.random)
        built = variants(Path(folder), options)
        model_bytes = size(built["full, TRL"].trainer.model.parameters())
        inputs = rollouts(options, built["full, TRL"].trainer.model.device)
        work = {name: lambda v=variant: step(v.trainer, inputs) for name, variant in built.items()}
        steps = measuring.in_turns(work, options.rounds)
        refreshes = measuring.in_turns({name: variant.refresh for name, variant in built.items()}, options.rounds)
    print(f"model: {model_bytes / 2**20:,.1f} MiB; medians of {options.rounds} rounds, after one that is left out")
    for name, variant in built.items():
        ratio = measuring.quartiles(steps[name], steps["full, TRL"])
        share = variant.reference_bytes / model_bytes
        refresh, took = (statistics.median(times[name]) for times in (refreshes, steps))
        print(
            f"{name:29s} reference {variant.reference_bytes / 2**20:7.1f} MiB = {share:6.1%} of the model; "
            f"refresh {refresh * 1e3:7.2f} ms; step {took:6.3f} s = {ratio['median']:.3f} of TRL's full "
            f"({ratio['low']:.3f}, {ratio['high']:.3f})"
        )


if __name__ == "__main__":
    main()
