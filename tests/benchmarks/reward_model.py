"""A reward model on the policy's base beside one of its own, side by side: bytes, and time of scoring a rollout.

    python tests/benchmarks/reward_model.py [--rounds 5] [--answers 32] [--rank 16] [--random]

SmolLM2-135M-Instruct in float32. Both score the same texts in TRL's `_calculate_rewards`: a `RewardAdapter`, and a
model for sequence classification that TRL runs itself, with padding. The lengths of the answers are lognormal. They
take turns, and ratios are round by round. `--random` takes a small random model in place of SmolLM2.
"""

import argparse
import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import trl_steady

sys.path += [str(Path(__file__).parents[2])]
from tests.benchmarks import measuring, reference

MEDIAN = 63  # words of an answer


def build(folder: Path, reward: Any, options: argparse.Namespace) -> Any:
    lora = LoraConfig(r=options.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    parts = {"reward_funcs": reward, "peft_config": lora}
    batch = {"per_device_train_batch_size": 8, "num_generations": 8, "model_init_kwargs": {"dtype": "float32"}}
    return measuring.build(trl_steady, str(folder), folder / "out", parts, **batch)


def texts(count: int) -> tuple[list[str], list[str]]:
    """Prompts and answers. Quantiles in place of draws."""
    shares = [(i + 0.5) / count for i in range(count)]
    lengths = [min(320, round(MEDIAN * math.exp(statistics.NormalDist().inv_cdf(share)))) for share in shares]
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
    return ["one two three four"] * count, [" word" * lengths[i] for i in order]


def measured(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        measuring.save_model(folder, options.random)
        whole = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        whole.config.pad_token_id = tokenizer.pad_token_id
        adapter = trl_steady.RewardAdapter()
        trainers = {"adapter": build(folder, adapter, options), "own model": build(folder, whole, options)}
        prompts, answers = texts(options.answers)
        ids = [tokenizer(answer)["input_ids"] for answer in answers]
        assert adapter.part is not None and adapter.part.model is not None
        adapter.part._prompts = [tokenizer(prompt)["input_ids"] for prompt in prompts]
        found: dict[str, Any] = {"tokens": sum(map(len, ids)), "longest": max(map(len, ids))}
        found["bytes"] = {
            "adapter": reference.size(p for _, p in adapter.part.model.named_parameters()),
            "own model": reference.size(whole.parameters()),
        }
        rows = [{"prompt": prompt} for prompt in prompts]
        work = {n: lambda t=t: t._calculate_rewards(rows, prompts, answers, ids) for n, t in trainers.items()}
        found["seconds"] = measuring.in_turns(work, options.rounds)
    found["ratio"] = measuring.quartiles(found["seconds"]["own model"], found["seconds"]["adapter"])
    return found


def main() -> None:
    parser = measuring.parser(__doc__, "random", rounds=5, answers=32, rank=16)
    options = parser.parse_args()
    measuring.heading(options)
    found = measured(options)
    size, ratio = found["bytes"], found["ratio"]
    print(
        f"reward model: {size['adapter'] / 2**20:.1f} MiB on the policy's base, {size['own model'] / 2**20:.1f} MiB "
        f"alone ({size['adapter'] / size['own model']:.1%}); scoring takes {ratio['median']:.2f} times as long with a "
        f"model of its own ({ratio['low']:.2f}, {ratio['high']:.2f})"
    )


if __name__ == "__main__":
    main()
