"""Find sentences in the docs and docstrings that are hard to read.

    python -m tests.tools.sentences [FILE ...]

A sentence is reported if it has more than 30 words, or if it starts with "What", "Where", "Of" or the like and is not
a question. Without files, the script reads the documentation and the docstrings. It helps authors and does not measure
quality. If a sentence has to stay as it is, list it in `EXCEPTIONS` with the reason.
"""

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
LIMIT = 30
"""Words in a sentence."""
OPENINGS = ("And", "Of", "What", "Whatever", "Where", "Whether")
EXCEPTIONS: dict[str, str] = {}
"""The beginning of a sentence, and why it stays."""

# a word that ends with a full stop and does not end a sentence
_SHORT = re.compile(r"\b(?:e\.g|i\.e|vs|etc|cf|al|eq|Eq|sec|Sec|Fig|fig|No|approx)\.$")
_END = re.compile(r"(?<=[.!?])[\"')\]*_]*\s+(?=[\"'(\[*_`]*[A-Z`\d$])")
_SECTION = re.compile(r"(?:Args|Returns|Yields|Raises|Warns|Attributes|Example|Examples|Note|Source):")
_ENTRY = re.compile(r"\*{0,2}[\w.]+(?:, \*{0,2}[\w.]+)*(?: \([^)]*\))?: ")


class Finding(NamedTuple):
    """A sentence, where it is, and what is wrong with it."""

    file: str
    line: int
    why: str
    sentence: str


def files() -> list[Path]:
    """Return the pages and modules that have to pass."""
    globs = ("*.md", "docs/**/*.md", "recipes/**/*.md", "src/**/*.py")
    return [path for pattern in globs for path in sorted(ROOT.glob(pattern))]


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs of a file with their lines: list items, table cells and headings are each their own."""
    if path.suffix == ".md":
        yield from _of_markdown(path.read_text().splitlines())
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and ast.get_docstring(node):
                yield from _of_docstring(first.lineno, ast.get_docstring(node) or "")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "option":  # the text of an option
            yield node.lineno, ast.literal_eval(node.args[1])


def sentences(paragraph: str) -> list[str]:
    """Split a paragraph into its sentences."""
    found: list[str] = []
    for part in _END.split(paragraph.strip()):
        if found and _SHORT.search(found[-1]):
            found[-1] += f" {part}"
        else:
            found.append(part)
    return found


def words(sentence: str) -> int:
    """Count the words of a sentence: a piece of code, a formula or a link's target is at most one."""
    plain = re.sub(r"`[^`]*`", "code", sentence)
    plain = re.sub(r"\$[^$]*\$", "formula", plain)
    plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", plain)
    return len([word for word in plain.split() if re.search(r"\w", word)])


def findings(paths: Iterable[Path]) -> list[Finding]:
    """Return what is wrong with the sentences of these files."""
    found: list[Finding] = []
    for path in paths:
        name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.as_posix()
        for line, paragraph in texts(path):
            for sentence in sentences(paragraph):
                if any(sentence.startswith(beginning) for beginning in EXCEPTIONS):
                    continue
                opening = re.match(r"[*_\"'(]*(\w+)", sentence)
                if (length := words(sentence)) > LIMIT:
                    found.append(Finding(name, line, f"{length} words", sentence))
                if opening and opening[1] in OPENINGS and not sentence.rstrip("*_\"')").endswith("?"):
                    found.append(Finding(name, line, f"starts with {opening[1]!r}", sentence))
    return found


def _of_markdown(lines: list[str]) -> Iterator[tuple[int, str]]:
    paragraph: list[str] = []
    first, fence = 1, ""
    for number, line in enumerate([*lines, ""], start=1):
        stripped = re.sub(r"^(?:> ?)+", "", line.strip())
        marker = re.match(r"(`{3,}|~{3,}|\$\$)", stripped)
        is_fence = bool(fence) or bool(marker)
        is_own = bool(re.match(r"(#+ |[-*+] |\d+\. |\||:::|!!!|\?\?\?|<)", stripped))
        if paragraph and (not stripped or is_own or is_fence):
            yield first, " ".join(paragraph)
            paragraph = []
        if is_fence:
            if marker and (not fence or stripped.startswith(fence)):
                closes_at_once = marker[1] == "$$" and stripped.count("$$") > 1
                fence = "" if fence or closes_at_once else marker[1]
            elif fence == "$$" and "$$" in stripped:
                fence = ""
        elif stripped.startswith("|"):
            if not re.fullmatch(r"[|:\s-]+", stripped):
                cells = re.split(r"(?<!\\)\|", stripped.strip("|"))
                yield from ((number, cell.strip()) for cell in cells if cell.strip())
        elif stripped and not re.match(r"(:::|<)", stripped):
            if not paragraph:
                first = number
            paragraph.append(re.sub(r"^(#+|[-*+]|\d+\.|!!!|\?\?\?) ", "", stripped))


def _of_docstring(first: int, text: str) -> Iterator[tuple[int, str]]:
    paragraph: list[str] = []
    start, in_section, code = first, False, False
    for number, line in enumerate([*text.splitlines(), ""], start=first):
        stripped = line.strip()
        if code and not stripped:
            code = False
        code |= stripped.startswith(">>>")
        is_heading = bool(_SECTION.fullmatch(stripped))
        is_entry = in_section and bool(_ENTRY.match(stripped)) and line.startswith("    ")
        is_item = bool(re.match(r"[-*] ", stripped))
        if paragraph and (not stripped or is_heading or is_entry or is_item or code):
            yield start, " ".join(paragraph)
            paragraph = []
        in_section = is_heading or (in_section and (not stripped or line.startswith("    ")))
        if stripped and not is_heading and not code:
            if not paragraph:
                start = number
            paragraph.append(_ENTRY.sub("", stripped, count=1) if is_entry else re.sub(r"^[-*] ", "", stripped))


def main() -> int:
    """Report the files that the command line names."""
    found = findings([Path(name).resolve() for name in sys.argv[1:]] or files())
    lines = [f"{each.file}:{each.line}: {each.why}: {each.sentence}" for each in found]
    sys.stdout.write("\n".join([*lines, f"{len(found)} sentences", ""]))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
