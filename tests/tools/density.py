"""Print how dense the lines of `src` are: expressions inside expressions, for 1,000 lines that are not blank.

A thermometer for readers, and no test: `python tests/tools/density.py [FOLDER ...]`.
"""

import ast
import sys
from collections import Counter
from pathlib import Path

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def density(folder: Path) -> str:
    """Return the counts of all Python files below a folder, as one line."""
    found = Counter[str]()
    for path in folder.rglob("*.py"):
        source = path.read_text()
        found["lines"] += sum(1 for line in source.splitlines() if line.strip())
        for node in ast.walk(ast.parse(source)):
            found["comprehensions"] += isinstance(node, COMPREHENSIONS)
            found["ternaries"] += isinstance(node, ast.IfExp)
            found["starred"] += isinstance(node, ast.Starred)
    lines = max(found["lines"], 1)
    names = ("comprehensions", "ternaries", "starred")
    shares = ", ".join(f"{1000 * found[name] / lines:.0f} {name}" for name in names)
    return f"{folder}: {shares} per 1,000 of {lines} lines"


if __name__ == "__main__":
    for name in sys.argv[1:] or ["src"]:
        print(density(Path(name)))
