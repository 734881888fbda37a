"""Records of metrics in the text of a log, told apart by the form of their lines. No framework is known here.

Each form is a function that returns the records of a line, or a class where a record has several lines.
"""

import math
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Rounded(float):
    """A zero that was printed with a fixed number of digits, such as 0.000: it may be a small number."""


class Record(NamedTuple):
    """Numbers that a log shows together."""

    form: str
    """"dict", "pairs", "cells", "line", "block", "table", "box", or "bar" for a progress bar without numbers."""
    label: str
    """The words before the step: "Global step", "rollout". For a bar, those before it."""
    step: int | None
    values: dict[str, float]
    last: int | None = None
    """The step at which the run will end."""
    is_cut: bool = False
    """True for a dictionary without its end."""


_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
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


def number(text: str) -> float | None:
    """Return the number that a text shows, also as a string or as np.float64(...), or None if it shows none."""
    try:
        value = float(text)
    except ValueError:
        return _wrapped_number(text)
    if value == 0 and _ROUNDED_ZERO.match(text):
        return Rounded(value)
    return value


_ROUNDED_ZERO = re.compile(r"\s*[-+]?0?\.0{2,}\s*$")
_WRAPPED = re.compile(rf"(?:np\.\w+|numpy\.\w+|tensor)\(\s*({_NUMBER}|nan|-?inf)\s*(?:,[^()]*)?\)")
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")


def _wrapped_number(text: str) -> float | None:
    text = text.strip()
    if text in ("None", "null"):  # TRL and JSON have it for NaN
        return math.nan
    if len(text) > 2 and text[0] == text[-1] and text[0] in "'\"":
        return number(text[1:-1])
    wrapped = _WRAPPED.fullmatch(text)
    if wrapped is not None:
        return number(wrapped[1])
    if _THOUSANDS.fullmatch(text):
        return float(text.replace(",", ""))
    return None


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


def records(lines: Iterable[str]) -> Iterator[Record]:
    """Return the records of a text, and its progress bars, in their order."""
    block = _Block()
    table = _Table()
    for line in whole(map(clean, lines)):
        if not line or line.isspace():
            continue
        yield from bars(line)
        found = pairs(line) or cells(line) or listed(line) or live_line(line) or dicts(line)
        yield from found
        if found:
            continue
        yield from block.take(line)
        yield from table.take(line)
    yield from block.end()
    yield from table.end()


# Lines that were cut: joined before anything is read.

_OPEN_DICT = re.compile(r"\{\s*(?:['\"][^{}]*)?$")
_IN_DICT = re.compile(r"\s*[\w'\"./:,@%()\[\]+\- ]*\}?[\s.…]*$")
_PAIRS = re.compile(r"\bstep:(\d+)(?: - (?=[\w@./(-]+)|\s*$)")
_NEXT_PAIR = re.compile(r"\s*- \S+:\S")
_PIECE = re.compile(r"\s?[^\s(\[]\S*(?: - \S+)*(?: -)?\s*$")
_MOST_LINES = 400


def whole(lines: Iterable[str]) -> Iterator[str]:
    """Join the lines of a record that was printed over several lines, or cut by a terminal."""
    held: list[str] = []
    for line in lines:
        if not held:
            if _is_cut(line):
                held.append(line)
            else:
                yield line
            continue
        if len(held) < _MOST_LINES and _goes_on(held, line):
            held.append(line)
            if "}" in line and not _is_pairs(held[0]):
                yield _joined(held)
                held = []
            continue
        yield _joined(held)
        held = []
        if _is_cut(line):
            held.append(line)
        else:
            yield line
    if held:
        yield _joined(held)


def _is_pairs(line: str) -> bool:
    return "step:" in line and _PAIRS.search(line) is not None


def _is_cut(line: str) -> bool:
    if _is_pairs(line):
        return True
    opened = line.rfind("{")
    return opened > line.rfind("}") and _OPEN_DICT.match(line, opened) is not None


def _goes_on(held: list[str], line: str) -> bool:
    """Tell whether a line continues the record whose lines are held."""
    if bars(line) or _is_pairs(line):
        return False
    if _is_pairs(held[0]):
        if _NEXT_PAIR.match(line):
            return True
        has_pair = " - " in line or ":" in line
        # a terminal cuts lines at its width: a piece without a pair follows pieces that are all as long
        is_last = len(held) > 1 and len({len(piece) for piece in held[1:]}) == 1
        return (has_pair or is_last) and _PIECE.match(line) is not None
    if "step " in line and _LINE.search(line):
        return False
    return bool(line.strip()) and _IN_DICT.match(line) is not None


