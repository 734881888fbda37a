"""The rows of one run: which of them count, in which order, and one for each step."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise

from trl_steady.report.frameworks import OUTCOMES, Framework
from trl_steady.report.names import OF_TRANSFORMERS, Row


def without_repeated(rows: Sequence[Row]) -> list[Row]:
    """Return the rows without those that another process or logger has printed too."""
    kept: list[Row] = []
    for row in rows:
        if kept and kept[-1].values == row.values and kept[-1].step == row.step:
            continue
        kept.append(row)
    return kept


def without_strange(rows: Sequence[Row]) -> list[Row]:
    """Return the rows without dictionaries that share too few names with the others, as in the text of an answer."""
    kinds = Counter(frozenset(row.values) for row in rows if row.form == "dict" and row.step is None)
    if not kinds:
        return list(rows)
    [(usual, times)] = kinds.most_common(1)
    if times < 2:
        return list(rows)
    kept: list[Row] = []
    for row in rows:
        is_like = 3 * len(usual & row.values.keys()) > len(usual)
        if row.form != "dict" or row.step is not None or row.is_eval or is_like:
            kept.append(row)
    return kept


def oldest_first(rows: list[Row]) -> list[Row]:
    """Return the rows, turned round if each stands before one of a lower step, as some exports have them."""
    steps = [math.nan if row.step is None else row.step for row in rows]
    if len(rows) > 2 and all(later < earlier for earlier, later in pairwise(steps)):
        return rows[::-1]
    return rows


def without_earlier_task(rows: list[Row], framework: Framework) -> tuple[list[Row], int]:
    """Return the rows without those of another task before it, such as SFT, and the number of those.

    Rewards begin there, and the steps go back.
    """
    first = next((index for index, row in enumerate(rows) if "reward" in row.values), 0)
    steps = [row.step for row in rows[:first] if row.step is not None]
    begins = rows[first].step if rows else None
    # other frameworks log rewards in rows of their own
    if framework.name not in OF_TRANSFORMERS or begins is None or not steps or max(steps) <= begins:
        return rows, 0
    return rows[first:], first


def merged_by_step(rows: Sequence[Row]) -> list[dict[str, float]]:
    """Return one row for each step.

    Several processes log at the same steps, one ahead of the other, and a run that was resumed logs steps again. Each
    metric is therefore followed alone: a step that comes again replaces its own and all later ones. If the steps of
    a kind of lines go back so, that replaces all metrics that such lines have had.
    """
    places = [int(row.step or 0) for row in rows]
    if all(earlier < later for earlier, later in pairwise(places)):
        return [{**row.values, "step": place} for place, row in zip(places, rows, strict=True)]
    steps: defaultdict[str, list[int]] = defaultdict(list)
    values: defaultdict[str, list[float]] = defaultdict(list)
    names_of_kind: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    step_of_kind: dict[tuple[str, str], int] = {}
    for step, row in zip(places, rows, strict=True):
        kind = row.form, row.label
        replaced = set(row.values)
        comes_again = any(steps[key] and steps[key][-1] >= step for key in OUTCOMES & row.values.keys())
        if comes_again and step < step_of_kind.get(kind, step):
            replaced |= names_of_kind[kind]
        for key in replaced:
            while steps[key] and steps[key][-1] >= step:
                steps[key].pop()
                values[key].pop()
        step_of_kind[kind] = step
        names_of_kind[kind].update(row.values)
        for key, value in row.values.items():
            steps[key].append(step)
            values[key].append(value)
    merged: dict[int, dict[str, float]] = {}
    for key, known in steps.items():
        for step, value in zip(known, values[key], strict=True):
            merged.setdefault(step, {})[key] = value
    for step, row in merged.items():
        row["step"] = step
    return [merged[step] for step in sorted(merged)]
