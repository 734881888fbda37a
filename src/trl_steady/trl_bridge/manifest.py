"""The manifest of a checkpoint: a list of its files that is written last, and alone says whether it is complete."""

import json
import re
from pathlib import Path
from typing import Literal, NamedTuple
from zipfile import is_zipfile

from safetensors import SafetensorError, safe_open
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME

_NAME = "manifest.json"
ROLLOUTS_PREFIX = "rollouts_"
"""The beginning of the name of each process's file with its rollouts in use."""
_FORMER_NAME = "sizes.json"  # of checkpoints that trl-steady 0.1.dev0 wrote: sizes only
# the last two are of FSDP2 and DeepSpeed
_READ_BY_A_RESUME = re.compile(r"\.(safetensors|bin|pth?|distcp|json)$|(^|/)(\.metadata|latest)$")
# beside the weights for those who load the model; a resume takes its own
_OF_THE_MODEL_CARD = re.compile(
    r"(^|/)(config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|preprocessor_config"
    r"|video_preprocessor_config|processor_config|chat_template)\.json$"
)
DataOrder = Literal["sampler", "stream", "unknown"]
"""How a resume finds its place in the training data. TRL's sampler draws the order of each epoch, and a stream is read
from its beginning. The order of a script's own loader is known to the script only."""


class Manifest(NamedTuple):
    """What a checkpoint says of itself."""

    run: str
    """Id of the run that wrote it, the same across resumes; "" if it was not written by trl-steady."""
    data_order: DataOrder | None
    """Of the run that wrote it; None if it does not say."""
    files: dict[str, int]
    """Path of each file that a resume reads -> bytes."""


def write_manifest(checkpoint: Path, run: str, data_order: DataOrder) -> None:
    """Write the manifest of a folder in which everything else has been written."""
    files: dict[str, int] = {}
    for path in sorted(checkpoint.rglob("*")):
        name = path.relative_to(checkpoint).as_posix()
        if _READ_BY_A_RESUME.search(name) and not _OF_THE_MODEL_CARD.search(name):
            files[name] = path.stat().st_size
    content = {"run": run, "data_order": data_order, "files": files}
    (checkpoint / _NAME).write_text(json.dumps(content))


def read_manifest(checkpoint: Path) -> Manifest:
    """Return what a checkpoint says of itself. Raises a ValueError if its manifest is cut off."""
    if (checkpoint / _NAME).is_file():
        content = json.loads((checkpoint / _NAME).read_text())
        return Manifest(content["run"], content["data_order"], content["files"])
    if (checkpoint / _FORMER_NAME).is_file():
        return Manifest("", None, json.loads((checkpoint / _FORMER_NAME).read_text()))
    if any(checkpoint.glob(f"{ROLLOUTS_PREFIX}*")):  # ours, and the manifest is written last
        return _without_manifest(last=_NAME)
    return _without_manifest(last=TRAINER_STATE_NAME)  # TRL writes its state last


def _without_manifest(last: str) -> Manifest:
    """Return what is known of a checkpoint without a manifest: it is complete if it has the file that comes last."""
    return Manifest("", None, {last: 1})


def why_incomplete(checkpoint: Path) -> str | None:
    """Return why a run cannot go on from a checkpoint, such as "optimizer.pt is missing"; None if it can."""
    missing = _missing_file(checkpoint)
    if missing is not None:
        return f"{missing} is missing or cut off"
    if not _holds_optimizer(checkpoint):
        return "it holds no optimizer or no scheduler, as with save_only_model=True"
    return None


def _missing_file(checkpoint: Path) -> str | None:
    """Return the first file of a checkpoint that is missing or cut off; None if all are there."""
    try:
        manifest = read_manifest(checkpoint)
    except ValueError:
        return _NAME
    for name, size in manifest.files.items():
        if not _is_whole(checkpoint / name, size):
            return name
    return None


def _holds_optimizer(checkpoint: Path) -> bool:
    """Return True if a checkpoint has an optimizer and a scheduler. Without either, transformers loads neither."""
    names = [path.name for path in checkpoint.iterdir()]
    if any(name.startswith("global_step") for name in names):  # of DeepSpeed, which saves both in there
        return True
    return SCHEDULER_NAME in names and any(name.startswith("optimizer") for name in names)


def _is_whole(path: Path, size: int) -> bool:
    """Return True if a file can be read to its end.

    JSON must be parsed. Others have their size or more, or a format that says that they are whole: somebody may have
    written a file anew in bf16.
    """
    try:
        if path.suffix == ".json":
            json.loads(path.read_text())
            return True
        if path.stat().st_size >= size or is_zipfile(path):
            return True
        with safe_open(path, "pt"):
            return True
    except (OSError, SafetensorError, ValueError):
        return False
