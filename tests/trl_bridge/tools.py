"""Copies of the installed TRL with another version and with changes of its source, and what a user then sees."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import trl

Change = tuple[str, str, str]
"""Files of TRL, a regular expression, and its replacement."""

_SCRIPT = """
import json, sys
from pathlib import Path

def seen(act):
    try:
        return act()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"

def trained(kind, options):
    from tests.tools import tiny

    folder = Path(sys.argv[1])
    model = tiny.save_model("dense", folder / "model")
    trainer = tiny.trainer(model, folder / "run", method=kind.removesuffix("Trainer"), max_steps=2, **options)
    trainer.train()
    return trainer.state.global_step

def command(arguments):
    from trl_steady.cli.main import main

    return main(arguments)

kind, options, arguments = json.loads(sys.argv[2])
result = {"import": seen(lambda: exec(f"from trl_steady import {kind}"))}
for name, given in {"default": {}, "feature": options}.items():
    if given is not None:
        print("<" + name)
        result[name] = seen(lambda: trained(given.pop("kind", kind), given))
if arguments:
    result["command"] = seen(lambda: command(arguments))
print("RESULT" + json.dumps(result))
"""


def changed_trl(folder: Path, version: str, *changes: Change) -> None:
    """Write the copy to a folder, for the start of a path. The pattern "->" renames a file."""
    source = Path(trl.__file__).parent
    shutil.copytree(source, folder / "trl", ignore=shutil.ignore_patterns("__pycache__"))
    metadata = folder / f"trl-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: trl\nVersion: {version}\n")
    for files, pattern, replacement in changes:
        counts = []
        for path in sorted((folder / "trl").glob(files)):
            if pattern == "->":
                path.rename(path.parent / replacement)
                counts.append(1)
            else:
                text, count = re.subn(pattern, replacement, path.read_text())
                path.write_text(text)
                counts.append(count)
        assert any(counts), pattern


def seen_by_user(
    folder: Path, changes: list[Change], kind: str, options: dict[str, Any] | None, command: list[str]
) -> tuple[dict[str, Any], str]:
    """Return what an import, two steps with default options and with others, and a command give, and all output."""
    changed_trl(folder, "1.17.0", *changes)
    given = json.dumps([kind, options, command])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(folder), given], env=environment, capture_output=True, text=True
    )
    assert "\nRESULT" in done.stdout, done.stderr
    line = done.stdout.splitlines()[-1]
    return json.loads(line.removeprefix("RESULT")), done.stdout
