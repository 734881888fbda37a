"""The names of a log, and ours for them: a record becomes a row."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from trl_steady.report.frameworks import (
    FINE,
    OUTCOMES,
    STEPS_OF_OWN_LOOPS,
    TRL,
    Alias,
    Framework,
    names_of_own_loops,
    todays_names,
)
from trl_steady.report.record import Record, Rounded

_STEP_AND_LAST = "global_step/max_steps"  # of ms-swift, also in its PPO
_MOST_STEPS = 2**53  # a damaged file can have any number
OF_TRANSFORMERS = ("trl", "ms-swift")
_FIRST = {"loss", "grad_norm"}  # what transformers prints before the metrics of the answers
_LARGEST_ENTROPY = 13.0  # nats: above the logarithm of any vocabulary, so that it is a sum over tokens


class Row(NamedTuple):
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


class Names:
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
        self._converted = [raw for raw, alias in self._read.items() if (alias.offset, alias.scale) != (0, 1)]

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
                    values[ours] = other.convert(value)
                    break

    def row(self, record: Record, place: int) -> Row | None:
        """Return the row of a record with our names; None if it has no metric of training or of an evaluation."""
        ours = self._ours
        values: dict[str, float] = {}
        for raw, value in record.values.items():
            if not isinstance(value, Rounded) or ours[raw] not in FINE:
                values[ours[raw]] = value
        for raw in self._converted:
            if ours[raw] in values:
                values[ours[raw]] = self._read[raw].convert(values[ours[raw]])
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
        return Row(record.form, record.label, name_of_step, step, int(last), place, values, is_eval)

    def flags(self, rows: Sequence[Row]) -> dict[str, frozenset[str]]:
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
    if framework.name not in OF_TRANSFORMERS:
        return raw
    if raw.startswith("eval/"):
        return f"eval_{raw.removeprefix('eval/')}"
    return raw.removeprefix("train/")
