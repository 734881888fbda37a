"""Files of a checkpoint that hold tensors of ours. This file knows no model."""

import json
import os
import warnings
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

    def shapes(self, folder: Path) -> dict[str, Sequence[int]]:
        """Return the shapes of the tensors, without loading them. Raises ValueError if there is no such file."""
        with safe_open(self._existing(folder), framework="pt") as file:
            return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118

    def load(self, folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return tensors and metadata. Raises ValueError if there is no such file."""
        path = self._existing(folder)
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        return load_file(path), json.loads(metadata.get("trl_steady", "{}"))

    def load_best(self, folder: Path) -> dict[str, Tensor] | None:
        """Return the tensors that belong to the best policy, or warn that the checkpoint has none."""
        if (folder / self.name).is_file():
            return load_file(folder / self.name)
        warnings.warn(
            f"load_best_model_at_end=True has loaded the policy of {folder}, which has no {self.content}. The trainer "
            f"keeps the {self.content} of the last step. Set save_only_model=False to save it too.",
            UserWarning,
            stacklevel=2,
        )
        return None

    def _existing(self, folder: Path) -> Path:
        if not (folder / self.name).is_file():
            raise ValueError(
                f"{folder} holds no {self.name}, and a resume would begin with another {self.content}. Resume from a "
                "checkpoint of a run with these settings and save_only_model=False, or begin a new run."
            )
        return folder / self.name


def refuse_other_shapes(
    found: Mapping[str, Sequence[int]], expected: Mapping[str, Sequence[int]], source: str | Path
) -> None:
    """Raise a ValueError if tensors from a source have other names or shapes than a model's."""
    one, other = ({(name, *shape) for name, shape in shapes.items()} for shapes in (found, expected))
    if differing := {name for name, *_ in one ^ other}:
        raise ValueError(
            f"{source} holds other weights: {len(differing)} tensors differ in name or shape, for example "
            f"{min(differing)}. Give the model and the LoRA configurations (peft_config, value_peft_config) of the "
            "run that wrote it."
        )
