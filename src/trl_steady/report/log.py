"""The rows of a run from the records of its log: which framework wrote them, at which steps, with our names."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from trl_steady.report.forms import Record, Rounded
from trl_steady.report.frameworks import (
    FINE,
    OF_ANSWERS,
    OUTCOMES,
    STEPS_OF_OWN_LOOPS,
    TRL,
    Alias,
    Framework,
    names_of_own_loops,
    recognised,
    todays_names,
    with_slashes,
)

_STEP_AND_LAST = "global_step/max_steps"  # of ms-swift, also in its PPO
_MOST_STEPS = 2**53  # a damaged file can have any number
_OF_TRANSFORMERS = ("trl", "ms-swift")
_SUMMARY = ("train_runtime", "train/train_runtime")  # what transformers logs at the end of a training
_FIRST = {"loss", "grad_norm"}  # what transformers prints before the metrics of the answers
_LARGEST_ENTROPY = 13.0  # nats: above the logarithm of any vocabulary, so that it is a sum over tokens


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
    metrics = _Names(framework, names, shown)
    stages = [_stage(records, metrics) for records in _parts(shown)]
    stage = _last_run(stages)
    rows = _oldest_first(_without_strange(_without_repeated(stage.rows)))
    rows, earlier = _without_earlier_task(rows, framework)
    last = max((row.last for row in rows), default=0) or stage.bar
    remarks += _count_steps(rows, stage.bar, stage.is_over)
    others = sum(len(other.rows) for other in stages) - len(stage.rows) + earlier
    if others:
        remarks.append(f"logs of other runs in this file are left out ({others})")
    _count_updates(rows)
    for row in rows:
        if row.name_of_step in TRL.calls and row.form == "row":
            remarks.append("its steps are those of W&B, which counts calls of log()")
            break
    flags = metrics.flags(rows)
    merged = _merged(rows)
    is_k1 = [row for row in merged if row.get("kl", 0.0) < -1e-6]
    if is_k1 and (framework is not TRL or names.keys().isdisjoint(("kl", "train/kl"))):
        remarks.append("kl is negative, so it is k1, and is not read")
        for row in merged:
            row.pop("kl", None)
    seen = _seen(shown, stage.bar, stage.place)
    return Log(merged, framework, flags, last, remarks, seen, stage.is_over)


def _renamed(record: Record, names: Mapping[str, str]) -> Record:
    return record._replace(values={names.get(raw, raw): value for raw, value in record.values.items()})


class _Row(NamedTuple):
    """A row before its step is known."""

    form: str
    label: str
    name_of_step: str
    step: float | None
    last: int
    place: int
    """The place of the progress bar."""
    values: dict[str, float]
    is_eval: bool


class _Stage(NamedTuple):
    """One training in a log. Others may stand before and behind it, such as SFT before GRPO."""

    rows: list[_Row]
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

    def goes_on_from(self, earlier: "_Stage") -> bool:
        """Tell whether it is a resume of an earlier stage: its steps, or its bar, begin behind the end of those."""
        if not earlier.trains:
            return True
        if self.steps and earlier.steps:
            return min(self.steps) > max(earlier.steps)
        return self.begins > earlier.place > 0


def _parts(shown: Sequence[Record]) -> list[list[Record]]:
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


def _stage(shown: Sequence[Record], metrics: "_Names") -> _Stage:
    bar = _training_bar(shown)
    rows: list[_Row] = []
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
    return _Stage(rows, bar, begins, place, is_over)


def _last_run(stages: Sequence[_Stage]) -> _Stage:
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
    rows: list[_Row] = []
    for stage in stages[start:end]:
        rows += stage.rows
    return stages[chosen]._replace(rows=rows)


class _Names:
    """The names of a log, and ours for them."""

    def __init__(self, framework: Framework, names: Counter[str], records: Sequence[Record]) -> None:
        self._framework = framework
        self._names = names
        steps = (_STEP_AND_LAST, *framework.steps, *TRL.steps, *STEPS_OF_OWN_LOOPS)
        self._steps = [name for name in steps if name in names]
        self._others: defaultdict[str, list[Alias]] = defaultdict(list)  # raw name -> others of the same meaning
        self._read = self._best()
        self._kinds = self._kinds_with(self._others, records)
        self._ours: dict[str, str] = {}
        for raw in names:
            if raw in self._read:
                self._ours[raw] = self._read[raw].ours
            elif framework is TRL:
                self._ours[raw] = _unprefixed(raw, framework)
            else:
                self._ours[raw] = f"{framework.name}:{raw}"
        self._step_of_rows = self._usual_step(records)
        self._scaled = {raw: alias.scale for raw, alias in self._read.items() if alias.scale != 1}

    def _best(self) -> dict[str, Alias]:
        """Return raw name -> alias, one for each of our names."""
        framework = self._framework
        if framework is TRL:
            plain = {_unprefixed(raw, framework): raw for raw in self._names}
            old = names_of_own_loops(plain) | todays_names(plain)
            return {plain[raw]: Alias(raw, ours, "", "", "", "") for raw, ours in old.items()}
        ranked: defaultdict[str, list[tuple[int, str, Alias]]] = defaultdict(list)
        for raw in self._names:
            plain = _unprefixed(raw, framework)
            alias = framework.alias(plain)
            if alias is not None:
                ranked[alias.ours].append((framework.rank(plain), raw, alias._replace(raw=raw)))
        best: dict[str, Alias] = {}
        for choices in ranked.values():
            (_, raw, alias), *others = sorted(choices)
            best[raw] = alias
            for _, _, other in others:
                if other.flags == alias.flags:
                    self._others[raw].append(other)
        return best

    def _usual_step(self, records: Sequence[Record]) -> str | None:
        """Return the name of the step in the rows of a table or of JSON that have a reward; None if there are none.

        Rows that a script sends to W&B itself are without it. Their `_step` counts other things.
        """
        rewards = [raw for raw, ours in self._ours.items() if ours == "reward"]
        for record in records:
            if record.form != "row" or record.values.keys().isdisjoint(rewards):
                continue
            for name in self._steps:
                if math.isfinite(record.values.get(name, math.nan)):
                    return name
        return None

    @staticmethod
    def _kinds_with(raws: Iterable[str], records: Sequence[Record]) -> dict[str, set[tuple[str, str]]]:
        """Return name -> the kinds of lines that have it."""
        kinds: dict[str, set[tuple[str, str]]] = {raw: set() for raw in raws}
        for raw, found in kinds.items():
            for record in records:
                if raw in record.values:
                    found.add((record.form, record.label))
        return kinds

    def _fill(self, values: dict[str, float], record: Record) -> None:
        """Read a metric by another name in a row that lacks its best, if other lines of this kind have that."""
        for raw, others in self._others.items():
            ours = self._ours[raw]
            if ours in values or (record.form, record.label) not in self._kinds[raw]:
                continue
            for other in others:
                value = record.values.get(other.raw)
                if value is not None and not isinstance(value, Rounded):
                    values[ours] = value * other.scale
                    break

    def row(self, record: Record, place: int) -> _Row | None:
        """Return the row of a record with our names; None if it has no metric of training or of an evaluation."""
        ours = self._ours
        values: dict[str, float] = {}
        for raw, value in record.values.items():
            if not isinstance(value, Rounded) or ours[raw] not in FINE:
                values[ours[raw]] = value
        for raw, scale in self._scaled.items():
            if ours[raw] in values:
                values[ours[raw]] *= scale
        self._fill(values, record)
        outcomes = OUTCOMES & values.keys()
        if record.is_cut and outcomes and outcomes <= _FIRST:
            return None
        is_eval = "reward" not in values and any(key.startswith("eval_") for key in values)
        least = 1
        if self._framework is TRL and record.form == "dict":
            least = 2  # an answer can have a dictionary with a reward
        if len(outcomes) < least and not is_eval:
            return None
        step: float | None = record.step
        name_of_step = record.label
        usual = self._step_of_rows if record.form == "row" else None
        for name in self._steps:
            values.pop(ours[name], None)
            if usual not in (None, name):
                continue
            if step is None and abs(record.values.get(name, math.inf)) < _MOST_STEPS:
                step = record.values[name]
                name_of_step = name
        last = record.last or record.values.get(f"{_STEP_AND_LAST} of", 0) or record.values.get("max_steps", 0)
        if not 0 < last < _MOST_STEPS:
            last = 0
        return _Row(record.form, record.label, name_of_step, step, int(last), place, values, is_eval)

    def flags(self, rows: Sequence[_Row]) -> dict[str, frozenset[str]]:
        """Return metric -> what its values are, if that differs from TRL's."""
        flags: defaultdict[str, set[str]] = defaultdict(set)
        for alias in self._read.values():
            flags[alias.ours].update(alias.flags)
        if self._framework.is_kept_only(self._names):
            flags["reward"].add("kept_only")
        entropies = [row.values["entropy"] for row in rows if math.isfinite(row.values.get("entropy", math.nan))]
        if entropies and float(np.median(entropies)) > _LARGEST_ENTROPY:
            flags["entropy"].add("sum")
            flags["kl"].add("sum")
        return {key: frozenset(which) for key, which in flags.items() if which}


