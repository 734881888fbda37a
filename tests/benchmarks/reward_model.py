"""A reward model on the policy's base beside one of its own, side by side: bytes, and time of scoring a rollout.

    python tests/benchmarks/reward_model.py [--rounds 5] [--answers 32] [--rank 16] [--random] [--json PATH]

SmolLM2-135M-Instruct in float32. Both score the same texts in TRL's `_calculate_rewards`: a `RewardAdapter`, and a
model for sequence classification that TRL runs itself, with padding. The lengths of the answers are lognormal. They
take turns, and ratios are round by round. `--random` takes a small random model in place of SmolLM2.
"""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import trl_steady

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT), str(ROOT / "recipes")]
from tests.benchmarks import reference
from tests.benchmarks.seam import CUDA

MEDIAN = 63  # words of an answer


def build(folder: Path, reward: Any, options: argparse.Namespace) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        args = trl_steady.GRPOConfig(
            str(folder / "out"),
            per_device_train_batch_size=8,
            num_generations=8,
            use_cpu=not CUDA,
            bf16=CUDA,
            report_to="none",
            model_init_kwargs={"dtype": "float32"},
        )
        return trl_steady.GRPOTrainer(
            model=str(folder),
            reward_funcs=reward,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": ["a"]}),
            peft_config=LoraConfig(r=options.rank, target_modules="all-linear", task_type="CAUSAL_LM"),
        )


def texts(count: int) -> tuple[list[str], list[str]]:
    """Prompts and answers. Quantiles in place of draws."""
    shares = [(i + 0.5) / count for i in range(count)]
    lengths = [min(320, round(MEDIAN * math.exp(statistics.NormalDist().inv_cdf(share)))) for share in shares]
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
    return ["one two three four"] * count, [" word" * lengths[i] for i in order]


def measured(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        reference.save_model(folder, options.random)
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
        found["seconds"] = {name: [] for name in trainers}
        for number in range(-1, options.rounds):  # the first is not timed
            for name, trainer in trainers.items():
                rows = [{"prompt": prompt} for prompt in prompts]
                work = lambda t=trainer, r=rows: t._calculate_rewards(r, prompts, answers, ids)
                seconds = reference.seconds(work)
                if number >= 0:
                    found["seconds"][name].append(seconds)
                    print(f"  round {number + 1}, {name}: {seconds:.3f} s", flush=True)
    ratios = [a / b for a, b in zip(found["seconds"]["own model"], found["seconds"]["adapter"], strict=True)]
    found["ratio"] = dict(zip(("low", "median", "high"), statistics.quantiles(ratios, n=4), strict=True))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rounds", 5), ("answers", 32), ("rank", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--random", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.cuda.get_device_name() if CUDA else f"CPU, {torch.get_num_threads()} threads"
    print(f"{device}; torch {torch.__version__}; {vars(options)}", flush=True)
    found = measured(options)
    size, ratio = found["bytes"], found["ratio"]
    print(
        f"reward model: {size['adapter'] / 2**20:.1f} MiB on the policy's base, {size['own model'] / 2**20:.1f} MiB "
        f"alone ({size['adapter'] / size['own model']:.1%}); scoring takes {ratio['median']:.2f} times as long with a "
        f"model of its own ({ratio['low']:.2f}, {ratio['high']:.2f})"
    )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