def _joined(held: list[str]) -> str:
    """Return one line. A space stands between the pieces, except where a word or a number was cut."""
    text = held[0]
    for piece in held[1:]:
        if _is_pairs(held[0]):
            if _NEXT_PAIR.match(piece):
                text = f"{text.rstrip()} {piece.strip()}"
            else:
                text += piece
        elif text.rstrip().endswith((",", "{", ":")) or piece[:1].isspace():
            text = f"{text} {piece.strip()}"
        else:
            text += piece.strip()
    return text


# Forms of one line.

_BAR = re.compile(r"\b\d{1,3}%(?:\|[^|\n]*\|)?\s*(\d+)/(\d+) \[")  # pages drop the picture of a bar
_NOTEBOOK_BAR = re.compile(r"\[\s*(\d+)/(\d+) \d+:\d\d[^\]]*\bEpoch\b")


_SET = re.compile(rf", ([A-Za-z][\w/ ]*)=({_NUMBER})(?=[,\s]|$)")


def _postfix(text: str, step: int, last: int) -> list[Record]:
    """Return the record of metrics in a bar, such as `00:12<00:30, 1.2s/it, loss=0.1, reward=0.5, kl=0.01`."""
    values = {name: float(value) for name, value in _SET.findall(text)}
    if len(values) < 3:
        return []
    return [Record("dict", "bar", step, values, last)]


def bars(line: str) -> list[Record]:
    """Return the progress bars of a line, of tqdm and of notebooks."""
    found: list[Record] = []
    if "%" in line and "/" in line:
        end = 0
        for match in _BAR.finditer(line):
            label = line[end : match.start()].rpartition("]")[2].strip(" :")
            found.append(Record("bar", label, int(match[1]), {}, int(match[2])))
            end = match.end()
            found += _postfix(line[end:].partition("]")[0], int(match[1]), int(match[2]))
    if "Epoch" in line:
        for match in _NOTEBOOK_BAR.finditer(line):
            found.append(Record("bar", "", int(match[1]), {}, int(match[2])))
    return found


def pairs(line: str) -> list[Record]:
    """Return the record of a line such as `step:3 - actor/lr:1e-06 - critic/score/mean:0.5`."""
    if "step:" not in line:
        return []
    match = _PAIRS.search(line)
    if match is None:
        return []
    values: dict[str, float] = {}
    for word in line[match.end() :].split():
        name, _, text = word.rpartition(":")
        value = number(text)
        if name and value is not None:
            values[name] = value
    return [Record("pairs", "step", int(match[1]), values)]


_CELLS = re.compile(r"(?:^|[^\w/])(?<!Micro )[Ss]tep:? +(\d+)(?:/(\d+))? \| ([^'\"`]+)")
_CELL = re.compile(rf"([A-Za-z][\w./ -]*?)(?:\s*[:=]\s*|\s+)({_NUMBER}|nan|inf)(?:(%)|/(\d+))?")
_SECONDS = re.compile(rf"(?:Time:? ?)?\s*(?:(\d+)h)?\s*(?:(\d+)m)?\s*(?:({_NUMBER})s)?$")


_WITH_COMMAS = re.compile(
    r"(?:(?:^|[^\w/])([Ss]tep|[Ii]ter(?:ation)?):? +(\d+)(?:/(\d+))?|\]\((\d+)/(\d+)\))[,:] +([^'\"`]+)"
)


def listed(line: str) -> list[Record]:
    """Return the record of a line such as `Step: 3/40, Loss: 0.1, Reward: 0.5, KL: 0.01` or `[1/1](3/40), ...`."""
    if line.count(", ") < 3:
        return []
    match = _WITH_COMMAS.search(line)
    if match is None:
        return []
    name, step, last, batch, batches, text = match.groups()
    values = _cell_values(text.split(", "))
    if len(values) < 3:
        return []
    return [_record("cells", name or "Batch", step or batch, last or batches or "", values)]


def cells(line: str) -> list[Record]:
    """Return the record of a line such as `Step 3 | 22.5s | Reward 0.5000 | Truncation 1.0%`."""
    if "tep" not in line or " | " not in line:
        return []
    found: list[Record] = []
    for match in _CELLS.finditer(line):
        step, last, text = match.groups()
        values = _cell_values(text.split(" | "))
        label = "Timed step" if "Time" in values else "Step"
        found.append(_record("cells", label, step, last or "", values))
    return found


def _cell_values(texts: list[str]) -> dict[str, float]:
    values: dict[str, float] = {}
    time = _SECONDS.match(texts[0].strip())
    if time is not None and texts[0].strip():
        hours, minutes, seconds = time.groups(default="0")
        values["Time"] = 3600 * int(hours) + 60 * int(minutes) + float(seconds)
        texts = texts[1:]
    for text in texts:
        found = _CELL.match(" ".join(text.split()))
        value = number(found[2]) if found else None
        if found is None or value is None:
            continue
        parts = 1.0
        if found[3]:  # a percent sign
            parts = 100.0
        elif found[4]:  # "2 of 4" as 2/4
            parts = float(found[4]) or 1.0
        values[found[1]] = value / parts if parts != 1 else value
    return values