def _unprefixed(raw: str, framework: Framework) -> str:
    """Return a name as in the log, where transformers has given it a form for W&B: "train/loss", "eval/loss"."""
    if framework.name not in _OF_TRANSFORMERS:
        return raw
    if raw.startswith("eval/"):
        return f"eval_{raw.removeprefix('eval/')}"
    return raw.removeprefix("train/")


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


def _without_repeated(rows: Sequence[_Row]) -> list[_Row]:
    """Return the rows without those that another process or logger has printed too."""
    kept: list[_Row] = []
    for row in rows:
        if kept and kept[-1].values == row.values and kept[-1].step == row.step:
            continue
        kept.append(row)
    return kept


def _without_strange(rows: Sequence[_Row]) -> list[_Row]:
    """Return the rows without dictionaries that share too few names with the others, as in the text of an answer."""
    kinds = Counter(frozenset(row.values) for row in rows if row.form == "dict" and row.step is None)
    if not kinds:
        return list(rows)
    [(usual, times)] = kinds.most_common(1)
    if times < 2:
        return list(rows)
    kept: list[_Row] = []
    for row in rows:
        is_like = 3 * len(usual & row.values.keys()) > len(usual)
        if row.form != "dict" or row.step is not None or row.is_eval or is_like:
            kept.append(row)
    return kept


def _oldest_first(rows: list[_Row]) -> list[_Row]:
    """Return the rows, turned round if each stands before one of a lower step, as some exports have them."""
    steps = [math.nan if row.step is None else row.step for row in rows]
    if len(rows) > 2 and all(later < earlier for earlier, later in pairwise(steps)):
        return rows[::-1]
    return rows


def _without_earlier_task(rows: list[_Row], framework: Framework) -> tuple[list[_Row], int]:
    """Return the rows without those of another task before it, such as SFT, and the number of those.

    Rewards begin there, and the steps go back.
    """
    first = next((index for index, row in enumerate(rows) if "reward" in row.values), 0)
    steps = [row.step for row in rows[:first] if row.step is not None]
    begins = rows[first].step if rows else None
    # other frameworks log rewards in rows of their own
    if framework.name not in _OF_TRANSFORMERS or begins is None or not steps or max(steps) <= begins:
        return rows, 0
    return rows[first:], first


def _count_steps(rows: list[_Row], bar: int, is_over: bool) -> list[str]:
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


def _count_updates(rows: list[_Row]) -> None:
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


def _merged(rows: Sequence[_Row]) -> list[dict[str, float]]:
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
