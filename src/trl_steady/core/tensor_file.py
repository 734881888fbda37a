"""Files of a checkpoint that hold tensors of ours. This file knows no model."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor


class TensorFile:
    """A file of a checkpoint with the tensors of one model, and JSON metadata. `content` is their name in messages."""

    def __init__(self, name: str, content: str) -> None:
        self.name, self.content = name, content

    def save(self, folder: Path, tensors: Mapping[str, Tensor], **metadata: object) -> None:
        """Write the file, which appears only when it is complete."""
        unfinished = folder / f"{self.name}.unfinished"
        save_file(dict(tensors), unfinished, metadata={"trl_steady": json.dumps(metadata)})
        os.replace(unfinished, folder / self.name)

    def load(self, folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return tensors and metadata. Raises ValueError if there is no such file."""
        path = folder / self.name
        if not path.is_file():
            raise ValueError(
                f"{folder} holds no {self.name}, and a resume would begin with another {self.content}. Resume from a "
                "checkpoint of a run with these settings and save_only_model=False, or begin a new run."
            )
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        return load_file(path), json.loads(metadata.get("trl_steady", "{}"))


def refuse_other_shapes(tensors: Mapping[str, Tensor], expected: Mapping[str, Sequence[int]], source: str) -> None:
    """Raise a ValueError if tensors from a source have other names or shapes than a model's."""
    differing = set(tensors.keys() ^ expected.keys())
    for name in tensors.keys() & expected.keys():
        if tuple(tensors[name].shape) != tuple(expected[name]):
            differing.add(name)
    if differing:
        raise ValueError(
            f"{source} holds other weights: {len(differing)} tensors differ in name or shape, for example "
            f"{min(differing)}. Give the model and the LoRA configurations (peft_config, value_peft_config) of the "
            "run that wrote it."
        )
