"""Records of metrics in the text of a log, told apart by the form of their lines. No framework is known here."""

import re
from collections.abc import Iterable, Iterator

from trl_steady.report.block_forms import Block, Table
from trl_steady.report.cut_lines import whole
from trl_steady.report.line_forms import bars, cells, counted_cells, dicts, listed, live_line, pairs
from trl_steady.report.record import Record


def records(lines: Iterable[str]) -> Iterator[Record]:
    """Return the records of a text, and its progress bars, in their order."""
    block = Block()
    table = Table()
    for line in whole(map(clean, lines)):
        if not line or line.isspace():
            continue
        yield from bars(line)
        found = pairs(line) or cells(line) or counted_cells(line) or listed(line) or live_line(line) or dicts(line)
        yield from found
        if found:
            continue
        yield from block.take(line)
        yield from table.take(line)
    yield from block.end()
    yield from table.end()


_ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
_LOST_ESCAPE = re.compile(r"\[(?:0|3\d|1;3\d)m")  # of a page that does not show the escape character
_TIME = r"\[?\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?"
# what launchers and loggers write before a line, for one process each
_PREFIX = re.compile(
    rf"""(?:
      \(\w[\w.:]*\s+pid=\d+[^)]*\)\s?        # (TaskRunner pid=123, ip=10.0.0.1)
    | \[(?:default|rank)?\d+\]:\s?           # [rank0]:
    | [A-Za-z][\w.]*[/-]\d+\s*\|\s           # trainer/0 |
    | {_TIME}\s*(?:-\s|\|\s)?                # 2025-06-01 12:00:00,123 -
    | (?:DEBUG|INFO|SUCCESS|WARNING)\b\s?(?:[-:|]\s)?
    )""",
    re.VERBOSE,
)


def clean(line: str) -> str:
    """Return a line without colours, and without what launchers and loggers write before it."""
    if "\x1b" in line:
        line = _ANSI.sub("", line)
    elif _LOST_ESCAPE.match(line):
        line = _LOST_ESCAPE.sub("", line)
    line = line.rstrip("\n")
    while True:
        match = _PREFIX.match(line)
        if match is None:
            return line
        line = line[match.end() :]
