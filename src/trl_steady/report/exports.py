"""Records of metrics in files that are not console logs: JSON, JSON lines, notebooks, and CSV of W&B."""

import csv
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import unescape
from typing import Any

from trl_steady.report.forms import records
from trl_steady.report.frameworks import STEPS
from trl_steady.report.record import Record, number

_WRAPPERS = ("data", "metrics", "logs", "scalars")  # objects that hold all metrics of a row
_LISTS = ("log_history", "history", "rows", "data")


def row_records(rows: Iterable[object]) -> Iterator[Record]:
    """Return the records of the rows that are objects."""
    for row in rows:
        if isinstance(row, Mapping):
            yield Record("row", "", None, flat(row))


def flat(row: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers of a row. The names of an object inside it follow its own and a slash, if that says more."""
    values: dict[str, float] = {}
    for key, value in row.items():
        name = f"{prefix}{key}"
        if value is None:  # TRL logs NaN as None
            values[name] = math.nan
        elif isinstance(value, Mapping):
            values |= flat(value, prefix if key in _WRAPPERS else f"{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            values[name] = float(value)
        elif isinstance(value, str):
            values |= _text_values(name, value)
    return values


def _text_values(name: str, text: str) -> dict[str, float]:
    """Return the number of a text, or both numbers of one such as "5/60"."""
    place = re.fullmatch(r"(\d+)/(\d+)", text)
    if place:
        return {name: float(place[1]), f"{name} of": float(place[2])}
    value = number(text)
    if value is None:
        return {}
    return {name: value}


def json_records(data: object) -> list[Record] | None:
    """Return the records of parsed JSON: a list of rows, an object that has one, or columns. None if it is neither.

    The cells of a notebook are read as the text that they show.
    """
    if isinstance(data, Mapping):
        if "cells" in data and "nbformat" in data:
            return list(records(_notebook_lines(data["cells"])))
        for name in _LISTS:
            if isinstance(data.get(name), Sequence) and not isinstance(data[name], str):
                data = data[name]
                break
        else:
            data = _transposed(data)
    if isinstance(data, Sequence) and not isinstance(data, str):
        return list(row_records(data))
    return None


def _transposed(columns: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the rows of columns, each a list or an object by the row's number as pandas writes it."""
    rows: dict[str, dict[str, Any]] = {}
    for name, column in columns.items():
        if isinstance(column, list):
            column = {str(place): value for place, value in enumerate(column)}
        if not isinstance(column, Mapping):
            return None
        for place, value in column.items():
            if isinstance(value, (list, Mapping)):
                return None
            rows.setdefault(place, {})[name] = value
    if len(rows) < 2:
        return None
    return list(rows.values())


def _notebook_lines(cells: object) -> Iterator[str]:
    for output in _objects(cells, "outputs"):
        data = output.get("data")
        shown: list[object] = [output.get("text")]
        if isinstance(data, Mapping):
            shown = [data.get("text/html") or data.get("text/plain")]
        for content in shown:
            text = "".join(content) if isinstance(content, (str, list)) else ""
            if "<td" in text:
                text = _table_text(text)
            yield from re.split(r"[\r\n]+", text)


def _objects(parents: object, name: str) -> Iterator[Mapping[str, Any]]:
    """Return the objects in the lists of this name, each in one of the parents."""
    for parent in parents if isinstance(parents, list) else ():
        children = parent.get(name) if isinstance(parent, Mapping) else None
        for child in children if isinstance(children, list) else ():
            if isinstance(child, Mapping):
                yield child


def _table_text(html: str) -> str:
    """Return a table of HTML with a line for each row, and tabs between its columns."""
    html = re.sub(r"\s*\n\s*", " ", html)
    html = re.sub(r"<table\b|<tr\b|</tr\s*>", r"\n\g<0>", html)  # a progress bar can stand before the table
    html = re.sub(r"\s*</t[dh]\s*>\s*(?=<t[dh])", "\t", html)
    return unescape(re.sub(r"</?[A-Za-z!][^<>]*>", "", html))  # a bar has "<" before the time that is left


def csv_columns(line: str) -> list[str]:
    """Return the names of the columns of a CSV file, if one of them is a step."""
    try:
        columns = next(csv.reader([line]), [])
    except csv.Error:
        return []
    names = [_column(name) for name in columns]
    if len(columns) < 2 or STEPS.isdisjoint(names):
        return []
    return columns


def csv_runs(columns: Iterable[str]) -> list[str]:
    """Return the runs in the columns of a chart of W&B, such as "happy-1 - train/reward"."""
    runs = {name.rpartition(" - ")[0]: None for name in columns}
    return [run for run in runs if run]


def csv_records(lines: Iterable[str]) -> Iterator[Record]:
    """Return the records of a CSV file. An empty cell is a metric that the row does not have."""
    reader = csv.DictReader(lines)
    columns: dict[str, str] = {}
    for column in reader.fieldnames or ():
        # a chart of W&B has "run - reward", and its least and greatest values; of several runs, the first is read
        if not column.endswith(("__MIN", "__MAX")):
            columns.setdefault(_column(column), column)
    for row in reader:
        values: dict[str, float] = {}
        for name, column in columns.items():
            text = row.get(column) or ""
            value = number(text) if text.strip() else None
            if value is not None:
                values[name] = value
        yield Record("row", "", None, values)


def _column(name: str) -> str:
    return name.rpartition(" - ")[2].strip()
