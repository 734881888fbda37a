"""Time a sync of a LoRA policy to a colocated vLLM: the adapter alone, against all weights with it merged.

    .venv-vllm/bin/python -m benchmarks.vllm_sync

builds two engines in this process, with the shape of SmolLM2-135M and random weights, and syncs them in turn. It
prints the bytes and seconds of a sync, and the ratio of the seconds, pair by pair. It needs the environment of
`make test-vllm`.
"""

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
import transformers
from peft import LoraConfig
from tests.tools import tiny
from tests.vllm import cpu
from transformers import LlamaConfig
from trl.generation import vllm_generation

SMOLLM2: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
ROUNDS = 11


def main() -> None:
    """Sync both engines in turn, and print what it took."""
    import vllm

    def llm(**asked: Any) -> Any:
        small = {"dtype": "float32", "enforce_eager": True, "block_size": 32, "num_gpu_blocks_override": 18}
        return vllm.LLM(**{**asked, **small, "max_num_batched_tokens": 64, "max_num_seqs": 16})

    cpu.take_weights()
    vllm_generation.LLM = llm
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(LlamaConfig(**SMOLLM2)).save_pretrained(folder)
        tiny.tokenizer().save_pretrained(folder)
        engines = {sync: _engine(Path(folder), sync) for sync in (True, False)}
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for number in range(2 * ROUNDS):
            sync = number % 2 == 0
            start = time.perf_counter()
            engines[sync].sync_weights()
            seconds[sync].append(time.perf_counter() - start)
    sent = {True: _adapter_bytes(engines[True]), False: sum(w.nbytes for _, w in engines[False]._iter_named_params())}
    for sync, name in ((True, "adapter"), (False, "merged weights")):
        print(f"{name}: {sent[sync] / 2**20:.1f} MiB, {statistics.median(seconds[sync][1:]):.3f} s a sync")
    ratios = [merged / alone for alone, merged in zip(seconds[True][1:], seconds[False][1:], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"merged / adapter: bytes {sent[False] / sent[True]:.0f}, seconds {middle:.1f} ({low:.1f}, {high:.1f})")


def _engine(folder: Path, sync: bool) -> Any:
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", init_lora_weights=False)
    options = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 64}
    trainer = tiny.trainer(folder, folder / "out", build={"peft_config": lora}, vllm_adapter_sync=sync, **options)
    return trainer.vllm_generation


def _adapter_bytes(engine: Any) -> int:
    return sum(parameter.nbytes for parameter in engine.model.parameters() if parameter.requires_grad)


if __name__ == "__main__":
    main()
