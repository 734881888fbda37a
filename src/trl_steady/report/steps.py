"""The steps of rows that a log shows without one, or counts in other units."""

from collections.abc import Sequence

import numpy as np

from trl_steady.report.names import Row


def count_steps(rows: list[Row], bar: int, is_over: bool) -> list[str]:
    """Give a step to each row that has none, and return what was done."""
    without = [index for index, row in enumerate(rows) if row.step is None and not row.is_eval]
    counted: list[str] = []
    if without and len(without) < len([row for row in rows if not row.is_eval]):
        counted.append(f"records without a step are left out ({len(without)})")
    elif without:
        steps, how = _steps([rows[index].place for index in without], bar, is_over)
        for index, step in zip(without, steps, strict=True):
            rows[index] = rows[index]._replace(step=step)
        counted.append(how)
    step: float | None = None
    for index, row in enumerate(rows):
        if row.is_eval and row.step is None:
            rows[index] = row._replace(step=step)
        elif row.step is not None:
            step = row.step
    rows[:] = [row for row in rows if row.step is not None]
    return counted


def _steps(places: Sequence[int], bar: int, is_over: bool) -> tuple[list[int], str]:
    """Return a step for each row, from where the bar stood, and how it was found."""
    gaps = np.diff(places)
    if len(places) > 1 and np.mean(gaps > 0) > 0.8:
        every = int(np.median(gaps[gaps > 0]))
        first = places[0]
        if first == 0:
            first = every
        elif first % every and (first + 1) % every == 0:  # the bar is drawn behind the row of its step
            first += 1
        steps = [place + first - places[0] for place in places]
        if not gaps.all():  # a bar was left out
            steps = [first + index * every for index in range(len(places))]
        return steps, "steps of its progress bar"
    count = len(places)
    if count == 1:
        every = max(places[0], 1)
        if (every + 1) % 10 == 0:  # logging_steps is 10 by default, and the bar can be drawn behind the row
            every += 1
    else:
        every = _every(count, bar) if is_over else _divided(max(places), count)
    steps = [every * (index + 1) for index in range(len(places))]
    if every == 1:
        return steps, "each log counts as a step"
    return steps, f"each log counts as {every} steps"


def _every(count: int, end: int) -> int:
    """Return the steps from one log to the next in a run that has ended: of 1875 steps, 93 logs are one of each 20."""
    every = end // count
    if every and end // every == count:
        return every
    return 1


def _divided(end: int, count: int) -> int:
    """Return the steps from one log to the next if the last of them is the last step so far, else 1."""
    if end and end % count == 0:
        return end // count
    return 1


def count_updates(rows: list[Row]) -> None:
    """Let `rollout 3:` and `perf 3:` have the steps of updates where `step 7:` counts those."""
    last: dict[str, float] = {}
    for row in rows:
        if row.form == "dict" and row.step is not None:
            last[row.label] = max(row.step, last.get(row.label, 0))
    if "step" not in last or "rollout" not in last:
        return
    updates = int(last["step"] + 1) // int(last["rollout"] + 1)
    if updates < 2:
        return
    for index, row in enumerate(rows):
        if row.label in ("rollout", "perf") and row.step is not None:
            rows[index] = row._replace(step=row.step * updates)
