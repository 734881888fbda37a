"""Further metrics: means over micro-batches, as in TRL, and statistics of all samples since the last log.

Everything is summed up on the device. Processes communicate, and numbers go to the CPU, only when they are read: for
a log, for a checkpoint, or for a rule that depends on them.
"""

import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, cast

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from trl_steady.functional import pooling

_MOST_WAITING = 4096  # micro-batches' means on the device, if a run logs rarely or never
_MOST_MARKS = 4096  # of a clock that nothing reads
_QUANTILES = {"q01": 0.01, "q50": 0.5, "q90": 0.9, "q99": 0.99}
_EXTREMES = {"min": -1, "max": 1}  # kind -> sign: its totals are the greatest of the values times this
_SUM, _COUNT, _LOW, _HIGH = range(4)  # of the statistics of a micro-batch
Masked = tuple[Tensor, Tensor]
"""Values, and a mask of the same shape: True = counts."""
_Pool = dict[tuple[str, str], Tensor]
"""Kind and name -> totals that add up, or the greatest value."""
_Mark = float | torch.cuda.Event


class Source(Protocol):
    """The trainer, as its metrics see it."""

    accelerator: Accelerator
    model: torch.nn.Module
    logged_values: Mapping[str, defaultdict[str, list[float]]]
    """"train" or "eval" -> name -> values that TRL will log as one mean."""


