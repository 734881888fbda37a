"""The code blocks of pages, and how to run one."""

import ast
import re
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]


class Block(NamedTuple):
    """A fenced block of a page, and the line of its first line."""

    page: str
    line: int
    language: str
    source: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_fragment(self) -> bool:
        """True if the block has `...` as an argument, which the reader completes. It cannot run as it is."""
        return any(isinstance(node, ast.Constant) and node.value is ... for node in ast.walk(ast.parse(self.source)))


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text()
    found = re.finditer(r"^```(\w+)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [Block(page, text.count("\n", 0, block.start(2)) + 1, block[1], block[2]) for block in found]


def run(block: Block, names: dict[str, str] | None = None) -> dict[str, Any]:
    """Execute a block with other names for what comes from a hub, and nothing else replaced. Return its globals."""
    source = block.source
    for name, local in (names or {}).items():
        assert source.count(f'"{name}"') == 1
        source = source.replace(f'"{name}"', repr(local))
    found: dict[str, Any] = {"__name__": "__main__"}
    # errors then show the line of the page
    exec(compile("\n" * (block.line - 1) + source, ROOT / block.page, "exec"), found)
    return found
