"""Lines of a log that belong together: a record printed over several lines, or cut by a terminal.

They are joined before anything is read.
"""

import re
from collections.abc import Iterable, Iterator

from trl_steady.report.line_forms import LINE, STEP_OF_PAIRS, bars

_OPEN_DICT = re.compile(r"\{\s*(?:['\"][^{}]*)?$")
_IN_DICT = re.compile(r"\s*[\w'\"./:,@%()\[\]+\- ]*\}?[\s.…]*$")
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
    return "step:" in line and STEP_OF_PAIRS.search(line) is not None


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
    if "step " in line and LINE.search(line):
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
