"""MkDocs hook: add recipes/, src/ and the notebooks to the site, and let links between files hold there and on GitHub.

- A README becomes a page. A recipe's page ends with a list of its files. The home page begins as README.md does.
- A link to another file or folder of recipes/ or src/ leads to the repository, and so does a link to edit each page.
- Without the repository's address, the files are copied, and a folder without a README becomes a list of its files.
- A notebook becomes a page with its saved outputs, and can be downloaded.
- A pattern in a section of the navigation, such as `methods/*.md`, becomes the pages that match it.
"""

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from address import REPOSITORY, ROOT, in_repository, site
from mkdocs.structure.files import File, Files, InclusionLevel

_SOURCES = {".yaml", ".yml", ".py", ".json", ".jsonl", ".sbatch"}
# code first, so that links inside it stay
_LINK = re.compile(r"^(`{3,}).*?^\1`*$|`[^`]+`|\]\((?![a-z]+:|#)([^)#\s]+)", flags=re.DOTALL | re.MULTILINE)
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_config(config: Any) -> Any:
    """Give the site its addresses, and its navigation the pages that patterns match."""
    for section in config.nav:
        for entries in section.values():
            entries[:] = _with_matches(entries, Path(config.docs_dir))
    if REPOSITORY:
        name = "/".join(REPOSITORY.split("/")[-2:])
        config.update(repo_url=REPOSITORY, repo_name=name, edit_uri="edit/main/docs/", site_url=site())
    return config


def _with_matches(entries: list[Any], folder: Path) -> list[Any]:
    """Return a section of the navigation, with the pages that match in place of each pattern."""
    found: list[Any] = []
    for entry in entries:
        if isinstance(entry, str) and "*" in entry:
            found += [path.relative_to(folder).as_posix() for path in sorted(folder.glob(entry))]
        else:
            found.append(entry)
    return found


def on_files(files: Files, config: Any) -> Files:
    """Add the changelog, the files of recipes/, and a page for each notebook."""
    found = [*sorted((ROOT / "recipes").rglob("*")), *sorted((ROOT / "src").rglob("*.py"))]
    for path in [ROOT / "CHANGELOG.md", ROOT / "recipes", *found]:
        name = path.relative_to(ROOT).as_posix()
        if "__pycache__" in path.parts or path.name.startswith("_"):
            continue
        is_copied = path.suffix == ".png" or (path.suffix in _SOURCES and not REPOSITORY)
        if path.suffix == ".md" or is_copied:
            file = File.generated(config, _on_site(name), abs_src_path=str(path))
            file.edit_uri = f"../{name}"
            files.append(file)
        elif path.is_dir() and not (path / "README.md").is_file() and not REPOSITORY:
            folder = File.generated(config, _on_site(name), content=_folder(path), inclusion=InclusionLevel.NOT_IN_NAV)
            files.append(folder)
    for notebook in [file for file in files if file.src_uri.endswith(".ipynb")]:
        content = _page_of(json.loads(notebook.content_string), Path(notebook.src_uri).name)
        files.append(File.generated(config, _on_site(f"docs/{notebook.src_uri}"), content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Change links between files of the repository into links between pages, and list the files of a recipe."""
    uri = page.file.src_uri
    if uri == "index.md":
        head = (ROOT / "README.md").read_text().partition("## Next steps")[0]
        return _linked(head, uri, "") + _linked(markdown, uri, "docs")
    is_outside = uri == "changelog.md" or uri.startswith("recipes/")
    folder = posixpath.dirname(uri if is_outside else f"docs/{uri}")
    if re.fullmatch(r"recipes/\w+/README\.md", uri):
        markdown += f"\n## Files\n\n{_list(ROOT / folder)}\n"
    return _linked(markdown, uri, folder)


def _linked(markdown: str, uri: str, folder: str) -> str:
    """Return the text of a file of `folder` with links as a page at `uri` needs them."""

    def link(found: re.Match) -> str:
        if found[2] is None:  # code
            return found[0]
        name = posixpath.normpath(posixpath.join(folder, found[2]))
        target = _on_site(name)
        if REPOSITORY and name.startswith(("recipes", "src/")) and not target.endswith(("README.md", ".png")):
            return f"]({in_repository(name)}"
        return f"]({posixpath.relpath(target, posixpath.dirname(uri) or '.')}"

    return _LINK.sub(link, markdown)


def _on_site(name: str) -> str:
    """Return where the site has a file of the repository, which need not exist."""
    path = ROOT / name
    if name.startswith(("recipes", "src/")):
        if path.is_dir():
            return f"{name}/README.md" if (path / "README.md").is_file() else f"{name}/index.md"
        return name
    if path.suffix == ".ipynb":
        name = name.removesuffix(".ipynb") + ".md"
    return {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}.get(name, name.removeprefix("docs/"))


def _folder(path: Path) -> str:
    """Return a page that lists a folder."""
    name = path.relative_to(ROOT).as_posix()
    head = f"---\ntitle: {name}\nsearch: {{exclude: true}}\nhide: [navigation, toc]\n---\n\n"
    return f"{head}# `{name}`\n\n{_list(path)}\n"


def _list(path: Path) -> str:
    """Return links to what is in a folder."""
    entries = (entry for entry in sorted(path.iterdir()) if entry.name[0] not in "._" and entry.name != "README.md")
    return "\n".join(f"- [`{entry.name}`]({entry.name})" for entry in entries)


def _page_of(notebook: dict[str, Any], name: str) -> str:
    """Return a notebook as Markdown, with the outputs that it was saved with."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] != "code":
            parts.append(source)
        elif source.strip():
            parts += [f"``````python\n{source}\n``````", *map(_output, cell["outputs"])]
    heading, _, rest = "\n\n".join(parts).partition("\n")
    return f'{heading}\n\n<a href="../{name}" download>Download this notebook</a>\n{rest}'


def _output(output: dict[str, Any]) -> str:
    """Return one output of a cell as Markdown: a picture, HTML or text."""
    data = output.get("data", {})
    if "image/png" in data:
        return f'<img alt="" src="data:image/png;base64,{"".join(data["image/png"].split())}">'
    if "text/html" in data:
        compact = re.sub(r"\n\s*\n", "\n", "".join(data["text/html"]))  # an empty line would end the HTML block
        plain = re.sub(
            r'<style scoped>.*?</style>| border="1" class="dataframe"', "", compact, flags=re.DOTALL
        )  # pandas
        return f'<div class="output">{plain}</div>'
    text = "".join(output.get("text") or data.get("text/plain") or output.get("traceback", []))
    lines = [line.rpartition("\r")[2] for line in _ANSI.sub("", text).splitlines()]  # the last state of a progress bar
    return "\n".join(["``````{ .text .output }", *lines, "``````"])
