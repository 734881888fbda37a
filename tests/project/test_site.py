"""The documentation site. `make docs` builds it and names its folder in DOCS_SITE."""

import html
import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest

import trl_steady

if "DOCS_SITE" not in os.environ:
    pytest.skip(
        "DOCS_SITE does not name a built site; `make docs` builds one and runs this file", allow_module_level=True
    )
SITE = Path(os.environ["DOCS_SITE"]).resolve()
ROOT = Path(__file__).parents[2]
address = importlib.import_module("docs.hooks.address")


class Site(NamedTuple):
    """A built site, and the address of the repository that it knows, which may be an empty string."""

    folder: Path
    repository: str


@pytest.fixture(scope="module", params=["as it is", "with and without an address"])
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Site:
    """The site that `make docs` has built, and the other: with an address if it has none, and the reverse."""
    if request.param == "as it is":
        return Site(SITE, address.REPOSITORY)
    copy = tmp_path_factory.mktemp("copy") / "main"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "dist", "outputs", "site"))
    other = "" if address.REPOSITORY else "https://github.com/owner/name"
    (copy / "CITATION.cff").write_text(f"repository-code: {other}\n" if other else "")
    subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"], cwd=copy, check=True)
    return Site(copy / "site", other)


def test_pages_link_to_the_repository_if_its_address_is_known(site: Site) -> None:
    known = bool(site.repository)
    for page, source in (
        ("metrics", "docs/metrics.md"),
        ("recipes/gspo", "recipes/gspo/README.md"),
        ("changelog", "CHANGELOG.md"),
    ):
        text = (site.folder / page / "index.html").read_text()
        assert (f'href="{site.repository}/edit/main/{source}"' in text) == known
        assert (f'href="{site.repository}"' in text) == ('rel="canonical"' in text) == known
    folder = f"{site.repository}/blob/main/recipes/gspo/" if known else ""
    assert f'href="{folder}train.py"' in (site.folder / "recipes/gspo/index.html").read_text()


def test_formulas_are_rendered_without_a_script() -> None:
    for page in ("methods/gspo", "methods/kl", "step-rewards"):
        text = (SITE / page / "index.html").read_text()
        assert 'class="katex-html"' in text and not re.search(r'class="arithmatex">\\[(\[]', text), page


def test_everything_that_a_browser_loads_is_in_the_site(site: Site) -> None:
    """On all pages, also without a browser."""
    for path in site.folder.rglob("*.html"):
        text = path.read_text()
        loaded = re.findall(r'<(?:script|img|iframe)\b[^>]*\ssrc="([^"]+)"', text)
        loaded += re.findall(r'<link\b(?=[^>]*rel="(?:stylesheet|icon|preload)")[^>]*\shref="([^"]+)"', text)
        assert loaded and not re.search(r'rel="(?:preconnect|dns-prefetch)"', text)
        for url in loaded:
            assert url.startswith("data:image/") or _exists(site, path, url), f"{path} loads {url}"
    for path in site.folder.rglob("*.css"):
        for url in re.findall(r"""url\(["']?([^)"']+)""", path.read_text()):
            assert url.startswith("data:") or _exists(site, path, url), f"{path} loads {url}"


def _exists(site: Site, page: Path, url: str) -> bool:
    if url.startswith("/"):  # the page for errors has absolute links
        at = urlsplit(site.repository).path.rpartition("/")[2]
        page, url = site.folder / "404.html", url.removeprefix(f"/{at}").lstrip("/")
    return (page.parent / url.partition("?")[0].partition("#")[0]).is_file()


def test_the_signature_of_the_config_shows_values() -> None:
    text = (SITE / "reference/grpo-config/index.html").read_text()
    heading = text.partition('id="trl_steady.GRPOConfig"')[2]
    block = re.match(r'(?:(?!<h\d).)*?<div class="[^"]*doc-signature[^"]*">(.*?)</div>', heading, flags=re.DOTALL)
    assert block, "GRPOConfig has no signature"
    signature = html.unescape(re.sub(r"<[^>]+>", "", block[1])).strip()
    assert f'loss_type: str = "{trl_steady.GRPOConfig.loss_type}",' in signature
    assert "**trl_options" in signature
    assert "trl_default" not in text and "field(" not in text
    assert not re.search(r'<h\d id="[\w.]*\._', text)  # a private name


def test_sources_are_not_pages() -> None:
    assert not [path for kind in ("py", "yaml") for path in SITE.rglob(f"*.{kind}/index.html")]
