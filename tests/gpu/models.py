"""Random models of the sizes that the tests of this folder take. 16 GB of memory are enough for each test."""

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.tools import tiny
from tests.tools.places import Place

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
    LlamaForCausalLM(config).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


def bench_options(place: Place, *, checkpointing: bool = False) -> argparse.Namespace:
    """Return the options of `tests/benchmarks/padding.py` for this device."""
    return argparse.Namespace(
        **{"batch": 8, "window": place.choose(1, 4), "scale": place.choose(0.1, 1.0)},
        **{"random": True, "large": False, "checkpointing": checkpointing, "rounds": 3},
    )
