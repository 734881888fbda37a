"""The documentation site, in a browser without network. `make docs` builds it and names its folder in DOCS_SITE."""

import functools
import html
import http.server
import importlib
import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import trl_steady
import trl_steady.functional
import trl_steady.rewards

if "DOCS_SITE" not in os.environ:
    pytest.skip(
        "DOCS_SITE does not name a built site; `make docs` builds one and runs this file", allow_module_level=True
    )
SITE = Path(os.environ["DOCS_SITE"]).resolve()
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FORMULAS = ["methods/gspo/", "methods/kl/", "step-rewards/"]
PAGES = [
    *FORMULAS,
    "",
    "choose/",
    "frameworks/",
    "metrics/",
    "reference/",
    "recipes/",
    "recipes/moe/",
    "reference/grpo-config/",
]
# opens each page in a frame as wide as a phone, and reports what the browser made of it
REPORTER = """<body><pre id="report"></pre><script>
addEventListener("load", async () => {
  const report = {};
  for (const page of PAGES) {
    const frame = document.createElement("iframe");
    Object.assign(frame.style, {width: "400px", height: "800px"});
    frame.src = "/" + page;
    document.body.append(frame);
    await new Promise(loaded => frame.onload = loaded);
    const there = frame.contentDocument, root = there.documentElement;
    await there.fonts.ready;
    report[page] = {
      sideways: root.scrollWidth - root.clientWidth,
      text: there.body.innerText,
      // cells narrower than a word or two whose text has more than seven lines
      squeezed: [...there.querySelectorAll("td")].filter(cell => {
        const text = there.createRange();
        text.selectNodeContents(cell);
        const {width, height} = text.getBoundingClientRect();
        return width && width < 130 && height > 7 * 1.6 * parseFloat(getComputedStyle(cell).fontSize);
      }).map(cell => cell.innerText),
      formulas: [...there.querySelectorAll(".arithmatex .katex-html")].map(formula => formula.offsetWidth),
      fonts: [...there.fonts].filter(font => font.family.startsWith("KaTeX")).map(font => font.status),
      pictures: [...there.images].map(picture => [picture.src, picture.naturalWidth]),
      requested: frame.contentWindow.performance.getEntriesByType("resource").map(entry => entry.name),
    };
    frame.remove();
  }
  document.getElementById("report").textContent = JSON.stringify(report);
});
</script>"""


class Server(http.server.SimpleHTTPRequestHandler):
    """The site, and the page that reports on its pages."""

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path != "/reporter":
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(REPORTER.replace("PAGES", json.dumps(PAGES)).encode())


@pytest.fixture(scope="module")
def origin() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Server, directory=SITE)) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def report(origin: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Each page as the browser shows it when it can resolve no other host."""
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    switches = ["headless", "no-sandbox", "disable-gpu", "no-first-run", "disable-sync", "disable-component-update"]
    switches += ["disable-background-networking", "host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
    switches += [f"user-data-dir={tmp_path_factory.mktemp('browser')}", "virtual-time-budget=60000", "dump-dom"]
    command = [CHROMIUM, *(f"--{switch}" for switch in switches), f"{origin}reporter"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    return json.loads(html.unescape(re.search(r'<pre id="report">(.*?)</pre>', done.stdout, re.DOTALL)[1]))


@pytest.mark.parametrize("page", FORMULAS)
def test_formulas_are_rendered_without_network(report: dict[str, dict[str, Any]], page: str) -> None:
    shown = report[page]
    assert shown["formulas"] and all(width > 0 for width in shown["formulas"])
    assert not re.search(r"\\[(\[]|\$", shown["text"])  # raw formulas
    assert "loaded" in shown["fonts"] and "error" not in shown["fonts"]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_fits_a_phone_and_has_all_its_pictures(report: dict[str, dict[str, Any]], page: str) -> None:
    assert report[page]["sideways"] == 0
    assert all(width > 0 for _, width in report[page]["pictures"])
    assert page not in {"", "recipes/", "recipes/moe/"} or report[page]["pictures"]


@pytest.mark.parametrize("page", PAGES)
def test_no_column_of_a_table_is_squeezed_on_a_phone(report: dict[str, dict[str, Any]], page: str) -> None:
    assert report[page]["squeezed"] == []


@pytest.mark.parametrize("page", PAGES)
def test_a_page_requests_nothing_from_elsewhere(report: dict[str, dict[str, Any]], origin: str, page: str) -> None:
    assert [url for url in report[page]["requested"] if not url.startswith(origin)] == []


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


def test_every_public_name_has_a_signature() -> None:
    text = "\n".join(path.read_text() for path in sorted(SITE.glob("reference/*/index.html")))
    public = [(package.__name__, name) for package in (trl_steady, trl_steady.rewards) for name in package.__all__]
    for name in trl_steady.functional.__all__:
        module = importlib.import_module(f"trl_steady.functional.{name}")
        defined = [key for key, each in vars(module).items() if getattr(each, "__module__", "") == module.__name__]
        public += [(module.__name__, key) for key in defined if not key.startswith("_")]
    for package, name in public:
        signature = _signature(text, f"{'trl_steady' if name in trl_steady.__all__ else package}.{name}")
        assert re.match(rf"{name}(\(| = |: )", signature), f"{package}.{name}: {signature}"


def test_the_signature_of_the_config_shows_values() -> None:
    text = (SITE / "reference/grpo-config/index.html").read_text()
    signature = _signature(text, "trl_steady.GRPOConfig")
    assert f'loss_type: str = "{trl_steady.GRPOConfig.loss_type}",' in signature
    assert "**trl_options" in signature
    assert "trl_default" not in text and "field(" not in text
    assert not re.search(r'<h\d id="[\w.]*\._', text)  # a private name


def test_a_search_for_the_off_policy_mask_finds_its_page_first() -> None:
    """The search counts a word in a title a thousand times, and no other title has all three."""
    index = json.loads((SITE / "search/search_index.json").read_text())["docs"]
    titles = {entry["location"]: set(re.findall(r"\w+", entry["title"].lower())) for entry in index}
    found = {location.partition("#")[0] for location, words in titles.items() if {"off", "policy", "mask"} <= words}
    assert found == {"methods/masks/"}


def test_sources_are_linked_and_not_pages() -> None:
    assert not [path for kind in ("py", "yaml") for path in SITE.rglob(f"*.{kind}/index.html")]
    assert 'href="train.py"' in (SITE / "recipes/gspo/index.html").read_text()


def _signature(text: str, name: str) -> str:
    """The text of the code block under the heading of `name`."""
    heading = text.partition(f'id="{name}"')[2]
    block = re.match(r'(?:(?!<h\d).)*?<div class="[^"]*doc-signature[^"]*">(.*?)</div>', heading, flags=re.DOTALL)
    assert block, f"{name} has no signature"
    return html.unescape(re.sub(r"<[^>]+>", "", block[1])).strip()
