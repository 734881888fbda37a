"""The log of a run as series of numbers. This file knows how transformers stores a log, and TRL's names of metrics."""

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

RUN_FILE = "steady.json"
"""File of a checkpoint with the settings of the run and its warnings."""
_STATE = "trainer_state.json"


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
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        run: Mapping[str, Any] | None = None,
        *,
        is_over: bool = True,
        framework: str = "TRL",
        flags: Mapping[str, frozenset[str]] | None = None,
    ) -> None:
        self.run = dict(run or {})
        self.is_over = is_over
        self.framework = framework
        self.flags = dict(flags or {})
        self.last_step = 0
        rows = _without_replaced(rows)
        if rows:
            self.last_step = int(rows[-1]["step"])
        steps: defaultdict[str, list[float]] = defaultdict(list)
        values: defaultdict[str, list[float]] = defaultdict(list)
        for row in rows:
            for key, value in row.items():
                if value is None:  # TRL logs NaN as None
                    value = math.nan
                if key == "step" or isinstance(value, bool) or not isinstance(value, (int, float)):
                    continue
                steps[key].append(row["step"])
                values[key].append(value)
        self._series: dict[str, Series] = {}
        for key in steps:
            self._series[key] = Series(np.asarray(steps[key], np.int64), np.asarray(values[key], np.float64))

    @classmethod
    def read(cls, path: str | Path) -> "History":
        """Read an output folder, a checkpoint, or a file with a log.

        A file is a `trainer_state.json`, or JSON with the rows under "history" as recipes write it.

        Raises:
            ValueError: There is no log. The message says where it was looked for.
        """
        path = Path(path)
        file = path
        if not path.is_file():
            file = _newest_state(path)
        if file is None:
            raise ValueError(
                f"{path} has no {_STATE} and no checkpoint with one. Give an output folder, a checkpoint, or the file."
            )
        try:
            state = json.loads(file.read_text())
            key = "log_history" if "log_history" in state else "history"
            rows = state[key]
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{file} is no log of a run: it has no rows under 'log_history' ({error}).") from None
        run: dict[str, Any] = {}
        run_file = file.parent / RUN_FILE
        if run_file.is_file():
            run = json.loads(run_file.read_text())
        if state.get("max_steps", 0) > 0:  # the config of a run of epochs has -1
            run["settings"] = {**run.get("settings", {}), "max_steps": state["max_steps"]}
        return cls(rows, run)

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

    def first(self, *keys: str) -> str:
        """Return the first of these metrics that the run has logged. Raises KeyError if there is none."""
        for key in keys:
            if key in self._series:
                return key
        raise KeyError(" | ".join(keys))


def _without_replaced(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows that have a step, without those that a resumed run has logged again."""
    kept: list[Mapping[str, Any]] = []
    for row in rows:
        step = row.get("step")
        if not isinstance(step, (int, float)) or math.isnan(step):
            continue
        if kept and kept[-1]["step"] > step:
            kept = [earlier for earlier in kept if earlier["step"] < step]
        kept.append(row)
    return kept


def _newest_state(folder: Path) -> Path | None:
    """Return the state of an output folder or of its checkpoints with the most steps; None if there is no state."""
    newest: Path | None = None
    most_steps = -1
    for file in (folder / _STATE, *folder.glob(f"checkpoint-*/{_STATE}")):
        if not file.is_file():
            continue
        steps = json.loads(file.read_text()).get("global_step", 0)
        if steps > most_steps:
            newest = file
            most_steps = steps
    return newest


def counted(number: int, noun: str) -> str:
    """Return words such as "1 step" or "2 steps"."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}s"
