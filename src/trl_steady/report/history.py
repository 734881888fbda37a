"""The log of a run as series of numbers. This file knows how transformers stores a log, and TRL's names of metrics."""

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from types import NoneType
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
    """

    def __init__(
        self, rows: Sequence[Mapping[str, Any]], run: Mapping[str, Any] | None = None, *, is_over: bool = True
    ) -> None:
        self.run, self.is_over = dict(run or {}), is_over
        kept: list[Mapping[str, Any]] = []
        for row in rows:
            step = row.get("step")
            if not isinstance(step, (int, float)) or step != step:
                continue
            if kept and kept[-1]["step"] > step:  # a resumed run
                kept = [earlier for earlier in kept if earlier["step"] < step]
            kept.append(row)
        columns: defaultdict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
        for row in kept:
            for key, value in row.items():
                if key != "step" and isinstance(value, (int, float, NoneType)) and not isinstance(value, bool):
                    steps, values = columns[key]
                    steps.append(row["step"])
                    values.append(math.nan if value is None else value)  # TRL logs NaN as None
        self._series = {
            key: Series(np.asarray(steps, np.int64), np.asarray(values, np.float64))
            for key, (steps, values) in columns.items()
        }
        self.last_step = int(kept[-1]["step"]) if kept else 0

    @classmethod
    def read(cls, path: str | Path) -> "History":
        """Read an output folder, a checkpoint, or a file with a log.

        A file is a `trainer_state.json`, or JSON with the rows under "history" as recipes write it.

        Raises:
            ValueError: There is no log. The message says where it was looked for.
        """
        path = Path(path)
        file = path if path.is_file() else _newest_state(path)
        if file is None:
            raise ValueError(
                f"{path} has no {_STATE} and no checkpoint with one. Give an output folder, a checkpoint, or the file."
            )
        try:
            state = json.loads(file.read_text())
            rows = state["log_history"] if "log_history" in state else state["history"]
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{file} is no log of a run: it has no rows under 'log_history' ({error}).") from None
        file = file.parent / RUN_FILE
        run = json.loads(file.read_text()) if file.is_file() else {}
        if state.get("max_steps", 0) > 0:  # the config of a run of epochs has -1
            run["settings"] = {**run.get("settings", {}), "max_steps": state["max_steps"]}
        return cls(rows, run)

    def until(self, step: int) -> "History":
        """Return the history as it was at an optimizer step, while the run trained."""
        early = copy(self)
        known = {key: each for key, each in self._series.items() if each.steps[0] <= step}
        early._series = {key: Series(*(part[each.steps <= step] for part in each)) for key, each in known.items()}
        early.is_over, early.last_step = False, step
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

    def first(self, *keys: str) -> str:
        """Return the first of these metrics that the run has logged. Raises KeyError if there is none."""
        for key in keys:
            if key in self._series:
                return key
        raise KeyError(" | ".join(keys))


def _newest_state(folder: Path) -> Path | None:
    files = [file for file in (folder / _STATE, *folder.glob(f"checkpoint-*/{_STATE}")) if file.is_file()]
    return max(files, key=lambda file: json.loads(file.read_text()).get("global_step", 0), default=None)


def counted(number: int, noun: str) -> str:
    """Return words such as "1 step" or "2 steps"."""
    return f"{number} {noun}{'s' * (number != 1)}"
