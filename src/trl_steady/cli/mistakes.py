"""Mistakes in a command line that can be named without torch and TRL, whose import takes many seconds."""

import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import yaml

# Packages, and their files that declare the options of configs, of TRL's scripts, and of `accelerate launch`
_SOURCES = {
    **{"trl_steady": "config/*.py", "trl": "[ts]*/*.py"},
    **{"transformers": "training_args.py", "accelerate": "commands/launch.py"},
}


def wrong_options(arguments: Sequence[str]) -> Iterator[str]:
    """Yield a message for each option that no config, script or launcher has, also of a YAML file after `--config`.

    The names of options, and a few more, are found in the text of the packages that are installed.
    """
    given = {word: word[2:].partition("=")[0] for word in arguments if word.startswith("--")}
    for path in [path for word, path in pairwise(arguments) if word == "--config"]:
        try:
            given |= {f"{name} in {path}": str(name) for name in {**yaml.safe_load(Path(path).read_text("utf-8"))}}
        except (OSError, TypeError, ValueError, yaml.YAMLError) as error:
            yield f"--config {path}: {error}"
    folders = {Path(getattr(find_spec(package), "origin", "")).parent: files for package, files in _SOURCES.items()}
    texts = [path.read_text("utf-8") for folder, files in folders.items() for path in folder.glob(files)]
    # fields of dataclasses, and options of parsers
    found = re.findall(r'^    (\w+): |"--(\w+)"', "\n".join(texts), re.MULTILINE)
    names = {"accelerate_config", "config", "env", "help", "ppo", "set"}.union(*found)
    # one of each file that is read, which another version may have moved
    has_all = names >= {"ref_model_sync_steps", "dataset_name", "weight_decay", "num_processes"}
    for text, name in given.items() if has_all else ():
        name = name.replace("-", "_")
        # a parser also takes the beginning of a name, and no_bf16 for bf16
        if not any(known.startswith((name, name.removeprefix("no_"))) for known in names):
            meant = [f"did you mean {each}?" for each in get_close_matches(name, names, 1)]
            yield f"{text}: {meant[0] if meant else 'there is no such option.'}"
