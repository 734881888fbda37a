"""The documentation site. `make docs` builds it and names its folder in DOCS_SITE."""

import html
import os
import re
from pathlib import Path

import pytest

import trl_steady

if "DOCS_SITE" not in os.environ:
    pytest.skip(
        "DOCS_SITE does not name a built site; `make docs` builds one and runs this file", allow_module_level=True
    )
SITE = Path(os.environ["DOCS_SITE"]).resolve()


def test_formulas_are_rendered_without_a_script() -> None:
    for page in ("methods/gspo", "methods/kl", "step-rewards"):
        text = (SITE / page / "index.html").read_text()
        assert 'class="katex-html"' in text and not re.search(r'class="arithmatex">\\[(\[]', text), page


def test_everything_that_a_browser_loads_is_in_the_site() -> None:
    """On all pages, also without a browser."""
    for path in SITE.rglob("*.html"):
        text = path.read_text()
        loaded = re.findall(r'<(?:script|img|iframe)\b[^>]*\ssrc="([^"]+)"', text)
        loaded += re.findall(r'<link\b(?=[^>]*rel="(?:stylesheet|icon|preload)")[^>]*\shref="([^"]+)"', text)
        assert loaded and not re.search(r'rel="(?:preconnect|dns-prefetch)"', text)
        for url in loaded:
            assert url.startswith("data:image/") or _exists(path, url), f"{path} loads {url}"
    for path in SITE.rglob("*.css"):
        for url in re.findall(r"""url\(["']?([^)"']+)""", path.read_text()):
            assert url.startswith("data:") or _exists(path, url), f"{path} loads {url}"


def _exists(page: Path, url: str) -> bool:
    base = SITE if url.startswith("/") else page.parent  # the page for errors has absolute links
    return (base / url.lstrip("/").partition("?")[0].partition("#")[0]).is_file()


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


def test_sources_are_linked_and_not_pages() -> None:
    assert not [path for kind in ("py", "yaml") for path in SITE.rglob(f"*.{kind}/index.html")]
    assert 'href="train.py"' in (SITE / "recipes/gspo/index.html").read_text()
