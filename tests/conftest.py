"""Tiny models and a tokenizer built in memory: no network, no GPU, bit-reproducible."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from pathlib import Path

import pytest
import torch

from tests import tiny
from tests import wide as wide_model

torch.set_num_threads(1)

collect_ignore = ["benchmarks"]  # scripts, which the doctest collector would import


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of a tiny dense and a tiny mixture-of-experts model, each with the tokenizer."""
    root = tmp_path_factory.mktemp("models")
    return {name: tiny.save_model(name, root / name) for name in tiny.CONFIGS}


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model wide enough for bitsandbytes."""
    return wide_model.save_model(tmp_path_factory.mktemp("wide"))