class Metrics:
    """The metrics of a trainer. Every process must record the same names in the same order."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.clock = Clock()
        self._has_compared_names = False
        # "train" or "eval" -> "min", "mean" or "max" with the name to log it by, and (4,) sum, number, minimum and
        # maximum of the values in one micro-batch, since processes last communicated
        self._of_micro_batches: defaultdict[str, list[tuple[Mapping[str, str], Tensor]]] = defaultdict(list)
        # the same -> totals since the last log
        self._pools: defaultdict[str, _Pool] = defaultdict(dict)

    def token_mean(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Log the mean of `values` (B, T) over the loss tokens of all processes, for this micro-batch."""
        self._record({"mean": name}, self._statistics(values, mask))

    def over_processes(self, names: Mapping[str, str], values: Tensor, mask: Tensor) -> None:
        """Log "min", "mean" or "max" of `values` by these names. The mean is that of the processes' means, as TRL's.

        A process whose `mask` is False everywhere counts with 0.
        """
        total, count, low, high = self._statistics(values, mask)
        mean = total / count.clamp(min=1)
        low = low.where(count > 0, 0)
        high = high.where(count > 0, 0)
        self._record(names, torch.stack([mean, torch.ones_like(count), low, high]))

    def _statistics(self, values: Tensor, mask: Tensor) -> Tensor:
        values, mask = self._countable(values, mask)
        values = values.double()
        low = values.where(mask, torch.inf).min()
        high = values.where(mask, -torch.inf).max()
        return torch.stack([values.where(mask, 0).sum(), mask.sum().double(), low, high])

    def _record(self, names: Mapping[str, str], statistics: Tensor) -> None:
        self._of_micro_batches[self._mode].append((names, statistics))
        if len(self._of_micro_batches[self._mode]) >= _MOST_WAITING:  # at the same micro-batch on all processes
            self.settle()

    def pooled(
        self,
        *,
        means: Mapping[str, Masked] | None = None,
        rare_means: Mapping[str, Masked] | None = None,
        minima: Mapping[str, Masked] | None = None,
        maxima: Mapping[str, Masked] | None = None,
        sums: Mapping[str, Tensor] | None = None,
        quantiles: Mapping[str, Masked] | None = None,
        sample_sizes: Mapping[str, Masked] | None = None,
    ) -> None:
        """Add samples whose statistics over all processes and micro-batches are logged next time.

        Args:
            means: name -> values. Their mean is logged, NaN if none count.
            rare_means: name -> values. Their mean is logged if any count.
            minima: name -> values. The least is logged.
            maxima: name -> values. The greatest is logged.
            sums: name -> (2,) a sum of values and their number. The mean is logged.
            quantiles: name -> values. Quantiles are logged as `name_q01` and so on.
            sample_sizes: name -> log-weights. Their effective sample size is logged.
        """
        for name, (values, mask) in (means or {}).items():
            self._add_samples(("mean", name), pooling.mean_totals, values, mask)
        for name, (values, mask) in (rare_means or {}).items():
            self._add_samples(("rare mean", name), pooling.mean_totals, values, mask)
        for name, (values, mask) in (minima or {}).items():
            self._add_samples(("min", name), pooling.greatest, -values, mask)
        for name, (values, mask) in (maxima or {}).items():
            self._add_samples(("max", name), pooling.greatest, values, mask)
        for name, (values, mask) in (quantiles or {}).items():
            self._add_samples(("quantiles", name), pooling.histogram, values, mask)
        for name, (values, mask) in (sample_sizes or {}).items():
            self._add_samples(("size", name), pooling.sample_size_totals, values, mask)
        for name, total in (sums or {}).items():
            (total,) = self._countable(total)
            self._add_totals(("mean", name), total.double())

    def _add_samples(
        self, key: tuple[str, str], compute: Callable[[Tensor, Tensor], Tensor], values: Tensor, mask: Tensor
    ) -> None:
        values, mask = self._countable(values, mask)
        self._add_totals(key, compute(values, mask))

    def _add_totals(self, key: tuple[str, str], totals: Tensor) -> None:
        pool = self._pools[self._mode]
        if key[0] in _EXTREMES:
            pool[key] = totals.maximum(pool.get(key, totals))
        else:
            pool[key] = totals + pool.get(key, 0)

    def forget(self) -> None:
        """Forget everything since the last log."""
        self._of_micro_batches.clear()
        self._pools.clear()

    def count(self, name: str) -> int:
        """Return how many micro-batches of training have recorded the mean of `name` since the last log."""
        waiting = sum(names.get("mean") == name for names, _ in self._of_micro_batches["train"])
        return len(self._source.logged_values["train"].get(name, [])) + waiting

    @property
    def is_settled(self) -> bool:
        """True if there are no means of training's micro-batches that only this process knows."""
        return not self._of_micro_batches["train"]

    def settle(self) -> None:
        """Hand the means of micro-batches to TRL, which logs them. Every process must call this method."""
        for mode in list(self._of_micro_batches):
            self._exchange(mode, {})

    def log(self, logs: Mapping[str, object], *, is_collective: bool) -> None:
        """Hand all metrics to TRL before it writes `logs`, and begin anew.

        With several processes, only a log that every process writes (`is_collective`) exchanges metrics. A script may
        call `Trainer.log` on one process, where nobody else would take part.
        """
        for values in self._source.logged_values[self._mode].values():  # a log is written as JSON
            values[:] = map(_plain, values)
        if self._source.accelerator.num_processes > 1 and not is_collective:
            return
        mode = self._mode
        if "loss" in logs:
            for phase, seconds in self.clock.read().items():
                self._source.logged_values[mode][f"time/{phase}"].append(seconds)
        for name, value in _summary(self._exchange(mode, self._pools.pop(mode, {}))):
            self._source.logged_values[mode][name].append(value)

    def state(self) -> dict[tuple[str, str], list[float]]:
        """Return the totals of training over all processes, for a checkpoint. Every process must call this method."""
        return {key: total.tolist() for key, total in self._exchange("train", self._pools["train"]).items()}

    def restore(self, state: Mapping[tuple[str, str], list[float]]) -> None:
        """Continue with the totals of `state`, of which each process must get the same."""
        is_main = self._source.accelerator.is_main_process
        for key, values in state.items():
            totals = torch.tensor(values, dtype=torch.float64)
            if not is_main and key[0] not in _EXTREMES:  # one process brings what adds up
                totals = torch.zeros_like(totals)
            (self._pools["train"][key],) = self._countable(totals)

    def _refuse_other_names(self, *names: object) -> None:
        """Raise an error if processes have recorded other metrics, once per run: they would add up different ones."""
        if self._has_compared_names:
            return
        self._has_compared_names = True
        hashes: list[int] = gather_object([zlib.crc32(repr(names).encode())])
        if len(set(hashes)) > 1:
            raise RuntimeError(
                f"processes have recorded different metrics, and process {self._source.accelerator.process_index} "
                f"these: {names}. A feature or a script must record the same names on all processes."
            )

    def _countable(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return tensors without gradient on the device, or on the CPU if the device may have no float64."""
        device = self._source.accelerator.device
        if device.type != "cuda":
            device = torch.device("cpu")
        return tuple(tensor.detach().to(device) for tensor in tensors)

    @property
    def _mode(self) -> str:
        return "train" if self._source.model.training else "eval"

    def _exchange(self, mode: str, pool: _Pool) -> _Pool:
        """Hand means to TRL, and return totals over all processes on the CPU: one collective, one transfer."""
        steps = self._of_micro_batches.pop(mode, [])
        parts = [step for _, step in steps]
        parts += pool.values()
        if not parts:
            return {}
        by_process = torch.cat(parts).unsqueeze(0)
        if self._source.accelerator.num_processes > 1:
            self._refuse_other_names([tuple(names.values()) for names, _ in steps], list(pool))
            by_process = cast(Tensor, self._source.accelerator.gather(by_process))
        by_process = by_process.cpu()
        lengths = [len(part) for part in parts]
        totals = by_process.sum(0).split(lengths)
        lows = by_process.amin(0).split(lengths)
        highs = by_process.amax(0).split(lengths)
        logged = self._source.logged_values[mode]
        for (names, _), total, low, high in zip(steps, totals, lows, highs, strict=False):
            mean = float(total[_SUM]) / max(float(total[_COUNT]), 1)
            values = {"min": float(low[_LOW]), "mean": mean, "max": float(high[_HIGH])}
            for statistic, name in names.items():
                logged[name].append(values[statistic])
        pooled: _Pool = {}
        for key, total, high in zip(pool, totals[len(steps) :], highs[len(steps) :], strict=True):
            pooled[key] = high if key[0] in _EXTREMES else total
        return pooled


def _plain(value: Any) -> Any:
    """Return a number of NumPy or torch as one that JSON knows."""
    return float(value) if isinstance(value, (np.generic, Tensor)) else value


def _summary(pool: _Pool) -> Iterator[tuple[str, float]]:
    for (kind, name), totals in pool.items():
        if kind == "mean":
            yield name, pooling.mean(totals)
        elif kind == "rare mean":
            if totals[1]:
                yield name, pooling.mean(totals)
        elif kind == "size":
            yield name, pooling.effective_sample_size(totals)
        elif kind in _EXTREMES:
            if totals > -torch.inf:
                yield name, _EXTREMES[kind] * float(totals)
            else:
                yield name, float("nan")
        else:
            for suffix, share in _QUANTILES.items():
                yield f"{name}_{suffix}", pooling.quantile(totals, share)


class Clock:
    """Measures phases, each without those inside it. A phase counts only inside "update", so not in an evaluation."""

    def __init__(self) -> None:
        self.is_on = False
        self.steps = 0
        """Optimizer steps since the last reading."""
        self._phase: str | None = None
        # the phases that began, and when; CUDA events, because a launch returns before its kernel runs
        self._marks: list[tuple[str | None, _Mark]] = []
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str | None) -> Generator[None]:
        """Measure this context as a part of the phase `name`, or of the one around it if that is None."""
        outer = self._phase
        if not self.is_on or name is None or (outer is None and name != "update"):
            yield
            return
        self._begin(name)
        try:
            yield
        finally:
            self._begin(outer)

    def read(self) -> dict[str, float]:
        """Return the seconds of each phase for an optimizer step, since the last reading. Waits for the device."""
        self._add_up()
        seconds = {phase: total / max(self.steps, 1) for phase, total in self._seconds.items()}
        self._seconds.clear()
        self.steps = 0
        return seconds

    def _begin(self, name: str | None) -> None:
        self._phase = name
        self._marks.append((name, _now()))
        if len(self._marks) >= _MOST_MARKS:
            self._add_up()

    def _add_up(self) -> None:
        for (name, begin), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            if name is not None:
                self._seconds[name] += _between(begin, end)
        del self._marks[:-1]


def _now() -> _Mark:
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(begin: _Mark, end: _Mark) -> float:
    if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        end.synchronize()
        return begin.elapsed_time(end) / 1000
    return cast(float, end) - cast(float, begin)
