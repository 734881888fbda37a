"""Write tables into pages of docs, between comments that name them."""

import re
from collections.abc import Mapping
from pathlib import Path


def replaced(page: str, name: str, text: str) -> str:
    """Return the page with the text between the markers of this name."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    return re.sub(f"{begin}.*?{end}", lambda _: f"{begin}\n{text}\n{end}", page, flags=re.DOTALL)


def show(tables: Mapping[str, str], page: Path, *, write: bool) -> None:
    """Print tables by name, and write them into the page if asked to."""
    content = page.read_text()
    for name, text in tables.items():
        print(f"{name}\n\n{text}\n")
        content = replaced(content, name, text)
    if write:
        page.write_text(content)
