"""Random models of the sizes that the tests of this folder take. 16 GB of memory are enough for each test."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.gpu.places import Place
from tests.tools import tiny

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
MIDDLE = {
    **{"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 8},
    "initializer_range": 0.02,
}
# 0.22 billion parameters, 0.9 GB in float32. Two trainers with policy, reference and gradients take 5.2 GB.
LARGE = {
    **{"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12, "num_attention_heads": 16},
    **{"vocab_size": 32_000, "tie_word_embeddings": True, "initializer_range": 0.02},
}


def save_model(folder: Path, sizes: dict[str, Any]) -> Path:
    """Save a Llama with random weights, and the tokenizer of the tests."""
    torch.manual_seed(0)
    config = LlamaConfig(**{**tiny.SIZES, "num_key_value_heads": 4, "initializer_range": 0.05, **sizes})
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):  # a CPU takes minutes for all models
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


def bench_options(place: Place, *, checkpointing: bool = False) -> argparse.Namespace:
    """Return the options of `benchmarks/padding.py` for this device."""
    return argparse.Namespace(
        **{"batch": 8, "window": place.choose(1, 4), "scale": place.choose(0.1, 1.0)},
        **{"random": True, "large": False, "checkpointing": checkpointing, "rounds": 3},
    )


def batch(place: Place) -> dict[str, torch.Tensor]:
    """Return eight prompts and completions of unequal lengths."""
    draw, shape = torch.Generator().manual_seed(0), (8, place.choose(12, 96))
    mask = torch.arange(shape[1]) < torch.linspace(2, shape[1], shape[0]).long().unsqueeze(-1)
    found = {
        "prompt_ids": torch.randint(50, 200, (shape[0], 4), generator=draw),
        "prompt_mask": torch.ones(shape[0], 4, dtype=torch.long),
        "completion_ids": torch.randint(50, 200, shape, generator=draw),
        "completion_mask": mask.long(),
    }
    return {name: value.to(place.device) for name, value in found.items()}


def apart(own: Sequence[torch.Tensor], true: Sequence[torch.Tensor]) -> float:
    """Return the distance of gradients, relative to the length of the true one."""
    off = sum(float((a - b).double().square().sum()) for a, b in zip(own, true, strict=True))
    return (off / sum(float(b.double().square().sum()) for b in true)) ** 0.5
