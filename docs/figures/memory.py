"""Print the table of docs/memory.md: how much memory a run needs, by model, training mode and context.

    python docs/figures/memory.py [--write] [--measure]

`--measure` trains small models on CPU, which takes three to ten minutes, and compares their peak memory with the
formulas. `--write` puts the table and the range of the comparison into the page, and the comparison into memory.json.
"""

import argparse
import gc
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from page_tables import show

from trl_steady.functional.memory import ADAM, NF4, RANK, Model, on_host, passes

PAGE = Path(__file__).parents[1] / "memory.md"
RECORDED = Path(__file__).with_suffix(".json")
MODES = ("full", "LoRA", "QLoRA")
CONTEXTS = (2048, 8192, 32_768)


QWEN3 = {
    "0.6B": Model(1024, 28, 16, 8, 3072, tied=True),
    "1.7B": Model(2048, 28, 16, 8, 6144, tied=True),
    "4B": Model(2560, 36, 32, 8, 9728, tied=True),
    "8B": Model(4096, 36, 32, 8, 12_288),
    "14B": Model(5120, 40, 40, 8, 17_408),
    "32B": Model(5120, 64, 64, 8, 25_600),
    "30B-A3B": Model(2048, 48, 32, 4, 768, experts=128, chosen=8),
}


def states(model: Model, mode: str) -> dict[str, float]:
    """Return the bytes that stay for the whole run, and those of a reference."""
    trained = model.parameters if mode == "full" else model.adapter
    size = 2 if mode == "QLoRA" else 4  # bytes of a trained parameter
    frozen = model.linear * NF4 + (model.parameters - model.linear) * 2 if mode == "QLoRA" else model.parameters * 2
    return {
        "weights": model.parameters * 4 if mode == "full" else frozen,
        "adapter": 0 if mode == "full" else trained * size,
        "gradients": trained * size,
        "optimizer": trained * size * ADAM,
        "reference": trained * size,
        "critic": trained * 4 * (2 + ADAM),  # float32 weights, gradients and moments
    }


def of_passes(model: Model, mode: str, tokens: int, **setting: Any) -> float:
    """Return the bytes of a micro-batch: tensors kept for backward, and the highest of the three moments."""
    kept, *moments = passes(model, mode, tokens, **setting).values()
    return kept + max(moments)


def peak(model: Model, mode: str, tokens: int, **setting: Any) -> float:
    """Return the bytes of a run: its states and a micro-batch."""
    resident = states(model, mode)
    own = sum(resident[name] for name in ("weights", "adapter", "gradients", "optimizer"))
    return own + of_passes(model, mode, tokens, **setting)


def critic(model: Model, mode: str, tokens: int) -> float:
    """Return the bytes that a critic adds: its states, and what its passes take beyond the policy's."""
    beyond = of_passes(model, mode, tokens, critic=True) - of_passes(model, mode, tokens)
    return states(model, mode)["critic"] + max(0, beyond)


def rendered(heading: list[str], rows: list[list[str]]) -> str:
    """Return a table in Markdown."""
    lines = [f"| {' | '.join(row)} |" for row in (heading, *rows)]
    return "\n".join([lines[0], "|---" * len(heading) + "|", *lines[1:]])


def gigabytes(number: float) -> str:
    """Return 10^9 bytes with two or three digits; nothing for 0."""
    size = number / 1e9
    if not size:
        return ""
    if size < 0.95:
        return f"{size:.2g}"
    return f"{size:.1f}" if size < 99.5 else f"{size:.0f}"


def totals() -> str:
    """Return the computed table of the page."""
    rows = []
    for name, model in QWEN3.items():
        for mode in MODES:
            resident = states(model, mode)
            runs = [gigabytes(peak(model, mode, tokens)) for tokens in CONTEXTS]
            added = [gigabytes(resident["reference"]), gigabytes(critic(model, mode, tokens=8192))]
            rows.append([f"{name}, {mode}", *runs, *added])
    contexts = [f"{tokens:,} tokens" for tokens in CONTEXTS]
    return rendered(["model, training", *contexts, "add for a reference", "add for a critic"], rows)


def of_checkpointing() -> str:
    """Return the computed table of gradient checkpointing's settings."""
    model, mode = QWEN3["8B"], "LoRA"
    settings: list[tuple[str, dict[str, Any]]] = [
        ("`gradient_checkpointing=False`", {"checkpointing": False}),
        ('`{"every_n_layers": 4}`', {"every_n_layers": 4}),
        ('`{"every_n_layers": 2}`', {"every_n_layers": 2}),
        ("none (the default)", {}),
        ('`{"offload": True}`', {"offload": True}),
    ]
    rows: list[list[str]] = []
    for name, setting in settings:
        runs = [gigabytes(peak(model, mode, tokens, **setting)) for tokens in CONTEXTS]
        held = on_host(model, mode, CONTEXTS[-1]) * setting.get("offload", False)
        rows.append([name, *runs, gigabytes(held)])
    contexts = [f"{tokens:,} tokens" for tokens in CONTEXTS]
    return rendered(["`gradient_checkpointing_kwargs`", *contexts, f"host, {contexts[-1]}"], rows)


