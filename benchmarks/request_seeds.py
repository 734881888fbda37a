"""Time a rollout of vLLM with a seed for each completion, against one without seeds.

    .venv-vllm/bin/python -m benchmarks.request_seeds

builds a colocated engine in this process, and starts a server, both with the shape of SmolLM2-135M and random weights.
Each generates the same number of tokens with seeds and without, in turn. It prints the seconds of a rollout, and the
quartiles of the ratio, round by round. It needs the environment of `make test-vllm`.
"""

import os
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
import transformers
from tests.tools import tiny
from tests.vllm import cpu
from tests.vllm.tools import serving
from transformers import LlamaConfig
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient

from benchmarks.measuring import in_turns, parser, quartiles, random_ids
from benchmarks.vllm_sync import SMOLLM2
from trl_steady.trl_bridge.patching import patched


def main() -> None:
    """Time rollouts of both engines."""
    options = parser(__doc__, rounds=9, prompts=4, generations=4, tokens=24, length=32).parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(LlamaConfig(**SMOLLM2)).save_pretrained(folder)
        tiny.tokenizer().save_pretrained(folder)
        for name, engine in _engines(folder, options):
            _report(name, engine, options)


def _engines(folder: Path, options: Any) -> Iterator[tuple[str, Any]]:
    yield "colocated", _colocated(folder, options)
    for url in serving(folder, folder, ["--logprobs-mode", "processed_logprobs"]):
        yield "server", _trainer(folder, options, vllm_mode="server", vllm_server_base_url=url).vllm_generation


def _colocated(folder: Path, options: Any) -> Any:
    import vllm

    def llm(**asked: Any) -> Any:
        return vllm.LLM(**{**asked, "dtype": "float32", "enforce_eager": True})

    cpu.take_weights()
    with patched(vllm_generation, {"LLM": llm}):
        return _trainer(folder, options, vllm_mode="colocate", vllm_max_model_length=128).vllm_generation


def _trainer(folder: Path, options: Any, **engine: Any) -> Any:
    VLLMClient.init_communicator = lambda *_, **__: None  # nccl, for weights
    return tiny.trainer(
        folder,
        folder / "out",
        use_vllm=True,
        max_completion_length=options.tokens,
        generation_kwargs={"ignore_eos": True},
        **engine,
    )


def _report(name: str, engine: Any, options: Any) -> None:
    prompts: list[list[int]] = []
    for ids in random_ids([options.length] * options.prompts):
        prompts += [ids] * options.generations

    def generate(first_seed: int | None) -> None:
        with patched(engine, {"first_seed": first_seed}):
            engine.generate(prompts, None, options.generations)

    seconds = in_turns({"without": lambda: generate(None), "with": lambda: generate(1)}, options.rounds)
    medians = {way: statistics.median(found) for way, found in seconds.items()}
    ratio = quartiles(seconds["with"], seconds["without"])
    print(
        f"{name}: {len(prompts)} completions of {options.tokens} tokens, {medians['without']:.2f} s without seeds, ",
        end="",
    )
    print(
        f"{medians['with']:.2f} s with; with / without {ratio['median']:.3f} ({ratio['low']:.3f}, {ratio['high']:.3f})"
    )


if __name__ == "__main__":
    main()