_LINE = re.compile(r"(?:^|\s)step (\d+)/(\d+)  (.+)")
_WORDS = re.compile(rf"([A-Za-z][A-Za-z ]*?) ({_NUMBER}|nan|inf)(%|x)?$")


def live_line(line: str) -> list[Record]:
    """Return the record of a line such as `step 12/32  reward 0.64  KL 0.076  clipped 4%`."""
    if "step " not in line:
        return []
    match = _LINE.search(line)
    if match is None:
        return []
    values: dict[str, float] = {}
    for part in re.split(r"\s{2,}", match[3].strip()):
        found = _WORDS.match(part)
        if found is None:
            continue
        value = float(found[2])
        if found[3] == "%":
            value /= 100
        values[found[1]] = value
    if not values:
        return []
    return [Record("line", "step", int(match[1]), values, int(match[2]))]


_DICT = re.compile(r"(?:([A-Za-z][A-Za-z ]{0,30}?)\s+(\d+)(?:/(\d+))?\s*:\s*)?(\{\s*[\"'][^{}]*)(\}|$|(?=\{))")
_HALF_DICT = re.compile(r"^\s*[\"']?[\w/ ]*[\"']: [^{}]*\}")
_PAIR = re.compile(
    r"([\"'])([^\"'{}]{1,200})\1\s*:\s*"
    r"(\"[^\"]*\"|'[^']*'|[\w.]+\([^()]*\)|[^,}\s]+)"
)


def dicts(line: str) -> list[Record]:
    """Return the records of the dictionaries in a line, as Python or JSON prints them, also of those that are cut.

    A dictionary is a record if most of its values are numbers: configs and answers are not.
    """
    found: list[Record] = []
    if "{" in line:
        for label, step, last, body, end in _DICT.findall(line):
            is_cut = end != "}"
            if is_cut:
                body = body.rpartition(",")[0]  # of the last number, some digits can be lost
            values, strings = _dict_values(body)
            if len(values) > strings:
                found.append(_record("dict", label, step, last, values)._replace(is_cut=is_cut))
    elif "}" in line and _HALF_DICT.match(line):
        values, strings = _dict_values(line)
        if len(values) > max(strings, 2):
            found.append(_record("dict", "", "", "", values))
    return found


def _record(form: str, label: str, step: str, last: str, values: dict[str, float]) -> Record:
    return Record(form, label.strip(), int(step) if step else None, values, int(last) if last else None)


def _dict_values(body: str) -> tuple[dict[str, float], int]:
    """Return the numbers of a dictionary, and how many other values it has. "5/60" is a number and "NAME of"."""
    values: dict[str, float] = {}
    others = 0
    for _, name, text in _PAIR.findall(body):
        value = number(text)
        if value is not None:
            values[name] = value
            continue
        place = re.fullmatch(r"[\"']?(\d+)/(\d+)[\"']?", text)
        if place:
            values[name] = float(place[1])
            values[f"{name} of"] = float(place[2])
        elif not re.search(r"\d", text):  # "1m 29s", "0.13%" and lists of numbers do not count
            others += 1
    return values, others


# Forms of several lines.

_HEADING = re.compile(r"={5,}\s*(?:\w+ )?Step (\d+)(?:/(\d+))?\s*={5,}", re.IGNORECASE)
_BULLET = re.compile(rf"\s*•\s*([\w /().-]+?):\s*({_NUMBER}|nan|inf)(%?)")


class _Block:
    """A heading such as `==== Step 2/4 ====` and lines such as `• Loss: 0.1`. Without headings, a name that comes
    again begins the next block."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._last: int | None = None
        self._values: dict[str, float] = {}

    def take(self, line: str) -> Iterator[Record]:
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
        if self._values:
            yield Record("block", "Step", self._step, self._values, self._last)
        self._step = None
        self._values = {}


_STEPS = ("step", "steps", "global_step", "training step", "iteration")
_LINES = re.compile(r"[\s|:+─━═┼╋┿│┃╭╮╰╯┌┐└┘├┤┬┴┏┓┗┛┡┩╇╈-]+$")


class _Table:
    """Rows below a row of names that begins with "Step", and boxes with a name and a number in each row."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._box: dict[str, float] = {}

    def take(self, line: str) -> Iterator[Record]:
        if _LINES.match(line):  # a rule between rows
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
            if value is not None:
                if columns[0] in self._box:
                    yield from self.end()
                self._box[columns[0]] = value
                return
        yield from self.end()

    def end(self) -> Iterator[Record]:
        if len(self._box) > 2:
            yield Record("box", "", None, self._box)
        self._box = {}


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
