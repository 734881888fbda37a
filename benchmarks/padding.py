"""What leaving out padding saves: ours and TRL's side by side in one run, a whole optimizer step on fixed rollouts.

    python benchmarks/padding.py [--rounds 5] [--batch 8] [--window 4] [--scale 0.5] [--sets NAME ...]
        [--checkpointing] [--random | --large] [--json PATH]

SmolLM2-135M-Instruct, fully fine-tuned in float32 (on CUDA under bf16 autocast). A step is all that TRL's
`training_step` does for the micro-batches of an optimizer step that begins with a rollout: log-probs of the old
policy, log-probs of the reference, then forward, loss and backward of each micro-batch; a `rollout_func` stands in for
the sampling. The variants take turns, so that a drift of the machine's speed meets all; the ratios are round by round.
The round before the first is not timed: in it tokens, memory, loss and gradients are compared.

`--scale` multiplies all lengths. `--random` takes a small random model in place of SmolLM2, `--large` a random one of
1.2 billion parameters.
"""

import argparse
import contextlib
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import trl
from torch import Tensor

import trl_steady

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import measuring
from benchmarks.gpu import block
from benchmarks.gpu.block import Figure
from benchmarks.measuring import CUDA
from trl_steady.trl_bridge.patching import patched

GROUP = 8  # completions of a prompt
MEDIAN = 63  # tokens of a completion
TRL = "TRL"
VARIANTS = {
    "lognormal": ("ours", "ours, token_budget"),
    "long prompts": ("ours", "ours, share_prompts", "ours, share_prompts and token_budget"),
    "equal": ("ours",),
}
"""By set: our options, which the name of the variant has."""
SETS = tuple(VARIANTS)


class Rollouts(NamedTuple):
    """Token ids of a rollout; completions of a group have one prompt."""

    prompts: list[list[int]]
    completions: list[list[int]]

    @property
    def tokens(self) -> int:
        return sum(map(len, [*self.prompts, *self.completions]))

    @property
    def padded_width(self) -> int:
        """The width of TRL's batches: the longest prompt and the longest completion of the rollout."""
        return max(map(len, self.prompts)) + max(map(len, self.completions))


def rollouts(name: str, options: argparse.Namespace) -> Rollouts:
    """Return the same data of one of the `SETS` each time."""
    count = options.window * options.batch
    groups = count // GROUP
    generator = torch.Generator().manual_seed(0)
    if name == "lognormal":
        # quantiles in place of draws, so that 35 % of TRL's tokens are real however many sequences there are; the tail
        # is cut, as by a limit on the length
        shares = [(i + 0.5) / count for i in range(count)]
        lengths = [min(320.0, MEDIAN * math.exp(statistics.NormalDist().inv_cdf(share))) for share in shares]
        of_prompts = [20 + 40 * i / max(1, groups - 1) for i in range(groups)]
    elif name == "long prompts":
        lengths, of_prompts = [48 + 32 * i / (count - 1) for i in range(count)], [512.0] * groups
    else:
        lengths, of_prompts = [120.0] * count, [40.0] * groups

    def ids(length: float) -> list[int]:
        return torch.randint(50, 200, (max(1, round(length * options.scale)),), generator=generator).tolist()

    completions = [ids(lengths[i]) for i in torch.randperm(count, generator=generator).tolist()]
    prompts = [ids(length) for length in of_prompts]
    return Rollouts([prompt for prompt in prompts for _ in range(GROUP)], completions)


