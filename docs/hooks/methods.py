"""Make the texts that methods.toml has all data for: the README's table, the list of papers, and their BibTeX.

They are committed, so that GitHub and PyPI show them. A test compares the files with what this script makes.

Usage: python docs/hooks/methods.py
"""

import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- made by docs/hooks/methods.py -->\n", "\n<!-- end -->"
Table = dict[str, list[dict[str, Any]]]


def read() -> Table:
    """Return the groups of methods, the problems that they solve, and the papers."""
    return tomllib.loads((ROOT / "src/trl_steady/config/methods.toml").read_text())


def problems(table: Table) -> str:
    """Return the README's table: what goes wrong, which methods to try, and what TRL has."""
    lines = ["| what goes wrong | what to try | in TRL 1.16 |", "|---|---|---|"]
    for problem in table["problem"]:
        links = [_link(group) for group in table["group"] if group.get("problem") == problem["id"]]
        lines.append(f"| {problem['text']} | {', '.join(links)} | {problem.get('in_trl', 'no')} |")
    return "\n".join(lines)


def _link(group: dict[str, Any]) -> str:
    """Return the README's link to a group of methods."""
    label = group.get("label", group["methods"][0]["name"])
    heading = f"#{group['anchor']}" if "anchor" in group else ""
    return f"[{label}](docs/{group['page']}{heading})"


def papers(table: Table) -> str:
    """Return the list of papers by their short titles, with the methods that follow them."""
    lines: list[str] = []
    for paper in table["paper"]:
        title = re.sub("[{}]", "", paper["title"]).partition(": ")[0]
        methods = list(_methods(table, paper["arxiv"]))
        if "also" in paper:
            methods.append(paper["also"])
        address = f"https://arxiv.org/abs/{paper['arxiv']}"
        lines.append(f"- **{title}** ([{paper['arxiv']}]({address}), `{paper['key']}`): {'; '.join(methods)}")
    return "\n".join(lines)


def _methods(table: Table, arxiv: str) -> Iterator[str]:
    """Yield the links to the methods that follow a paper, with the place in the paper."""
    for group in table["group"]:
        for method in group["methods"]:
            if found := re.search(rf"{re.escape(arxiv)}([^;]*)", method.get("paper", "")):
                yield f"[{method['name']}]({group['page']}){found[1]}"


def bibtex(table: Table) -> str:
    """Return the BibTeX entries of the papers, as a file of their own."""
    return "\n\n".join(map(_entry, table["paper"])) + "\n"


def _entry(paper: dict[str, Any]) -> str:
    fields = {
        "title": paper["title"],
        "author": paper["authors"],
        "year": paper["year"],
        "journal": f"arXiv preprint arXiv:{paper['arxiv']}",
    }
    lines = [f"  {name:7} = {{{value}}}," for name, value in fields.items()]
    return "\n".join([f"@article{{{paper['key']},", *lines, "}"])


PARTS: dict[str, Callable[[Table], str]] = {
    "README.md": problems,
    "docs/paper-index.md": papers,
    "docs/references.bib": bibtex,
}


def filled(name: str, text: str) -> str:
    """Return a file of `PARTS` with the text between its marks. A file of BibTeX is the text."""
    if name.endswith(".bib"):
        return text
    page = (ROOT / name).read_text()
    return re.sub(f"(?<={re.escape(BEGIN)}).*(?={re.escape(END)})", lambda _: f"\n{text}\n", page, flags=re.DOTALL)


if __name__ == "__main__":
    for name, make in PARTS.items():
        (ROOT / name).write_text(filled(name, make(read())))
