"""The address of the repository, which stands in CITATION.cff alone, and the texts that need it.

While it is not known, pages link to nothing outside, and the package's description has no links to files.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
# code first, so that links inside it stay
_RELATIVE = re.compile(
    r"^(`{3,}).*?^\1`*$|`[^`]+`|(!?)\[([^][]*)\]\((?![a-z]+:|#)([^)\s]+)\)", flags=re.DOTALL | re.MULTILINE
)


def read() -> str:
    """Return the address, or an empty string."""
    citation = ROOT / "CITATION.cff"
    text = citation.read_text() if citation.is_file() else ""
    found = re.search(r"""^repository-code: *["']?([^\s"']+)""", text, flags=re.MULTILINE)
    return found[1].rstrip("/") if found else ""


REPOSITORY = read()
"""Such as `https://github.com/owner/name`, or an empty string."""


def site() -> str:
    """Return the address of the site, for a repository at GitHub."""
    found = re.fullmatch(r"https://github\.com/([^/]+)/([^/]+)", REPOSITORY)
    return f"https://{found[1]}.github.io/{found[2]}/" if found else ""


def in_repository(name: str, version: str = "main", picture: bool = False) -> str:
    """Return the address of a file, folder or picture of the repository in a branch or tag."""
    kind = "raw" if picture else "tree" if (ROOT / name).is_dir() else "blob"
    return f"{REPOSITORY}/{kind}/{version}/{name}"


def urls() -> dict[str, str]:
    """Return the links of the package's page on PyPI."""
    if not REPOSITORY:
        return {}
    found = {"Repository": REPOSITORY, "Issues": f"{REPOSITORY}/issues", "Changelog": in_repository("CHANGELOG.md")}
    return found | ({"Documentation": site()} if site() else {})


def description(version: str) -> str:
    """Return the README for PyPI, which knows no other file: links lead to the tag of the version."""

    def absolute(found: re.Match[str]) -> str:
        picture, text, name = found[2], found[3], found[4]
        if name is None:  # code
            return found[0]
        return f"{picture}[{text}]({in_repository(name, f'v{version}', bool(picture))})" if REPOSITORY else text

    return _RELATIVE.sub(absolute, (ROOT / "README.md").read_text())