def variants(name: str, rollout: Rollouts, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Variants of our options, in each of the `SETS`. A budget is a third of TRL's micro-batch, padding included."""
    possible = {"token_budget": options.batch * rollout.padded_width // 3, "share_prompts": True}
    return {variant: {own: value for own, value in possible.items() if own in variant} for variant in VARIANTS[name]}


PASSES = 3  # old policy, reference, policy
OFF = {"token_budget": None, "share_prompts": False}
LARGE = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
}


class Source:
    """A `rollout_func` that gives what it is told to."""

    def __init__(self) -> None:
        self.rollout = Rollouts([], [])

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        return {"prompt_ids": self.rollout.prompts, "completion_ids": self.rollout.completions, "logprobs": None}


class Outcome(NamedTuple):
    """Of a step."""

    losses: list[float]
    """Of the micro-batches; with a budget, of all in the last."""
    gradients: list[Tensor]


class Bench:
    """Both trainers on the same weights, with the reference a little away from the policy.

    The options of a variant are set on the arguments of the one trainer of ours, for memory's sake.
    """

    def __init__(self, folder: Path, options: argparse.Namespace, **config: Any) -> None:
        self.source = Source()
        self.trainers = {
            package.__name__: self._build(package, folder, options, **config) for package in (trl, trl_steady)
        }
        self.nudge()

    def _build(self, package: Any, folder: Path, options: argparse.Namespace, **config: Any) -> Any:
        settings = {
            "beta": 0.04,
            "num_iterations": 2,  # with one, TRL needs no log-probs of the old policy
            "gradient_accumulation_steps": options.window,
            "steps_per_generation": options.window,
            "per_device_train_batch_size": options.batch,
            "num_generations": GROUP,
            "gradient_checkpointing": options.checkpointing,
            "model_init_kwargs": {"dtype": "float32", "attn_implementation": "sdpa"},
            **config,
        }
        return measuring.build(package, str(folder), folder / "out", {"rollout_func": self.source}, **settings)

    def trainer(self, variant: str) -> Any:
        return self.trainers["trl" if variant == TRL else "trl_steady"]

    def nudge(self) -> None:
        """Move the policies, both alike."""
        for trainer in self.trainers.values():
            generator = torch.Generator().manual_seed(1)
            for parameter in trainer.model.parameters():
                noise = torch.randn(parameter.shape, generator=generator).to(parameter)
                parameter.data += 0.02 * parameter.data.abs().mean() * noise

    def window(self, variant: str, options: Mapping[str, Any]) -> list[float]:
        """Run the micro-batches of an optimizer step, and return the losses."""
        trainer = self.trainer(variant)
        with patched(trainer.args, {} if variant == TRL else {**OFF, **options}):
            return measuring.window(trainer)

    def clear(self, variant: str) -> None:
        """Drop what a step leaves behind, but for its rollout."""
        trainer = self.trainer(variant)
        trainer.model.zero_grad()
        trainer._metrics["train"].clear()
        trainer.state.num_input_tokens_seen = 0

    def outcome(self, variant: str, losses: list[float]) -> Outcome:
        """Of the last step. The gradients are its own, not copies: they are not written to after a `clear`."""
        trainer = self.trainer(variant)
        return Outcome(losses, [p.grad for p in trainer.model.parameters() if p.grad is not None])


@contextlib.contextmanager
def counting(trainer: Any) -> Any:
    """A list to which each forward of policy and reference adds the tokens it computes."""
    counts: list[int] = []
    count = lambda _, inputs: counts.append(inputs[0].numel())
    embeddings = [model.get_input_embeddings() for model in (trainer.model, trainer.ref_model)]
    hooks = [embedding.register_forward_pre_hook(count) for embedding in embeddings]
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()


def peak_bytes(work: Callable[[], Any]) -> tuple[Any, int]:
    """What `work` returns, and the peak of tensors' bytes above those resident before, as the allocator reports it.

    On CPU it is the running sum over each allocation and each free that the profiler has seen, which is the same at
    every run; a process's resident memory is not. Buffers that a kernel keeps for itself are in neither, and a block
    that was resident before and is freed in the step is not subtracted.
    """
    if CUDA:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        resident = torch.cuda.memory_allocated()
        result = work()
        torch.cuda.synchronize()
        return result, torch.cuda.max_memory_allocated() - resident
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = work()
    kineto: Any = profiler.profiler
    events = [event for event in kineto.kineto_results.events() if event.name() == "[memory]"]
    now, peak = 0, 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return result, peak


class Difference(NamedTuple):
    """From TRL's step; 0 where not a bit differs."""

    loss: float
    """Of the step's, relative to the largest of a micro-batch: the micro-batches' may cancel."""
    gradient: float
    """The largest, relative to the largest entry of TRL's gradient."""


def difference(own: Outcome, theirs: Outcome) -> Difference:
    pairs = list(zip(own.gradients, theirs.gradients, strict=True))
    largest = max(float(b.abs().max()) for _, b in pairs)
    gradient = max(float((a - b).abs().max()) for a, b in pairs) / largest
    return Difference(abs(sum(own.losses) - sum(theirs.losses)) / max(map(abs, theirs.losses)), gradient)


def save_model(folder: Path, options: argparse.Namespace) -> None:
    measuring.save_model(folder, options.random or options.large, LARGE if options.large else measuring.SMALL)


def measured(bench: Bench, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Of a set: each variant's tokens, memory, differences, seconds and ratios."""
    rollout = bench.source.rollout = rollouts(name, options)
    chosen = {TRL: {}, **variants(name, rollout, options)}
    padded, real = PASSES * len(rollout.prompts) * rollout.padded_width, PASSES * rollout.tokens
    results: dict[str, Any] = {"padded": padded, "real": real, "variants": {}}
    theirs: Outcome | None = None
    for variant, ours in chosen.items():
        trainer = bench.trainer(variant)
        bench.clear(variant)
        with counting(trainer) as counts:
            losses, peak = peak_bytes(lambda v=variant, o=ours: bench.window(v, o))
        outcome = bench.outcome(variant, losses)
        theirs = theirs or outcome
        apart = difference(outcome, theirs)
        results["variants"][variant] = {
            "options": ours,
            "tokens": sum(counts),
            "peak_bytes": peak,
            "difference": apart._asdict(),
            "seconds": [],
        }
        if variant == TRL:
            masks = [(b["prompt_mask"], b["completion_mask"]) for b in trainer._buffered_inputs[:1]]
            results["micro_batch"] = [mask.sum(-1).tolist() for mask in masks[0]]
            results["widths"] = [mask.size(1) for mask in masks[0]]
    del theirs, outcome
    for number in range(options.rounds):
        for variant, ours in chosen.items():
            bench.clear(variant)
            took = measuring.seconds(lambda v=variant, o=ours: bench.window(v, o))
            results["variants"][variant]["seconds"].append(took)
            print(f"  round {number + 1}, {variant}: {took:.3f} s", flush=True)
    for of_variant in results["variants"].values():
        trls = results["variants"][TRL]["seconds"]
        of_variant["ratio"] = measuring.quartiles(trls, of_variant["seconds"])
    return results


def report(results: Mapping[str, Any]) -> None:
    for name, of_set in results["sets"].items():
        trls = of_set["variants"][TRL]
        print(f"{name}: {of_set['real'] / of_set['padded']:.1%} of TRL's tokens are real")
        for variant, found in of_set["variants"].items():
            ratio, apart, seconds = found["ratio"], found["difference"], statistics.median(found["seconds"])
            print(
                f"  {variant:37s} {seconds:8.3f} s, TRL's {ratio['median']:.2f} times as long "
                f"({ratio['low']:.2f}, {ratio['high']:.2f}); {found['tokens']:,} tokens computed for "
                f"{of_set['real']:,} real ones, {found['tokens'] / trls['tokens']:.1%} of TRL's; peak memory above "
                f"resident {found['peak_bytes'] / 2**20:,.1f} MiB, {found['peak_bytes'] / trls['peak_bytes']:.1%} of "
                f"TRL's; from TRL's: loss {apart['loss']:.1e}, gradient {apart['gradient']:.1e}"
            )


def figures(results: Mapping[str, Any]) -> list[Figure]:
    """Return what `make gpu` shows: for each variant of ours, time, memory and gradient beside TRL's."""
    found: list[Figure] = []
    for name, of_set in results["sets"].items():
        trls = of_set["variants"][TRL]
        found.append(Figure(f"{name}, TRL: a step", statistics.median(trls["seconds"]), "s"))
        for variant, own in of_set["variants"].items():
            if variant == TRL:
                continue
            start = f"{name}, {variant}"
            found += [
                Figure(f"{start}: TRL's seconds over ours", own["ratio"]["median"]),
                Figure(f"{start}: tokens computed, of TRL's", own["tokens"] / trls["tokens"]),
                Figure(f"{start}: peak memory, of TRL's", own["peak_bytes"] / trls["peak_bytes"]),
                Figure(f"{start}: largest difference of the gradient", own["difference"]["gradient"]),
            ]
    return found


def main() -> None:
    flags = ("random", "large", "checkpointing")
    # a round takes turns, a batch is of sequences, a window of the micro-batches of an optimizer step
    parser = measuring.parser(__doc__, *flags, rounds=5, batch=8, window=4)
    parser.add_argument("--scale", type=float, default=1.0 if CUDA else 0.5)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=SETS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.rounds < 3 or options.batch % 2:
        parser.error("--rounds is 3 or more, --batch even")
    device = measuring.heading(options)
    given = {name: value for name, value in vars(options).items() if name != "json"}
    results: dict[str, Any] = {"device": device, "torch": torch.__version__, "trl": trl.__version__, "given": given}
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), options)
        bench = Bench(Path(folder), options)
        results["sets"] = {name: measured(bench, name, options) for name in options.sets}
    report(results)
    results["figures"] = [each._asdict() for each in figures(results)]
    if options.json:
        block.save(options.json, results)


if __name__ == "__main__":
    main()
