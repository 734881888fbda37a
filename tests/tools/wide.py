"""A model wide enough for bitsandbytes' blocks and for its packed CPU kernels."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import BitsAndBytesConfig

from tests.tools import tiny

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
BASES = {"nf4": NF4, "int8": {"load_in_8bit": True}}


def save_model(folder: Path) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = transformers.LlamaConfig(**{**tiny.SIZES, **sizes, "initializer_range": 0.1})
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.generation_config.eos_token_id = config.eos_token_id
    model.save_pretrained(folder)
    return folder


def load(folder: Path, base: str, device: str = "cpu") -> Any:
    """The model with a base of `BASES`."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=BitsAndBytesConfig(**BASES[base]), dtype=torch.float32, device_map=device
    )