NAMES = [
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
    "tie_word_embeddings", "num_experts", "num_experts_per_tok", "head_dim", "vocab_size",
]  # fmt: skip
"""Names in transformers' configs of the first fields of `Model`, in their order."""
CASES = {
    "large head": (Model(384, 8, 8, 4, 1152, head_dim=64, vocab=8192), 2048),
    "many weights": (Model(512, 8, 8, 4, 4096, head_dim=64, vocab=512), 1024),
    "wide layers": (Model(1024, 2, 8, 4, 8192, head_dim=64, vocab=512), 1024),
    "mixture": (Model(512, 4, 8, 4, 512, experts=16, chosen=8, head_dim=64, vocab=512), 1024),
    "narrow experts": (Model(512, 4, 12, 4, 192, experts=16, chosen=8, head_dim=64, vocab=512), 1024),
}
"""Small models and the tokens of their micro-batches. In the first three, different moments decide the peak.

Hidden and inner size differ in all but "mixture", and the size of the queries differs from both in the last.
"""


def measured(
    model: Model, mode: str, tokens: int, checkpointing: bool, **options: dict[str, Any]
) -> tuple[float, float]:
    """Train two steps of two micro-batches on CPU. Return the bytes of all states and the peak, as allocated."""
    sys.path.insert(0, str(PAGE.parents[1]))
    import torch
    from benchmarks.padding import peak_bytes
    from datasets import Dataset
    from peft import LoraConfig
    from tests.tools import tiny
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen3Config, Qwen3MoeConfig

    import trl_steady

    sizes = {**tiny.SIZES, **dict(zip(NAMES, model, strict=False)), "moe_intermediate_size": model.intermediate}

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = [[(7 * i + j) % 200 + 50 for i in range(tokens // 2 - 16)] for j in range(len(prompts))]
        return {"prompt_ids": [[60] * 16] * len(prompts), "completion_ids": ids, "logprobs": None}

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(i % 2) for i in range(len(completions))]

    loading: dict[str, Any] = {"dtype": "float32" if mode == "full" else "bfloat16"}
    if mode == "QLoRA":
        nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"}
        loading["quantization_config"] = BitsAndBytesConfig(load_in_4bit=True, **nf4)
    targets = [f"{name}_proj" for name in ("qkvo" if model.experts else ("q", "k", "v", "o", "gate", "up", "down"))]
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        config = (Qwen3MoeConfig if model.experts else Qwen3Config)(**sizes)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        tiny.tokenizer().save_pretrained(folder)
        args = trl_steady.GRPOConfig(
            f"{folder}/out",
            per_device_train_batch_size=2,
            num_generations=2,
            gradient_accumulation_steps=2,
            max_steps=2,
            engine_check=None,
            gradient_checkpointing=checkpointing,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            model_init_kwargs=loading,
            **options,
        )
        peft_config = None if mode == "full" else LoraConfig(r=RANK, target_modules=targets)
        data = Dataset.from_dict({"prompt": ["a"] * 16})
        trainer = trl_steady.GRPOTrainer(folder, reward, args, data, rollout_func=rollout, peft_config=peft_config)
        gc.collect()  # or the memory of an earlier run would be freed, and subtracted, in this one
        gc.disable()
        states_of_nf4 = [getattr(p, "quant_state", None) for p in trainer.model.parameters()]
        scales = [state.absmax for state in states_of_nf4 if state is not None]
        weights = sum(t.numel() * t.element_size() for t in [*trainer.model.parameters(), *scales])
        _, above = peak_bytes(trainer.train)
        gc.enable()
        trained = sum(p.numel() * p.element_size() for p in trainer.model.parameters() if p.requires_grad)
        moments = sum(t.numel() * t.element_size() for s in trainer.optimizer.state.values() for t in s.values())
    return weights + trained + moments, weights + above


def comparison() -> list[dict[str, Any]]:
    """Return the measured runs, with the ratio of computed to measured for all that is above the states."""
    rows: list[dict[str, Any]] = []
    for name, (model, tokens) in CASES.items():
        for mode in MODES:
            parts = states(model, mode)
            own = sum(parts[part] for part in ("weights", "adapter", "gradients", "optimizer"))
            for checkpointing in (True, False):
                resident, total = measured(model, mode, tokens, checkpointing)
                predicted = peak(model, mode, tokens, checkpointing=checkpointing, on_cpu=True)
                sizes = {"computed_mb": round(predicted / 1e6, 1), "measured_mb": round(total / 1e6, 1)}
                ratio = round((predicted - own) / (total - resident), 2)
                rows.append({"model": name, "training": mode, "checkpointing": checkpointing, **sizes, "ratio": ratio})
    return rows


def agreement(rows: list[dict[str, Any]]) -> str:
    """Return the sentence of the page on the measured runs."""
    low, high = (of(row["ratio"] for row in rows) for of in (min, max))
    return (
        f"In {len(rows)} runs of small models on CPU, under bf16 autocast, the computed memory of the passes is {low} "
        f"to {high} times the measured one."
    )


def main() -> None:
    """Print the tables, and write them into the page if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace what docs/memory.md shows")
    parser.add_argument("--measure", action="store_true", help="train small models and compare")
    options = parser.parse_args()
    found = {"totals": totals(), "checkpointing": of_checkpointing()}
    if options.measure:
        rows = comparison()
        found["measured"] = agreement(rows)
        recorded = "[\n  " + ",\n  ".join(json.dumps(row) for row in rows) + "\n]\n"
        print(recorded)
        if options.write:
            RECORDED.write_text(recorded)
    show(found, PAGE, write=options.write)


if __name__ == "__main__":
    main()
