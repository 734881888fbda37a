"""Engines of vLLM on CPU, in this process. The tests are skipped without vLLM."""

import os

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import Qwen3Config
from trl.generation import vllm_generation

from tests.features.router_replay.tools import Recorded, build
from tests.tools import tiny
from tests.vllm import cpu, mixtures
from trl_steady.features.router_replay.feature import ROUTES
from trl_steady.features.sampling_mask.feature import SAMPLING_MASK

BUDGET, BLOCK, BLOCKS = 48, 32, 18
"""Tokens that the engine feeds at a time, and what it remembers them in: small, so that prompts come in pieces."""


@pytest.fixture(autouse=True)
def as_found() -> None:
    """Replaces the check in tests/conftest.py: vLLM leaves a process group and its own number of threads."""


class Engines:
    """Each is built once for a folder, a dtype and what it returns, by what TRL's trainer asks for first.

    Its answers are kept.
    """

    def __init__(self) -> None:
        self.built: dict[tuple[str, ...], Any] = {}
        self.answers: list[list[Any]] = []

    def engine(self, dtype: str, **asked: Any) -> Any:
        key = asked["model"], dtype, *(each.flag for each in (ROUTES, SAMPLING_MASK) if asked.get(each.flag))
        if key not in self.built:
            self.built[key] = engine = new(dtype, **asked)
            engine.generate = functools.partial(self._answer, engine.generate)
        return self.built[key]

    def _answer(self, generate: Callable[..., list[Any]], *arguments: Any, **keywords: Any) -> list[Any]:
        self.answers.append(generate(*arguments, **keywords))
        return self.answers[-1]


def new(dtype: str, **asked: Any) -> Any:
    import vllm

    of_cpu = {"dtype": dtype, "enforce_eager": True}
    small = {"block_size": BLOCK, "num_gpu_blocks_override": BLOCKS, "max_num_batched_tokens": BUDGET}
    return vllm.LLM(**{**asked, **of_cpu, **small, "max_num_seqs": 16})


@pytest.fixture(scope="session")
def engines() -> Engines:
    cpu.take_weights()
    return Engines()


@pytest.fixture
def colocated(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Builds a trainer with an engine in this process, of `dtype`, beside a model in float32."""

    def trainer(folder: Path, output: Path, kind: type[Recorded] = Recorded, dtype: str = "float32", **options: Any):
        monkeypatch.setattr(vllm_generation, "LLM", functools.partial(engines.engine, dtype))
        engine = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.1}
        lengths = {"vllm_max_model_length": 512, "max_completion_length": 40}
        return build(folder, output, kind, **{"router_replay": "R3", **engine, **lengths, **options})

    return trainer


@pytest.fixture(scope="session")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixtures.save_model(tmp_path_factory.mktemp("mixture"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model with heads of 32, which vLLM's kernel for CPU takes."""
    path = tmp_path_factory.mktemp("dense")
    torch.manual_seed(0)
    config = Qwen3Config(**{**tiny.SIZES, "hidden_size": 64, "num_key_value_heads": 1}, head_dim=32)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tiny.tokenizer().save_pretrained(path)
    return path
