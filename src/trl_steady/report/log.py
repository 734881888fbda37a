"""The rows of a run from the records of its log: which framework wrote them, at which steps, with our names."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from trl_steady.report.frameworks import TRL, Framework, recognised, with_slashes
from trl_steady.report.names import Names
from trl_steady.report.record import Record
from trl_steady.report.rows import (
    merged_by_step,
    oldest_first,
    without_earlier_task,
    without_repeated,
    without_strange,
)
from trl_steady.report.stages import last_run, stage_of, trainings
from trl_steady.report.steps import count_steps, count_updates


class Log(NamedTuple):
    """The rows of a log, and what they are."""

    rows: Sequence[Mapping[str, float]]
    framework: Framework
    flags: Mapping[str, frozenset[str]]
    max_steps: int
    """0 if it is not known."""
    remarks: Sequence[str]
    """Sentences about what was read, and how."""
    seen: str
    """A description of the log, for the error if it has no row."""
    has_ended: bool
    """True if the log says that the run has ended."""


def read_records(records: Iterable[Record]) -> Log:
    """Return the rows of a run from its records and progress bars."""
    shown: list[Record] = []
    for record in records:
        if record.form == "bar" and shown and shown[-1] == record:
            continue
        shown.append(record)
    names: Counter[str] = Counter()
    forms: set[str] = set()
    for record in shown:
        names.update(record.values.keys())
        forms.add(f"{record.form} {record.label}".strip())
    slashed = with_slashes(names)
    if slashed:
        names = Counter({slashed.get(raw, raw): count for raw, count in names.items()})
        shown = [_renamed(record, slashed) for record in shown]
    framework = recognised(names, forms)
    remarks: list[str] = []
    metrics = Names(framework, names, shown)
    stages = [stage_of(part, metrics) for part in trainings(shown)]
    stage = last_run(stages)
    rows = oldest_first(without_strange(without_repeated(stage.rows)))
    rows, earlier = without_earlier_task(rows, framework)
    last = max((row.last for row in rows), default=0) or stage.bar
    remarks += count_steps(rows, stage.bar, stage.is_over)
    others = sum(len(other.rows) for other in stages) - len(stage.rows) + earlier
    if others:
        remarks.append(f"logs of other runs in this file are left out ({others})")
    count_updates(rows)
    for row in rows:
        if row.name_of_step in TRL.calls and row.form == "row":
            remarks.append("its steps are those of W&B, which counts calls of log()")
            break
    flags = metrics.flags(rows)
    merged = merged_by_step(rows)
    has_negative_kl = any(row.get("kl", 0.0) < -1e-6 for row in merged)
    is_another_estimate = framework is not TRL or names.keys().isdisjoint(("kl", "train/kl"))
    if has_negative_kl and is_another_estimate and "k1" not in flags.get("kl", ()):
        remarks.append("kl is negative, so it is k1, and is not read")
        for row in merged:
            row.pop("kl", None)
    seen = _seen(shown, stage.bar, stage.place)
    return Log(merged, framework, flags, last, remarks, seen, stage.is_over)


def _renamed(record: Record, names: Mapping[str, str]) -> Record:
    return record._replace(values={names.get(raw, raw): value for raw, value in record.values.items()})


def _seen(records: Sequence[Record], bar: int, place: int) -> str:
    """Return what a log has: a bar, and names of numbers."""
    parts: list[str] = []
    if bar:
        parts.append(f"a progress bar to {place} of {bar}")
    names = Counter(name for record in records for name in record.values)
    if names:
        common = ", ".join(name for name, _ in names.most_common(6))
        parts.append(f"records with {common}")
    return " and ".join(parts) or "no progress bar and no record of metrics"
