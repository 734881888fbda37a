"""The log of a run as series of numbers, with TRL's names of metrics."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trl_steady.report.frameworks import TRL, is_supervised, of_title, other_task, todays_names
from trl_steady.report.reading import RUN_FILE, Reading, joined, read

__all__ = ["RUN_FILE", "History", "Series", "counted"]

_MOST_STEPS = 2**53  # a damaged file can have any number


class Series(NamedTuple):
    """The values of one metric over a run."""

    steps: np.ndarray
    """(n,) optimizer steps, which do not fall."""
    values: np.ndarray
    """(n,) float64, with NaN and infinity where the run logged them."""

    @property
    def finite(self) -> "Series":
        """The values that are numbers."""
        keep = np.isfinite(self.values)
        return Series(self.steps[keep], self.values[keep])


class History:
    """The log of a run, as one series for each metric.

    Args:
        rows: The rows of the log, in the order in which they were written. Later rows replace those of the same steps,
            as after a resume.
        run: Contents of `steady.json`: "settings" is the config, "notes" are warnings. Empty for a run of plain TRL.
        is_over: True if the run has ended: then its few logs are all.
        framework: The name of the framework that wrote the log, such as "verl".
        flags: For a metric whose values differ from TRL's of the same name, what they are: "kept_only" is a mean over
            kept groups only, "sum" is a sum over the tokens of an answer or over the updates of a step.
        remarks: How the log was read, for the line of the run.
        warnings: Files of the run that could not be read.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        run: Mapping[str, Any] | None = None,
        *,
        is_over: bool = True,
        framework: str = TRL.title,
        flags: Mapping[str, frozenset[str]] | None = None,
        remarks: Sequence[str] = (),
        warnings: Sequence[str] = (),
    ) -> None:
        self.run = dict(run or {})
        self.is_over = is_over
        self.framework = framework
        self.flags = dict(flags or {})
        self.remarks = list(remarks)
        self.warnings = list(warnings)
        self.last_step = 0
        rows = _without_replaced(rows)
        if rows:
            self.last_step = int(rows[-1]["step"])
        steps: defaultdict[str, list[float]] = defaultdict(list)
        values: defaultdict[str, list[float]] = defaultdict(list)
        for row in rows:
            step = row["step"]
            for key, value in row.items():
                if value is None:  # TRL logs NaN as None
                    value = math.nan
                if type(value) is not float and not _is_number(value):
                    continue
                steps[key].append(step)
                values[key].append(value)
        steps.pop("step", None)
        renamed = todays_names(steps) if framework == TRL.title else {}
        self._series: dict[str, Series] = {}
        for key in steps:
            name = renamed.get(key, key)
            self._series[name] = Series(np.asarray(steps[key], np.int64), np.asarray(values[key], np.float64))

    @classmethod
    def read(cls, path: str | Path) -> "History":
        """Read an output folder, a checkpoint, a file with a log, or standard input for "-".

        A file is a `trainer_state.json`, the output of a run as text, JSON, JSON lines, or CSV.

        Raises:
            ValueError: There is no log. The message has one line, with the file and what it has.
        """
        return cls._of(read(path))

    @classmethod
    def joined(cls, paths: Sequence[str | Path]) -> "History":
        """Read the logs of the processes of one run, and join them by step. Raises ValueError as `read` does."""
        return cls._of(joined({str(path): read(path) for path in paths}))

    @classmethod
    def _of(cls, found: Reading) -> "History":
        return cls(
            found.rows,
            found.run,
            is_over=found.is_over,
            framework=found.framework.title,
            flags=found.flags,
            remarks=found.remarks,
            warnings=found.warnings,
        )

    def until(self, step: int) -> "History":
        """Return the history as it was at an optimizer step, while the run trained."""
        early = copy(self)
        early.is_over = False
        early.last_step = step
        early._series = {}
        for key, series in self._series.items():
            is_early = series.steps <= step
            if is_early.any():
                early._series[key] = Series(series.steps[is_early], series.values[is_early])
        return early

    @property
    def settings(self) -> Mapping[str, Any]:
        """The config of the run; empty if it is not known."""
        return self.run.get("settings", {})

    @property
    def keys(self) -> frozenset[str]:
        """Names of the metrics."""
        return frozenset(self._series)

    @property
    def other_task(self) -> str:
        """Which log this is, if it is none of GRPO, RLOO or PPO: a sentence, or "" if it may be one."""
        if self.framework == TRL.title:
            return other_task(self.keys)
        if not is_supervised(self.keys):
            return ""
        own = f"{of_title(self.framework).name}:"
        shown = ", ".join(sorted(key.removeprefix(own) for key in self.keys)[:8])
        return (
            f"There is no metric of answers, so this is no log of GRPO, RLOO or PPO that can be read. It has {shown}."
        )

    def __getitem__(self, key: str) -> Series:
        """Return the values of a metric that the run has logged."""
        return self._series[key]

    def is_flagged(self, key: str, flag: str) -> bool:
        """Tell whether the values of a metric have this flag."""
        return flag in self.flags.get(key, ())

    def finite_values(self, key: str) -> np.ndarray:
        """Return the values of a metric that are numbers; none if the run has not logged it."""
        if key not in self._series:
            return np.empty(0)
        return self._series[key].finite.values

    def median(self, key: str) -> float:
        """Return the median of the values of a metric that are numbers; NaN if there are none."""
        values = self.finite_values(key)
        return float(np.median(values)) if len(values) else math.nan

    def first(self, *keys: str) -> str:
        """Return the first of these metrics that the run has logged. Raises KeyError if there is none."""
        for key in keys:
            if key in self._series:
                return key
        raise KeyError(" | ".join(keys))

    def require(self, *keys: str) -> None:
        """Raise KeyError if the run has logged none of these metrics."""
        self.first(*keys)


def _without_replaced(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows that have a step, without those that a resumed run has logged again."""
    kept: list[Mapping[str, Any]] = []
    for row in rows:
        step = row.get("step")
        if not isinstance(step, (int, float)) or not abs(step) < _MOST_STEPS:  # NaN is not less
            continue
        if kept and kept[-1]["step"] > step:
            kept = [earlier for earlier in kept if earlier["step"] < step]
        kept.append(row)
    return kept


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def counted(number: int, noun: str) -> str:
    """Return words such as "1 step" or "2 steps"."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}s"
