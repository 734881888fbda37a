"""Compare a step of ours that computes only what has a gradient with TRL's, side by side, with an engine's log-probs.

    python benchmarks/weights.py [--rounds 5] [--batch 8] [--window 4] [--scale 0.2] [--random] [--json PATH]

SmolLM2-135M-Instruct, fully fine-tuned in float32 (on CUDA under bf16 autocast), on the lognormal lengths of
benchmarks/padding.py. In a share z of the groups all answers earn the same. A step is all that TRL's
`training_step` does for an optimizer step that begins with a rollout: its columns, forward, loss and backward. A
`rollout_func` stands in for the engine, so that neither sampling nor a push of weights is timed. Each rollout feeds
one update, as with TRL's defaults, and there is no reference. All variants of a z take turns. The round before the
first is not timed: in it tokens, loss and gradient are compared.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from torch import Tensor

import trl_steady

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.tools import engines

from benchmarks import measuring, padding
from benchmarks.measuring import CUDA
from benchmarks.padding import GROUP, TRL, Outcome, Rollouts, difference, rollouts
from trl_steady.trl_bridge.patching import patched

OLD_PASS, BOTH, BUDGET = "skip_old_pass", "skip_old_pass, skip_zero_weight", "both, token_budget"
VARIANTS = (TRL, "trim_padding", OLD_PASS, BOTH, BUDGET)


class Bench:
    """Trainers on the same weights: TRL's, ours with the pass of the old policy, and ours without it."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.rollout: Rollouts = rollouts("lognormal", options)
        self.idle = 0  # groups whose answers earn the same
        self.budget = options.batch * self.rollout.padded_width // 3
        self._folder, self._options = folder, options
        with pytest.MonkeyPatch.context() as patch:
            for module in (engines.vllm_generation, engines.vllm_client):
                patch.setattr(module, "is_vllm_available", lambda **_: True)
            engines.colocate(engines.Engine(), patch)
            theirs, padded, ours = (
                self._build(*each)
                for each in ((trl, {}), (trl_steady, {"skip_old_pass": False}), (trl_steady, {"skip_old_pass": True}))
            )
        self.trainers = {TRL: theirs, "trim_padding": padded, OLD_PASS: ours, BOTH: ours, BUDGET: ours}

    def _build(self, package: Any, more: dict[str, Any]) -> Any:
        options = self._options
        settings = {
            "beta": 0.0,
            "gradient_accumulation_steps": options.window,
            "steps_per_generation": options.window,
            "per_device_train_batch_size": options.batch,
            "num_generations": GROUP,
            "model_init_kwargs": {"dtype": "float32", "attn_implementation": "sdpa"},
            "use_vllm": True,
            "vllm_mode": "colocate",
            **more,
        }
        made = {"rollout_func": self._answered, "reward_funcs": self._earned}
        trainer = measuring.build(package, str(self._folder), self._folder / "out", made, **settings)
        trainer._last_loaded_step = trainer.state.global_step  # nothing to push
        return trainer

    def _answered(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        logprobs = [[-5.0] * len(ids) for ids in self.rollout.completions]
        return {
            "prompt_ids": self.rollout.prompts,
            "completion_ids": self.rollout.completions,
            "logprobs": logprobs,
        }

    def _earned(self, prompts: list[str], **_: Any) -> list[float]:
        rows = [int(prompt) for prompt in prompts]
        return [1.0 if row // GROUP < self.idle else float(row % GROUP == 0) for row in rows]

    def step(self, variant: str) -> Outcome:
        """Run an optimizer step without the optimizer."""
        trainer = self.trainers[variant]
        trainer.model.zero_grad()
        trainer._metrics["train"].clear()
        if variant == TRL:
            losses = measuring.window(trainer)
        else:
            skips = {"skip_zero_weight": variant in (BOTH, BUDGET)}
            with patched(trainer.args, {**skips, "token_budget": self.budget if variant == BUDGET else None}):
                losses = measuring.window(trainer)
        return Outcome(losses, [p.grad for p in trainer.model.parameters() if p.grad is not None])

    def tokens(self, variant: str) -> tuple[int, Outcome]:
        """Return the tokens that a step computes, padding included, and its outcome."""
        counts: list[int] = []

        def count(_: object, inputs: tuple[Tensor, ...]) -> None:
            counts.append(inputs[0].numel())

        hook = self.trainers[variant].model.get_input_embeddings().register_forward_pre_hook(count)
        outcome = self.step(variant)
        hook.remove()
        return sum(counts), outcome


def measured(bench: Bench, idle: int, rounds: int) -> dict[str, Any]:
    """Return the tokens, the differences from TRL's step, the seconds and the ratios of each variant."""
    bench.idle = idle
    found: dict[str, Any] = {}
    theirs: Outcome | None = None
    for variant in VARIANTS:
        tokens, outcome = bench.tokens(variant)
        theirs = theirs or outcome
        found[variant] = {"tokens": tokens, "difference": difference(outcome, theirs)._asdict()}
    del theirs, outcome
    seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for number in range(rounds):
        for variant in VARIANTS if number % 2 else reversed(VARIANTS):
            seconds[variant].append(measuring.seconds(lambda v=variant: bench.step(v)))
    for variant, of_variant in found.items():
        of_variant |= {"seconds": seconds[variant]}
        of_variant |= {"ratio": measuring.quartiles(seconds[TRL], seconds[variant])}
    return found


def main() -> None:
    parser = measuring.parser(__doc__, "random", rounds=5, batch=8, window=4)
    parser.add_argument("--scale", type=float, default=1.0 if CUDA else 0.2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = measuring.heading(options)
    given = {name: value for name, value in vars(options).items() if name != "json"}
    results: dict[str, Any] = {"device": device, "torch": torch.__version__, "trl": trl.__version__, "given": given}
    with tempfile.TemporaryDirectory() as folder:
        padding.save_model(Path(folder), argparse.Namespace(random=options.random, large=False))
        bench = Bench(Path(folder), options)
        groups = options.window * options.batch // GROUP
        results["shares"] = {}
        for idle in range(groups):
            results["shares"][str(idle / groups)] = found = measured(bench, idle, options.rounds)
            print(f"z = {idle / groups:.2f}", flush=True)
            for variant, of_variant in found.items():
                ratio, apart = of_variant["ratio"], of_variant["difference"]
                print(
                    f"  {variant:34s} {statistics.median(of_variant['seconds']):8.3f} s, TRL's {ratio['median']:.2f} "
                    f"times as long ({ratio['low']:.2f}, {ratio['high']:.2f}); {of_variant['tokens']:,} tokens, "
                    f"{of_variant['tokens'] / found[TRL]['tokens']:.1%} of TRL's; from TRL's: loss "
                    f"{apart['loss']:.1e}, gradient {apart['gradient']:.1e}",
                    flush=True,
                )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
