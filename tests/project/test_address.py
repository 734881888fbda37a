"""The repository's address stands in CITATION.cff, and PyPI shows a README whose links work."""

import importlib
import re
from pathlib import Path

import pytest

address = importlib.import_module("docs.hooks.address")
ADDRESS = "https://github.com/owner/name"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (f"repository-code: {ADDRESS}/", ADDRESS),
        (f'repository-code: "{ADDRESS}"', ADDRESS),
        (f"# repository-code: {ADDRESS}", ""),
    ],
)
def test_the_address_is_read(line: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "ROOT", tmp_path)
    assert address.read() == ""
    (tmp_path / "CITATION.cff").write_text(f"title: trl-steady\n{line}\n")
    assert address.read() == found


@pytest.mark.parametrize("known", ["", ADDRESS])
def test_the_readme_on_pypi_has_no_relative_links(known: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "REPOSITORY", known)
    shown, readme = address.description("0.1.0"), (address.ROOT / "README.md").read_text()
    assert not re.findall(r"\]\((?!https://|#)[^)]*\)|<(?:a|img) .*", shown)
    pictures = re.findall(r"!\[[^]]*\]\((?!https:)(.*?)\)", readme)
    assert [f"{known}/raw/v0.1.0/{name}" in shown for name in pictures] == [bool(known)] * len(pictures)
    if not known:  # the words stay
        words = re.sub(r"!?\[([^][]*)\]\((?!https:|#)[^)]*\)", r"\1", readme)
        assert shown.split() == words.split()


def test_links_lead_to_files_and_folders_of_the_tag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    given = "[a](docs) [b](docs/b.md#c) ![d](d.png) [e](#e) [f](https://f) `[g](g)`\n\n```\n[h](h)\n```\n"
    (tmp_path / "README.md").write_text(given)
    monkeypatch.setattr(address, "REPOSITORY", ADDRESS)
    kept = "[e](#e) [f](https://f) `[g](g)`\n\n```\n[h](h)\n```\n"
    assert address.description("1.2") == (
        f"[a]({ADDRESS}/tree/v1.2/docs) [b]({ADDRESS}/blob/v1.2/docs/b.md#c) ![d]({ADDRESS}/raw/v1.2/d.png) {kept}"
    )
    assert address.urls()["Repository"] == ADDRESS and address.site() == "https://owner.github.io/name/"
    monkeypatch.setattr(address, "REPOSITORY", "")
    assert address.description("1.2") == f"a b d {kept}" and address.urls() == {}
