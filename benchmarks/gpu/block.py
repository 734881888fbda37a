"""The block of text that `make gpu` ends in: write it, and accept or refuse one that somebody pasted.

It needs Python alone.
"""

import json
import math
import os
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

NAMES = (
    "tests",
    "steps in bf16",
    "steps in fp16",
    "steps in NF4 with LoRA",
    "padding",
    "replay",
    "kept mask",
    "memory",
    "vLLM",
)
"""All parts, in their order."""
OUTCOMES = ("passed", "failed", "timed out", "skipped", "not started")
FIRST = "=== trl-steady GPU results, format 1 ==="
HEADS = ("recorded", "device", "versions", "source")
REHEARSAL = "CPU, a rehearsal"
"""The device of a run that rehearses without a GPU."""
_LAST = re.compile(r"=== end, (\d+) lines, check ([0-9a-f]{8}) ===")
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PART = re.compile(r"\[(.+)\] ([a-z ]+), (\d+) s(?:: (.+))?")
_FIGURE = re.compile(r"(.+): (\S+)(?: (\S+))?")


class Figure(NamedTuple):
    """A number of a part."""

    name: str
    value: float
    unit: str = ""


class Part(NamedTuple):
    """The result of a part."""

    name: str
    outcome: str
    """One of `OUTCOMES`."""
    seconds: int = 0
    note: str = ""
    """A reason, or counts."""
    figures: tuple[Figure, ...] = ()


class Results(NamedTuple):
    """The results of a run, and its machine."""

    heads: dict[str, str]
    """A text for each of `HEADS`."""
    parts: Sequence[Part]

    @property
    def is_rehearsal(self) -> bool:
        """Return whether no GPU computed this."""
        return self.heads["device"].startswith(REHEARSAL)


def save(path: Path, content: dict[str, Any]) -> None:
    """Write JSON to a file, which is whole at any time."""
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(temporary, path)


def written(results: Results) -> str:
    """Return the block."""
    lines = [FIRST]
    for head in HEADS:
        lines.append(_one_line(f"{head}: {results.heads[head]}"))
    for part in results.parts:
        line = f"[{part.name}] {part.outcome}, {part.seconds} s"
        if part.note:
            line = f"{line}: {part.note}"
        lines.append(_one_line(line))
        for figure in part.figures:
            lines.append(_one_line(f"{figure.name}: {figure.value:.4g} {figure.unit}"))
    lines.append(f"=== end, {len(lines)} lines, check {_check(lines)} ===")
    return "\n".join(lines)


def read(text: str) -> Results:
    """Return what a pasted block says.

    Quotes, fences, indentation and empty lines are ignored, and so is all text before and after the block.

    Raises:
        ValueError: It is no whole block of `make gpu`. The message says why.
    """
    lines = _lines_of_block(text)
    heads: dict[str, str] = {}
    for head, line in zip(HEADS, lines[1:], strict=False):
        name, separator, value = line.partition(": ")
        if name != head or not separator:
            raise ValueError(f"The block has {line!r} where its {head} should be.")
        heads[head] = value
    if len(heads) < len(HEADS):
        raise ValueError(f"The block ends before its {HEADS[len(heads)]}.")
    parts = _parts(lines[1 + len(HEADS) :])
    names = tuple(part.name for part in parts)
    if names != NAMES:
        raise ValueError(f"The block has the parts {', '.join(names)}. It should have {', '.join(NAMES)}.")
    return Results(heads, parts)


def _lines_of_block(text: str) -> list[str]:
    """Return the lines from the first of a block to the last but one."""
    lines = [_one_line(line.lstrip("> `")) for line in text.splitlines()]
    lines = [line for line in lines if line]
    if FIRST not in lines:
        raise ValueError(f"The block is missing: no line is {FIRST!r}. Paste all that `make gpu` printed last.")
    found: list[str] = []
    for line in lines[lines.index(FIRST) :]:
        last = _LAST.fullmatch(line)
        if last is None:
            found.append(line)
            continue
        if len(found) != int(last[1]):
            raise ValueError(
                f"The block has {len(found)} lines, and its last one counts {last[1]}. Paste all of them."
            )
        if _check(found) != last[2]:
            raise ValueError("The block was changed: its check does not fit. Paste it as it was printed.")
        return found
    raise ValueError("The end of the block is missing. Paste it up to the line '=== end, ... ==='.")


def _parts(lines: Sequence[str]) -> list[Part]:
    """Return the parts with their figures."""
    parts: list[Part] = []
    for line in lines:
        found = _PART.fullmatch(line)
        if found:
            name, outcome, seconds, note = found.groups()
            if outcome not in OUTCOMES:
                raise ValueError(f"The part {name!r} has the outcome {outcome!r}. It should be one of {OUTCOMES}.")
            parts.append(Part(name, outcome, int(seconds), note or ""))
        elif parts:
            parts[-1] = parts[-1]._replace(figures=(*parts[-1].figures, _figure(line)))
        else:
            raise ValueError(f"The block has {line!r} before its first part.")
    return parts


def _figure(line: str) -> Figure:
    """Return the figure of a line."""
    found = _FIGURE.fullmatch(line)
    if found is None:
        raise ValueError(f"The block has {line!r}, which is no figure.")
    try:
        value = float(found[2])
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"The figure {found[1]!r} is {found[2]}. It should be a finite number.")
    return Figure(found[1], value, found[3] or "")


def _one_line(text: str) -> str:
    """Return the text with one space for each run of white space, without colours and what a terminal swallows."""
    words = _COLOUR.sub("", text).split()
    return "".join(character for character in " ".join(words) if character.isprintable())


def _check(lines: Sequence[str]) -> str:
    """Return eight digits that change with any line."""
    return f"{zlib.crc32(chr(10).join(lines).encode()):08x}"
