"""Look for the names of src/trl_steady/report/aliases.toml in the sources of their frameworks, before a release.

    python -m tests.tools.alias_sources verl=FOLDER slime=FOLDER ...

FOLDER is an unpacked wheel or a checkout of the version that the table names. It prints each alias whose source has no
such file, or whose file or line has not the last word of the name, and exits with 1 if there is one.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from trl_steady.report.frameworks import FRAMEWORKS, Alias

_SOURCE = re.compile(r"([\w/.]+\.(?:py|md))(?::(\d+))?$")
_NEAR = 6  # lines, as a call can be longer than one


def faults(alias: Alias, folder: Path) -> Iterator[str]:
    """Return what is wrong with the sources of an alias."""
    for place in alias.source.split(" and "):
        match = _SOURCE.match(place)
        if match is None:  # of another version, as the text says
            continue
        files = [file for file in folder.rglob(Path(match[1]).name) if str(file).endswith(match[1])]
        if not files:
            yield f"{alias.raw}: no file {match[1]}"
            continue
        lines = files[0].read_text(encoding="utf-8").splitlines()
        if match[2]:
            number = int(match[2])
            lines = lines[max(number - _NEAR, 0) : number + _NEAR]
        text = "\n".join(lines)
        words = [word for word in re.split(r"[/_ .(*]+|\W+", alias.raw) if word]
        if not any(word.lower() in text.lower() for word in words[-2:]):
            yield f"{alias.raw}: {place} does not have it"


def main(arguments: list[str]) -> int:
    found: list[str] = []
    for argument in arguments:
        name, _, folder = argument.partition("=")
        for alias in FRAMEWORKS[name].names.values():
            found += [f"{name}: {fault}" for fault in faults(alias, Path(folder))]
    for fault in found:
        print(fault)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
