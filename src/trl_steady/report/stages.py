"""The trainings in a log: others may stand before and behind the run, such as SFT before GRPO."""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from trl_steady.report.frameworks import OF_ANSWERS
from trl_steady.report.names import Names, Row
from trl_steady.report.record import Record

_SUMMARY = ("train_runtime", "train/train_runtime")  # what transformers logs at the end of a training


class Stage(NamedTuple):
    """One training in a log. Others may stand before and behind it, such as SFT before GRPO."""

    rows: list[Row]
    bar: int
    """The end of its progress bar; 0 without one."""
    begins: int
    """The first place of the bar above 0, from which a run that was resumed goes on."""
    place: int
    """The last place of the bar."""
    is_over: bool
    """True if the log says that the training has ended."""

    @property
    def trains(self) -> bool:
        """True if it has a row of a training step."""
        return any(not row.is_eval for row in self.rows)

    @property
    def has_answers(self) -> bool:
        """True if a row has a metric of answers."""
        return any(not OF_ANSWERS.isdisjoint(row.values) for row in self.rows)

    @property
    def steps(self) -> list[float]:
        """The steps of its rows, as far as they are logged."""
        return [row.step for row in self.rows if row.step is not None]

    def goes_on_from(self, earlier: "Stage") -> bool:
        """Tell whether it is a resume of an earlier stage: its steps, or its bar, begin behind the end of those."""
        if not earlier.trains:
            return True
        if self.steps and earlier.steps:
            return min(self.steps) > max(earlier.steps)
        return self.begins > earlier.place > 0


def trainings(shown: Sequence[Record]) -> list[list[Record]]:
    """Return the records of each training, which ends with transformers' summary."""
    parts: list[list[Record]] = [[]]
    for record in shown:
        parts[-1].append(record)
        if _is_summary(record):
            parts.append([])
    return parts


def _is_summary(record: Record) -> bool:
    """Tell whether a record is the summary of a training. Rows of a table can have the name, and no number."""
    return any(math.isfinite(record.values.get(name, math.nan)) for name in _SUMMARY)


def stage_of(shown: Sequence[Record], metrics: Names) -> Stage:
    """Return the stage of the records of one training."""
    bar = _training_bar(shown)
    rows: list[Row] = []
    begins = 0
    place = 0
    is_over = False
    for record in shown:
        if record.form == "bar":
            if record.last == bar:
                place = record.step or 0
                begins = begins or place
        elif _is_summary(record):
            is_over = True
        else:
            row = metrics.row(record, place)
            if row is not None:
                rows.append(row)
    return Stage(rows, bar, begins, place, is_over)


def _training_bar(records: Sequence[Record]) -> int:
    """Return the end of the progress bar that counts steps: the one that moved most; 0 if there is none.

    Bars of other things have a name, such as "Loading checkpoint shards".
    """
    places: defaultdict[int, set[int]] = defaultdict(set)
    for record in records:
        is_training = record.label.lower().startswith(("train", "step", "progress", "episode")) or not record.label
        if record.form == "bar" and is_training and record.last:
            places[record.last].add(record.step or 0)
    if not places:
        return 0
    return max(places, key=lambda end: (len(places[end]), end))


def last_run(stages: Sequence[Stage]) -> Stage:
    """Return the last stage that has answers, with the stages that it goes on from, and the evaluations behind it."""
    training = [index for index, stage in enumerate(stages) if stage.trains]
    if not training:
        return stages[0]
    with_answers = [index for index in training if stages[index].has_answers]
    chosen = (with_answers or training)[-1]
    last = stages[chosen]
    start = chosen
    while start > 0 and last.goes_on_from(stages[start - 1]):
        start -= 1
        if stages[start].trains:
            last = stages[start]
    end = chosen + 1
    while end < len(stages) and not stages[end].trains:
        end += 1
    rows: list[Row] = []
    for stage in stages[start:end]:
        rows += stage.rows
    return stages[chosen]._replace(rows=rows)
