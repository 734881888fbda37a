"""What a critic costs: bytes of each part on one base, and memory and time of a step against GRPO's, side by side.

    python benchmarks/critic.py [--rounds 5] [--batch 8] [--window 2] [--rank 16] [--kinds NF4 LoRA full]
        [--random | --large] [--json PATH]

SmolLM2-135M-Instruct: NF4 with LoRA, float32 with LoRA, and fully fine-tuned. A step is all that the trainer does for
the micro-batches of an optimizer step that begins with a rollout, without the sampling and without the step of the
policy's optimizer. The critic's optimizer takes its step. Both trainers score a reference, of a KL in the loss (GRPO)
or in the reward (PPO). They take turns, and ratios are round by round. `--random` takes a small random model in place
of SmolLM2, `--large` a random one of 1.2 billion parameters.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peft import LoraConfig

import trl_steady

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.tools import wide

from benchmarks import measuring, padding, reference
from benchmarks.measuring import CUDA

KINDS = ("NF4", "LoRA", "full")


def build(kind: str, method: str, folder: Path, source: padding.Source, options: argparse.Namespace) -> Any:
    lora = LoraConfig(r=options.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return measuring.build(
        trl_steady,
        wide.load(folder, "nf4", "cuda:0" if CUDA else "cpu") if kind == "NF4" else str(folder),
        folder / "out",
        {"peft_config": None if kind == "full" else lora, "rollout_func": source},
        method,
        **({"beta": 0.04} if method == "GRPO" else {"kl_coef": 0.05}),
        sync_ref_model=True,
        num_iterations=2,  # with one, GRPO needs no log-probs of the old policy
        gradient_accumulation_steps=options.window,
        steps_per_generation=options.window,
        per_device_train_batch_size=options.batch,
        num_generations=padding.GROUP,
        adapter_dtype="float32" if kind == "NF4" else None,
        model_init_kwargs={"dtype": "float32"},
    )


def sizes(trainer: Any) -> dict[str, int]:
    """Bytes of what stands in memory, part by part."""
    critic = {id(p): p.nbytes for _, p in trainer.critic.named_parameters()}
    if trainer.ref_model is not None:
        frozen = reference.size(trainer.ref_model.parameters())
        policy = reference.size(trainer.model.parameters())
        return {"base": 0, "policy": policy, "reference": frozen, "critic": sum(critic.values())}
    of: dict[str, int] = {"base": 0, "policy": 0, "reference": 0, "critic": sum(critic.values())}
    for name, parameter in trainer.model.named_parameters():
        parts = name.split(".")
        if id(parameter) not in critic:
            of["policy" if "default" in parts else "reference" if "ref" in parts else "base"] += parameter.nbytes
    return of


def clear(trainer: Any) -> None:
    trainer.create_optimizer()
    trainer.model.zero_grad()
    trainer._metrics["train"].clear()


def measured(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    source = padding.Source()
    with tempfile.TemporaryDirectory() as folder:
        padding.save_model(Path(folder), options)
        lengths = argparse.Namespace(window=options.window, batch=options.batch, scale=options.scale)
        source.rollout = padding.rollouts("lognormal", lengths)
        trainers = {method: build(kind, method, Path(folder), source, options) for method in ("GRPO", "PPO")}
        found: dict[str, Any] = {"bytes": sizes(trainers["PPO"]), "peak_bytes": {}, "seconds": {}}
        for method, trainer in trainers.items():
            clear(trainer)
            _, found["peak_bytes"][method] = padding.peak_bytes(lambda t=trainer: measuring.window(t))
            found["seconds"][method] = []
        for number in range(options.rounds):
            for method, trainer in trainers.items():
                clear(trainer)
                found["seconds"][method].append(measuring.seconds(lambda t=trainer: measuring.window(t)))
                print(f"  {kind}, round {number + 1}, {method}: {found['seconds'][method][-1]:.3f} s", flush=True)
    found["ratio"] = measuring.quartiles(found["seconds"]["PPO"], found["seconds"]["GRPO"])
    return found


def report(results: Mapping[str, Any]) -> None:
    for kind, found in results["kinds"].items():
        own, peaks, ratio = found["bytes"], found["peak_bytes"], found["ratio"]
        base = own["base"] or own["policy"]
        parts = ", ".join(f"{name} {size / 2**20:.1f} MiB ({size / base:.1%})" for name, size in own.items() if size)
        print(
            f"{kind}: {parts}; peak of a step above resident: GRPO {peaks['GRPO'] / 2**20:,.1f} MiB, PPO "
            f"{peaks['PPO'] / 2**20:,.1f} MiB ({peaks['PPO'] / peaks['GRPO']:.2f}); time of a step: PPO takes "
            f"{ratio['median']:.2f} times as long as GRPO ({ratio['low']:.2f}, {ratio['high']:.2f})"
        )


def main() -> None:
    parser = measuring.parser(__doc__, "random", "large", rounds=5, batch=8, window=2, rank=16)
    parser.add_argument("--scale", type=float, default=0.5)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = measuring.heading(options)
    results = {"device": device, "kinds": {kind: measured(kind, options) for kind in options.kinds}}
    report(results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
