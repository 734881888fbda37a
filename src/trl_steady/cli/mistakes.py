"""Mistakes in a command line that can be named without torch and TRL, whose import takes many seconds."""

import os
import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import yaml

# Packages, and their files that declare the options of configs, of TRL's scripts, and of `accelerate launch`
_SOURCES = {
    "trl_steady": "config/*.py",
    "trl": "[ts]*/*.py",
    "transformers": "training_args.py",
    "accelerate": "commands/launch.py",
}
# Options whose value may be a path
_PATHS = ("dataset_name", "model_name_or_path", "reward_model_name_or_path")


def wrong_options(arguments: Sequence[str]) -> Iterator[str]:
    """Yield a message for each option that no config, script or launcher has, and for each path that is missing.

    Options of a YAML file after `--config` count too. The names of options, and a few more, are found in the text of
    the packages that are installed.
    """
    given: dict[str, str] = {}
    paths: list[tuple[str, object]] = []
    for word in arguments:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            given[word] = name
            paths.append((name, value))
    for option, path in pairwise(arguments):
        paths.append((option.removeprefix("--"), path))
        if option != "--config":
            continue
        try:
            options = {**yaml.safe_load(Path(path).read_text("utf-8"))}
            for name in options:
                given[f"{name} in {path}"] = str(name)
            paths += options.items()
        except (OSError, TypeError, ValueError, yaml.YAMLError) as error:
            yield f"--config {path}: {error}"
    for option, value in paths:
        if option in _PATHS and _is_path(str(value)) and not os.path.exists(str(value)):
            yield f"--{option} {value}: there is no such file or folder."
    names = _known_names()
    # one of each file that is read, which another version may have moved
    if not names >= {"ref_model_sync_steps", "dataset_name", "weight_decay", "num_processes"}:
        return
    for text, name in given.items():
        name = name.replace("-", "_")
        # a parser also takes the beginning of a name, and no_bf16 for bf16
        beginnings = (name, name.removeprefix("no_"))
        if any(known.startswith(beginnings) for known in names):
            continue
        similar = get_close_matches(name, names, 1)
        if similar:
            yield f"{text}: did you mean {similar[0]}?"
        else:
            yield f"{text}: there is no such option."


def _is_path(value: str) -> bool:
    """Tell a path from an address, such as hf://datasets/..., and from a name on the hub: one slash, no dot first."""
    if "://" in value:
        return False
    return value.startswith((".", "/")) or value.count("/") > 1


def _known_names() -> set[str]:
    """Return the names of options in the text of the installed packages, and a few more."""
    names = {"accelerate_config", "config", "env", "help", "ppo", "set"}
    for package, files in _SOURCES.items():
        folder = Path(getattr(find_spec(package), "origin", "")).parent
        for path in folder.glob(files):
            text = path.read_text("utf-8")
            names.update(re.findall(r"^    (\w+): ", text, re.MULTILINE))  # fields of dataclasses
            names.update(re.findall(r'"--(\w+)"', text))  # options of parsers
    return names
