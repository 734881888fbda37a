"""The documentation site, in a browser without network. `make docs` builds it and names its folder in DOCS_SITE."""

import functools
import html
import http.server
import json
import os
import re
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

import trl_steady

if "DOCS_SITE" not in os.environ:
    pytest.skip(
        "DOCS_SITE does not name a built site; `make docs` builds one and runs this file", allow_module_level=True
    )
SITE = Path(os.environ["DOCS_SITE"]).resolve()
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FORMULAS = ["methods/gspo/", "methods/kl/", "step-rewards/"]
PAGES = [*FORMULAS, "", "frameworks/", "metrics/", "recipes/", "recipes/moe/", "reference/grpo-config/"]
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
      formulas: [...there.querySelectorAll(".arithmatex .katex-html")].map(formula => formula.offsetWidth),
      fonts: [...there.fonts].filter(font => font.family.startsWith("KaTeX")).map(font => font.status),
      pictures: [...there.images].map(picture => picture.naturalWidth),
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
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Each page as the browser shows it when it can resolve no other host."""
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    switches = ["headless", "no-sandbox", "disable-gpu", "no-first-run", "disable-sync", "disable-component-update"]
    switches += ["disable-background-networking", "host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
    switches += [f"user-data-dir={tmp_path_factory.mktemp('browser')}", "virtual-time-budget=60000", "dump-dom"]
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Server, directory=SITE)) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/reporter"
        command = [CHROMIUM, *(f"--{switch}" for switch in switches), url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
        server.shutdown()
    return json.loads(html.unescape(re.search(r'<pre id="report">(.*?)</pre>', done.stdout, re.DOTALL)[1]))


def test_formulas_are_rendered_and_pages_fit_a_phone_without_network(report: dict[str, dict[str, Any]]) -> None:
    for page, shown in report.items():
        assert shown["sideways"] == 0, page
        assert all(width > 0 for width in shown["pictures"]), page
    for page in FORMULAS:
        shown = report[page]
        assert shown["formulas"] and all(width > 0 for width in shown["formulas"])
        assert not re.search(r"\\[(\[]|\$", shown["text"])  # raw formulas
        assert "loaded" in shown["fonts"] and "error" not in shown["fonts"]


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
