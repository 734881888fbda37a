"""What the kept sampling mask costs: optimizer steps with it, and with TRL's fused head alone, side by side.

    python benchmarks/sampling_mask.py [--rounds 15] [--batch 4] [--prompt 64] [--completion 128] [--layers 4]
        [--small] [--json PATH]

Random models in float32 (on CUDA under bf16 autocast) with few layers, so that the head counts: with SmolLM2's
vocabulary of 49,152 and width of 576, and with Qwen2.5's of 151,936 and 896 (`--small`: one of 1,024). A step is the
old policy's log-probs of a micro-batch, then its forward, loss and backward. Rollouts are the same with and without.
Sets are "peaked": many of one token, few in the median and some of hundreds. TRL's head also runs if sets are missing.
With and without take turns, so that a drift of the machine's speed meets both; the ratios are round by round.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

import trl_steady

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.tools import tiny
from tests.tools.sets import candidate_sets

from benchmarks import measuring
from benchmarks.gpu.block import Figure
from benchmarks.measuring import CUDA
from benchmarks.padding import peak_bytes
from trl_steady.trl_bridge.patching import patched

# vocabulary: width, heads, key heads, inner width
MODELS = {49_152: (576, 9, 3, 1536), 151_936: (896, 14, 2, 4864), 1024: (64, 2, 2, 128)}
LARGE, SMALL = (49_152, 151_936), (1024,)


def peaked(count: int) -> Tensor:
    """Sizes of sets, log-normal, from 1 to 512."""
    return torch.randn(count).mul(1.5).add(0.4).exp().long().clamp(1, 512)


SETS: dict[str, Callable[[int], Tensor]] = {
    "peaked": peaked,
    "peaked, one in ten missing": lambda count: peaked(count).where(torch.rand(count) > 0.1, 0),
}


def build(vocabulary: int, options: argparse.Namespace, folder: str) -> Any:
    """A trainer of a random model with its micro-batch in `buffered`."""
    width, heads, key_heads, inner = MODELS[vocabulary]
    torch.manual_seed(0)
    sizes = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "intermediate_size": inner,
        "num_hidden_layers": options.layers,
        "tie_word_embeddings": True,
    }
    with torch.device("cuda" if CUDA else "cpu"):
        model = Qwen2ForCausalLM(Qwen2Config(**{**tiny.SIZES, **sizes, "initializer_range": 0.02}))
    lengths = torch.randint(options.completion // 2, options.completion + 1, (options.batch,)).tolist()
    rollout = {
        "prompt_ids": measuring.random_ids([options.prompt]) * options.batch,
        "completion_ids": measuring.random_ids(lengths),
        "logprobs": None,
    }
    parts = {"processing_class": tiny.tokenizer(), "rollout_func": lambda prompts, trainer: dict(rollout)}
    trainer = measuring.build(
        trl_steady,
        model,
        folder,
        parts,
        trim_padding=False,
        num_iterations=2,  # with one, TRL needs no log-probs of the old policy
        gradient_accumulation_steps=1,
        per_device_train_batch_size=options.batch,
        num_generations=options.batch,
    )
    trainer.buffered = trainer._prepare_inputs([{"prompt": "a"} for _ in range(options.batch)])
    return trainer


def kept_tokens(inputs: dict[str, Any], vocabulary: int, sizes: Callable[[int], Tensor]) -> Any:
    """Random sets of the tokens of a micro-batch, each with its token."""
    torch.manual_seed(1)
    targets, mask = inputs["completion_ids"].flatten().tolist(), inputs["completion_mask"].flatten().tolist()
    sets = []
    for target, is_token, size in zip(targets, mask, sizes(len(targets)).tolist(), strict=True):
        others = torch.randint(vocabulary, (size,))[: max(size - 1, 0)].tolist()
        sets.append(list({target, *others}) if is_token and size else [])
    return candidate_sets(sets).to(inputs["completion_ids"].device).split(inputs["completion_ids"].size(1))


def step(trainer: Any, inputs: dict[str, Any]) -> float:
    """The gradients' norm after the old policy's log-probs, and forward, loss and backward."""
    trainer.model.zero_grad()
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    with torch.no_grad(), patched(trainer, {"_samples": inputs}):
        old, _, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, mask, inputs["completion_ids"].size(1)
        )
    loss = trainer.compute_loss(trainer.model, {**inputs, "old_per_token_logps": old})
    trainer.accelerator.backward(loss)
    return measuring.grad_norm(trainer)


def compare(trainer: Any, name: str, vocabulary: int, rounds: int) -> list[Figure]:
    """Print and return ratios of steps with sets to steps without."""
    without = trainer.buffered
    kept = kept_tokens(without, vocabulary, SETS[name])
    with_sets = {**without, "kept_tokens": kept}
    counts = torch.cat([offsets.diff() for _, offsets in kept])
    counts = counts[counts > 0].double()
    work = {"with": lambda: step(trainer, with_sets), "without": lambda: step(trainer, without)}
    norms = {each: once() for each, once in work.items()}  # also to warm up
    if norms["with"] == norms["without"]:
        raise RuntimeError("the step with sets does not read them")
    # the least of three: whether autograd sums a tied head's two gradients in place differs from step to step
    peaks = {each: min(peak_bytes(once)[1] for _ in range(3)) for each, once in work.items()}
    found = measuring.in_turns(work, rounds)
    ratio = measuring.quartiles(found["with"], found["without"])
    weights = sum(p.nbytes for p in trainer.model.parameters())
    print(
        f"vocabulary {vocabulary:,}, sets {name} (mean {counts.mean():.1f}, median {counts.median():.0f}, "
        f"{(counts == 1).double().mean():.0%} of one token; {len(counts)} tokens): time with / without "
        f"{ratio['median']:.3f} (quartiles {ratio['low']:.3f}, {ratio['high']:.3f}; {rounds} rounds; without "
        f"{statistics.median(found['without']):.2f} s); "
        f"peak memory above the weights {peaks['with'] / 2**20:,.0f} MiB / "
        f"{peaks['without'] / 2**20:,.0f} MiB = {peaks['with'] / peaks['without']:.3f}, with them "
        f"{(peaks['with'] + weights) / (peaks['without'] + weights):.3f}",
        flush=True,
    )
    start = f"vocabulary {vocabulary}, sets {name}"
    return [
        Figure(f"{start}: seconds with them over seconds without", ratio["median"]),
        Figure(f"{start}: peak memory with them over without", peaks["with"] / peaks["without"]),
    ]


def main() -> None:
    parser = measuring.parser(__doc__, "small", rounds=15, batch=4, prompt=64, completion=128, layers=4)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    measuring.heading(options)
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        for vocabulary in SMALL if options.small else LARGE:
            trainer = build(vocabulary, options, folder)
            for name in SETS:
                figures += compare(trainer, name, vocabulary, options.rounds)
    measuring.record(options.json, figures)


if __name__ == "__main__":
    main()
