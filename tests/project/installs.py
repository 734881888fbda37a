"""Ask pip whether each `pip install` of the pages resolves, and keeps the ranges of pyproject.toml.

`make test-installs` runs this file, which needs the network. It installs nothing.
"""

import json
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
RANGES = {
    each.name: each.specifier
    for lines in (PROJECT["dependencies"], EXTRAS["recipes"], EXTRAS["vllm"])
    for each in map(Requirement, lines)
    if each.specifier
}
PAGES = ("*.md", "docs/**/*.md", "docs/**/*.ipynb", "recipes/**/*.*", "src/**/*.py")
# up to what ends a command in a page, a comment, a notebook or a string
INSTALL = re.compile(r"""pip install ((?:"[^"\n]+"|'[^'\n]+'|[^"'`#&|;,\\\n])+)""")
SHOWN = ("trl", "transformers", "peft", "torch", "vllm")


def commands() -> dict[tuple[str, ...], list[str]]:
    """Return the arguments of each command with the pages that show it. A checkout stands in for the package."""
    found: dict[tuple[str, ...], list[str]] = {}
    for page in sorted({path for pattern in PAGES for path in ROOT.glob(pattern) if path.is_file()}):
        if page.suffix not in {".md", ".ipynb", ".py", ".yaml"}:
            continue
        for arguments in INSTALL.findall(page.read_text().replace(r"\"", '"')):
            if "{" in arguments:  # the error of an import, which is built from `SUPPORTED`
                continue
            words = [
                re.sub(r"^(\./)?trl-steady(-main)?\b", ".", each) for each in shlex.split(arguments) if each != "-e"
            ]
            found.setdefault(tuple(words), []).append(str(page.relative_to(ROOT)))
    return found


def resolved(arguments: tuple[str, ...]) -> dict[str, str]:
    """Return the version of each package that pip would install in an empty environment.

    Raises:
        ValueError: pip finds no versions, with what it says.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        done = subprocess.run(
            [*pip, "--report", str(report), *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise ValueError(done.stderr.strip().splitlines()[-1])
        packages = [each["metadata"] for each in json.loads(report.read_text())["install"]]
    return {each["name"].lower(): each["version"] for each in packages}


def main() -> int:
    """Print a row for each command, and return how many do not resolve or leave a range."""
    failures = 0
    print(f"| `pip install` | pages | {' | '.join(SHOWN)} | |\n|{'---|' * (len(SHOWN) + 3)}")
    for arguments, pages in commands().items():
        try:
            versions = resolved(arguments)
            outside = [name for name in RANGES.keys() & versions.keys() if versions[name] not in RANGES[name]]
            verdict = f"outside: {', '.join(sorted(outside))}" if outside else "ok"
        except ValueError as error:
            versions, verdict = {}, str(error)
        failures += verdict != "ok"
        found = [versions.get(name, "") for name in SHOWN]
        print(f"| {' | '.join([f'`{shlex.join(arguments)}`', str(len(set(pages))), *found, verdict])} |", flush=True)
    return failures


if __name__ == "__main__":
    sys.exit(main())
