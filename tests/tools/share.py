"""Print how much of `tests` stands inside test functions, with their decorators; fixtures and helpers are outside.

A thermometer for readers, and no test: `python tests/tools/share.py [FOLDER]`. Blank lines count, inside and outside.
"""

import ast
import sys
from collections import Counter
from pathlib import Path


def inside(source: str) -> int:
    """Return the lines of all test functions of a source, each from its first decorator to its end."""
    lines = 0
    for node in ast.walk(ast.parse(source)):
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if is_function and node.name.startswith("test_"):
            first = min(part.lineno for part in (node, *node.decorator_list))
            lines += (node.end_lineno or first) - first + 1
    return lines


def main(folder: Path) -> None:
    """Print one line for each folder below, and one for all of them."""
    lines = Counter[str]()
    tests = Counter[str]()
    for path in sorted(folder.rglob("*.py")):
        source = path.read_text()
        parts = path.relative_to(folder).parts
        for name in (parts[0] if len(parts) > 1 else ".", "in total"):
            lines[name] += len(source.splitlines())
            tests[name] += inside(source)
    for name in sorted(lines, key=lambda name: name == "in total"):
        share = 100 * tests[name] / max(lines[name], 1)
        print(f"{name:<12} {lines[name]:>6} lines, {tests[name]:>6} in tests, {share:3.0f} %")


if __name__ == "__main__":
    main(Path(sys.argv[1] if sys.argv[1:] else "tests"))
