"""Records of several lines: blocks below a heading, tables and boxes."""

import re
from collections.abc import Iterable, Iterator

from trl_steady.report.record import NUMBER, Record, number

_HEADING = re.compile(r"={5,}\s*(?:\w+ )?Step (\d+)(?:/(\d+))?\s*={5,}", re.IGNORECASE)
_BULLET = re.compile(rf"\s*•\s*([\w /().-]+?):\s*({NUMBER}|nan|inf)(%?)")


class Block:
    """A heading such as `==== Step 2/4 ====` and lines such as `• Loss: 0.1`. Without headings, a name that comes
    again begins the next block."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._last: int | None = None
        self._values: dict[str, float] = {}

    def take(self, line: str) -> Iterator[Record]:
        """Read a line, and yield the records that it ends."""
        heading = _HEADING.search(line) if "====" in line else None
        if heading is not None:
            yield from self.end()
            self._step = int(heading[1])
            self._last = int(heading[2]) if heading[2] else None
            return
        bullet = _BULLET.match(line) if "•" in line else None
        value = number(bullet[2]) if bullet else None
        if bullet is None or value is None:
            return
        name = bullet[1]
        if name in self._values:
            if self._step is not None:
                return
            yield from self.end()
        self._values[name] = value / 100 if bullet[3] else value

    def end(self) -> Iterator[Record]:
        """Yield the record that is left."""
        if self._values:
            yield Record("block", "Step", self._step, self._values, self._last)
        self._step = None
        self._values = {}


_TITLE = re.compile(r"\s*Step (\d+)\s*$")
_STEPS = ("step", "steps", "global_step", "training step", "iteration")
_LINES = re.compile(r"[\s|:+─━═┼╋┿│┃╭╮╰╯┌┐└┘├┤┬┴┏┓┗┛┡┩╇╈┳┻┠┨-]+$")


class Table:
    """Rows below a row of names that begins with "Step", and boxes with a name and a number in each row.

    A box may have a title: a line above it with the step alone, such as `Step 2`.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._box: dict[str, float] = {}
        self._step: int | None = None

    def take(self, line: str) -> Iterator[Record]:
        """Read a line, and yield the records that it ends."""
        if _LINES.match(line):  # a rule between rows
            return
        title = _TITLE.match(line)
        if title is not None:
            yield from self.end()
            self._step = int(title[1])
            return
        columns = _columns(line)
        if len(columns) > 2 and columns[0].lower() in _STEPS and number(columns[1]) is None:
            self._names = [name.replace(" / ", "/") for name in columns]
            return
        if self._names and len(columns) == len(self._names):
            step = number(columns[0])
            if step is not None and step.is_integer():
                yield Record("table", self._names[0], int(step), _numbers(self._names[1:], columns[1:]))
                return
        if len(columns) == 2 and line.lstrip()[:1] in "|│┃":
            value = number(columns[1])
            if value is None and not self._box:  # the names of both columns, below the title
                return
            if value is not None:
                if columns[0] in self._box:
                    yield from self.end()
                self._box[columns[0]] = value
                return
        yield from self.end()

    def end(self) -> Iterator[Record]:
        """Yield the record that is left."""
        if len(self._box) > 2:
            label = "" if self._step is None else "Step"
            yield Record("box", label, self._step, self._box)
        self._box = {}
        self._step = None


def _columns(line: str) -> list[str]:
    """Return the columns of a line: between bars, tabs, or two and more spaces."""
    line = line.strip()
    if "\t" in line:
        columns = line.split("\t")
    elif re.search(r"[|│┃]", line):
        columns = re.split(r"[|│┃]", line.strip("|│┃"))
    else:
        columns = re.split(r"\s{2,}", line)
    return [column.strip() for column in columns]


def _numbers(names: Iterable[str], texts: Iterable[str]) -> dict[str, float]:
    values: dict[str, float] = {}
    for name, text in zip(names, texts, strict=True):
        value = number(text) if text else None
        if value is not None:
            values[name] = value
    return values
