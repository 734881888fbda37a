"""Fill the table of docs/performance.md with what `make test-gpu` has measured.

    python docs/figures/gpu.py [outputs/gpu.json]

With a file, it copies the file to docs/figures/gpu.json and writes the table. Without one, it writes the table of that
copy, or "Not yet run on a GPU" if there is none.
"""

import argparse
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FIGURES = Path(__file__).parent
PAGE = FIGURES.parent / "performance.md"
RECORDED = FIGURES / "gpu.json"
START, END = "<!-- gpu -->", "<!-- /gpu -->"
NOT_YET = "Not yet run on a GPU."


def table(results: Mapping[str, Any] | None) -> str:
    """Return the text between the two comments of the page."""
    if results is None:
        return NOT_YET
    tests: Sequence[Mapping[str, Any]] = results["tests"]
    failed, skipped = ([row for row in tests if row["outcome"] == each] for each in ("failed", "skipped"))
    passed = len(tests) - len(failed) - len(skipped)
    device, versions = results["device"], results["versions"]
    known = [f"{name} {found}" for name, found in versions.items() if found]
    capability = ".".join(map(str, device["capability"]))
    lines = [
        f"Recorded {results['recorded']} on one {device['name']} with {device['memory_bytes'] / 2**30:.0f} GiB, "
        f"compute capability {capability}, CUDA {device['cuda']}. Versions: {', '.join(known)}.",
        "",
        f"{passed} tests passed, {len(failed)} failed, {len(skipped)} were skipped. They took "
        f"{sum(row['seconds'] for row in tests):.0f} seconds; the longest took "
        f"{max(row['seconds'] for row in tests):.0f}. The largest peak memory was "
        f"{max(row['peak_bytes'] for row in tests) / 2**30:.1f} GiB.",
        "",
    ]
    lines += [f"- {row['outcome']}: `{_short(row['test'])}`. {_cell(row['reason'])}" for row in (*failed, *skipped)]
    lines += [""] * bool(failed or skipped)
    lines += ["| test | figure | value |", "|---|---|---|"]
    for row in tests:
        for number, figure in enumerate(row["figures"]):
            name = "" if number else f"`{_short(row['test'])}`"
            value = f"{figure['value']:.4g} {figure['unit']}".strip()
            lines.append(f"| {name} | {_cell(figure['name'])} | {value} |")
    return "\n".join(lines)


def _short(test: str) -> str:
    """Return the name of a test without its folder and its device."""
    return _cell(test.removeprefix("tests/gpu/").replace("-cuda]", "]").replace("[cuda]", "").replace("[cuda-", "["))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def filled(page: str, text: str) -> str:
    """Return the page with the text between the two comments."""
    replaced, count = re.subn(f"{START}\n.*?{END}", lambda _: f"{START}\n{text}\n{END}", page, flags=re.DOTALL)
    if count != 1:
        raise SystemExit(f"the page needs {START} and {END} once each, and has them {count} times")
    return replaced


def main(arguments: Sequence[str] | None = None, *, page: Path = PAGE, recorded: Path = RECORDED) -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", type=Path, help="the file that `make test-gpu` has written")
    source: Path | None = parser.parse_args(arguments).results
    found = source or (recorded if recorded.exists() else None)
    text = filled(page.read_text(), table(json.loads(found.read_text()) if found else None))
    if source and source.resolve() != recorded.resolve():
        shutil.copyfile(source, recorded)
    page.write_text(text)


if __name__ == "__main__":
    main()
